"""Gives all engines a trainer's weights, from its tensors to their next token. Needs the extra `[train]`."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import ConfigError, EngineFailed, InvalidWeights, NoBackend, RequestTimeout
from .inference.adapters import CONFIG as ADAPTER_CONFIG
from .inference.adapters import WEIGHTS as ADAPTER_WEIGHTS
from .inference.adapters import check_adapter
from .inference.checkpoint import INDEX, read_tensors
from .system.held_file import claim_folder
from .system.installation import how_to_install
from .wire.messages.base import POLICY

try:
    import torch
    from safetensors.torch import save_file
    from torch.distributed.tensor import DTensor

    from .system.ranks import raise_everywhere, rank
except ImportError as error:
    message = f"prorl_zmq.weights_publisher needs PyTorch and safetensors: {how_to_install('train')}"
    raise ImportError(message) from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Self

    from .client.blocking.client import RolloutClient
    from .inference.checkpoint import TensorKind
    from .wire.messages.backends import Backend
    from .wire.messages.engines import UpdateMode

log = logging.getLogger("prorl.trainer")

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By the words of safetensors."""
PART_BYTES = 5 * 2**30
UPDATE_S = 600.0
RETRY_S = 1.0
MADE = re.compile(r"\.?weights-\d+")
"""The folders that are ours to remove."""


class Published(NamedTuple):
    """What one `publish` did."""

    path: Path
    """The folder that the engines have read."""
    tensors: int
    size_bytes: int
    gather_s: float
    """Seconds until all tensors were whole, of the served dtype, and on the CPU."""
    write_s: float
    """Seconds of writing files."""
    update_s: float
    """Seconds until all engines served them."""

    @property
    def seconds(self) -> dict[str, float]:
        """How long each part took: `gather`, `write`, `update`."""
        return {"gather": self.gather_s, "write": self.write_s, "update": self.update_s}


class WeightsPublisher:
    """Writes a trainer's weights into a new folder, as the served model has them, and has all engines load it.

    Each tensor is cast to the dtype that it has in the served model. A copy of a tied tensor that the served model does
    not have is left out: one that lies where another does, or `lm_head.weight` if its configuration ties embeddings.
    The folder gets its name only when it is whole.

    In a distributed trainer (`torch.distributed`) every rank makes one and calls `publish`, since sharded tensors
    (`DTensor`, as FSDP 2 has them) are gathered by all ranks; rank 0 writes, and what fails there is raised on each.

    Args:
        client: of rank 0; None on the others. Or a function that opens it, on all ranks: rank 0 calls it, and `close`
            closes the client.
        served: the folder of the model that the engines were started with: its safetensors files say which tensors
            there are, their shapes and dtypes.
        folder: where the folders of weights go; all engine hosts see it under this path. Made if it is not there.
        keep: how many folders of weights stay.
        rename: gives the served model's name of a trainer's tensor, or None for one that it does not have.
        mode: what becomes of running generations; see `RolloutClient.begin_weights`.
        part_bytes: a file is ended when it has so many bytes.
        all_ranks: every rank calls `publish`. False: only rank 0 does, with tensors that are whole.
        model: the name of the model that the weights are of.
        lora: the weights are a LoRA adapter on `served`, which the engines serve as `model`; see `publish`. The folder
            is then one that PEFT's `save_pretrained` could have written; `rename` and `part_bytes` do not concern it.
        base: with `lora`, the name of the model that it adapts, if backends of several models have adapter slots.

    Raises:
        ConfigError: another publisher uses the folder, another account could write to it, or a rank has a client that
            should not, or lacks one.
        InvalidWeights: `served` has no safetensors files, or one cannot be read.
    """

    def __init__(
        self,
        client: RolloutClient | Callable[[], RolloutClient] | None,
        served: str | Path,
        folder: str | Path,
        *,
        keep: int = 2,
        rename: Callable[[str], str | None] | None = None,
        mode: UpdateMode = "keep",
        part_bytes: int = PART_BYTES,
        all_ranks: bool = True,
        model: str = POLICY,
        lora: bool = False,
        base: str = "",
    ) -> None:
        if keep < 1:
            raise ConfigError("keep is at least 1: engines read the newest folder", key="keep")
        if base and not lora:
            raise ConfigError("only an adapter (lora=True) has a base model", key="base")
        if (client is not None) != (rank() == 0) and not callable(client):
            raise ConfigError(f"rank 0 has the client, all others None; this is rank {rank()}", key="client")
        self._owned: RolloutClient | None = client() if callable(client) and rank() == 0 else None
        """A client that `close` closes."""
        self._client = self._owned if callable(client) else client
        self._folder = Path(folder).absolute()
        self._keep = keep
        self._rename = rename
        self._mode = mode
        self._model = model
        self._lora = lora
        self._base = base
        self._served_folder = Path(served)
        self._part_bytes = part_bytes
        self._all_ranks = all_ranks
        self._served: dict[str, TensorKind] = {}
        self._lock: int | None = None
        if self._client is None:
            return
        self._served = read_tensors(Path(served))
        self._tied = _tied_names(Path(served))
        try:
            self._lock = claim_folder(self._folder, ".lock")
        except BlockingIOError:
            raise ConfigError(f"another trainer publishes its weights in {folder}", key="folder") from None
        for unfinished in self._folder.glob(".weights-*"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def publish(
        self,
        weights: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
        weight_version: int,
        *,
        timeout_s: float = UPDATE_S,
        lora_config: Mapping[str, Any] | None = None,
    ) -> Published | None:
        """Give the engines new weights; return when all serve them. None on ranks other than 0.

        Args:
            weights: a module, or names and tensors of any shape, dtype and device, each whole or a `DTensor`. With
                `lora`, a `PeftModel`, whose active adapter is published, or what PEFT's `get_peft_model_state_dict`
                returns.
            weight_version: what to call them, such as the trainer's step; its tokens carry it.
            timeout_s: longest wait until an engine serves them, if all fail or are being started again. Engines that
                come back later load them then.
            lora_config: with `lora` and tensors, the `LoraConfig` of the adapter as a dict.

        Raises:
            ConfigError: with `lora`, the module is no `PeftModel`, or `lora_config` is missing.
            InvalidWeights: their names or shapes are not the served model's, or they hold values that are not finite,
                or the adapter is no plain LoRA of linear layers; no engine has seen them. Or an engine refused them.
            ProrlError: as `RolloutClient.update_weights`, at once if no engine will ever take them; the folder stays.
            OSError: the folder cannot be written.
        """
        if self._lora:
            lora_config, pairs = _adapter_of(weights, lora_config)
        else:
            pairs = weights.state_dict().items() if isinstance(weights, torch.nn.Module) else weights
        writer: _Writer | _AdapterWriter | None = None
        if self._client is not None:
            partial = self._folder / f".weights-{weight_version:08d}"
            if lora_config is not None:
                writer = _AdapterWriter(partial, self._served_folder, lora_config)
            else:
                writer = _Writer(partial, self._served, self._tied, self._part_bytes)
        failure: Exception | None = None
        published = None
        began = time.perf_counter()
        for name, tensor in pairs:
            whole = _whole(tensor)  # by all ranks, also after a failure: the others wait for this one
            if writer is not None and failure is None:
                try:
                    renamed = name if self._rename is None or self._lora else self._rename(name)
                    if renamed is not None:
                        writer.add(renamed, whole, tensor)
                except Exception as error:  # noqa: BLE001 - raised below, on all ranks
                    failure = error
        if writer is not None:
            try:
                if failure is None:
                    published = self._finish(writer, weight_version, time.perf_counter() - began, timeout_s)
            except Exception as error:  # noqa: BLE001 - raised below, on all ranks
                failure = error
            finally:
                shutil.rmtree(writer.path, ignore_errors=True)
        if self._all_ranks:
            raise_everywhere(failure)
        elif failure is not None:
            raise failure
        return published

    def close(self) -> None:
        """Let others publish in this folder, and close a client that was opened here."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finish(
        self, writer: _Writer | _AdapterWriter, weight_version: int, passed_s: float, timeout_s: float
    ) -> Published:
        assert self._client is not None, "rank 0 writes"
        gather_s = passed_s - writer.write_s
        writer.finish()
        path = self._folder / f"weights-{weight_version:08d}"
        shutil.rmtree(path, ignore_errors=True)  # of an earlier run of this trainer
        writer.path.rename(path)
        began = time.perf_counter()
        self._update(path, weight_version, timeout_s)
        update_s = time.perf_counter() - began
        made = [old for old in self._folder.iterdir() if MADE.fullmatch(old.name) and old != path]
        for old in sorted(made, key=lambda old: -old.stat().st_mtime)[self._keep - 1 :]:
            shutil.rmtree(old, ignore_errors=True)
        return Published(path, writer.tensors, writer.size_bytes, gather_s, writer.write_s, update_s)

    def _update(self, path: Path, weight_version: int, timeout_s: float) -> None:
        """Have the engines load the weights; an engine that dies meanwhile loads them when it is back."""
        assert self._client is not None, "rank 0 updates"
        until = time.monotonic() + timeout_s
        while True:
            left_s = until - time.monotonic()
            try:
                try:
                    self._client.update_weights(
                        path,
                        weight_version,
                        mode=self._mode,
                        timeout_s=max(1.0, left_s),
                        model=self._model,
                        base=self._base,
                    )
                except (NoBackend, EngineFailed, RequestTimeout) as error:
                    backends = [one.backend for one in self._client.backends.list()]
                    if not any(weight_version in _versions(one, self._model) for one in backends):
                        raise
                    log.warning("%s; the others serve the weights %d", error.message, weight_version)
                break
            except (NoBackend, EngineFailed, RequestTimeout) as error:
                if left_s < RETRY_S or error.fields.get("final"):
                    raise
                log.warning("%s; again in a second", error.message)
                time.sleep(RETRY_S)


class _Writer:
    """Writes one checkpoint, file by file."""

    def __init__(self, path: Path, served: dict[str, TensorKind], tied: set[str], part_bytes: int) -> None:
        self.path = path
        self.tensors = self.size_bytes = 0
        self.write_s = 0.0
        self._served = served
        self._tied = tied
        self._part_bytes = part_bytes
        self._part: dict[str, torch.Tensor] = {}
        self._held = self._parts = 0
        self._files: dict[str, str] = {}
        self._places: dict[tuple[int, ...], list[tuple[str, weakref.ref[torch.Tensor]]]] = {}
        """The tensors that came, by where they lie, which says something only while they live."""
        self._unknown: set[str] = set()
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()

    def add(self, name: str, tensor: torch.Tensor, given: torch.Tensor) -> None:
        """Add a whole tensor, and note where the one lies that the trainer gave for it."""
        kind = self._served.get(name)
        beside = self._places.setdefault(_place(given), [])
        copies = [other for other, alive in beside if alive() is not None]
        beside.append((name, weakref.ref(given)))
        if kind is None:
            if name not in self._tied and not any(other in self._served for other in copies):
                self._unknown.add(name)
            return
        self._unknown -= {*copies}
        if name in self._files:
            raise InvalidWeights(f"the tensor {name} comes twice", path=str(self.path))
        if tuple(tensor.shape) != kind.shape:
            message = f"the tensor {name} has the shape {list(tensor.shape)}, in the served model {list(kind.shape)}"
            raise InvalidWeights(message, path=str(self.path))
        if kind.dtype not in DTYPES:
            raise InvalidWeights(
                f"the served model has {name} as {kind.dtype}: publish none of it", path=str(self.path)
            )
        ours = tensor.detach().to(device="cpu", dtype=DTYPES[kind.dtype]).contiguous()
        if ours.is_floating_point() and not bool(torch.isfinite(ours.float()).all()):
            message = f"the tensor {name} holds values that are not finite numbers as {kind.dtype}"
            raise InvalidWeights(message, path=str(self.path))
        if ours.untyped_storage().nbytes() != ours.nbytes:
            ours = ours.clone()  # a slice of something larger, which may come too
        self._part[name] = ours
        self._files[name] = self._file
        self._held += ours.nbytes
        self.tensors += 1
        self.size_bytes += ours.nbytes
        if self._held >= self._part_bytes:
            self._write()

    def finish(self) -> None:
        lacking = sorted(self._served.keys() - self._files.keys())
        surplus = sorted(self._unknown)
        for names, problem in ((lacking, "does not give"), (surplus, "gives, and the served model does not have")):
            if names:
                some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
                message = f"there are tensors that the trainer {problem}: {some}; see `rename`"
                raise InvalidWeights(message, path=str(self.path))
        self._write()
        index = {"metadata": {"total_size": self.size_bytes}, "weight_map": self._files}
        (self.path / INDEX).write_text(json.dumps(index))

    def _write(self) -> None:
        if self._part:
            began = time.perf_counter()
            save_file(self._part, self.path / self._file, metadata={"format": "pt"})
            self.write_s += time.perf_counter() - began
            self._part, self._held = {}, 0
            self._parts += 1

    @property
    def _file(self) -> str:
        return f"model-{self._parts:05d}.safetensors"


class _AdapterWriter:
    """Writes one adapter, and checks that the served model can have it."""

    def __init__(self, path: Path, base: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self.tensors = self.size_bytes = 0
        self.write_s = 0.0
        self._base = base
        self._config = config
        self._held: dict[str, torch.Tensor] = {}
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()

    def add(self, name: str, tensor: torch.Tensor, given: torch.Tensor) -> None:  # noqa: ARG002 - as `_Writer.add`
        ours = tensor.detach().to("cpu", copy=True).contiguous()
        self._held[name] = ours
        self.tensors += 1
        self.size_bytes += ours.nbytes

    def finish(self) -> None:
        began = time.perf_counter()
        save_file(self._held, self.path / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        plain = {key: value for key, value in self._config.items() if key != "runtime_config"}  # not PEFT's to save
        (self.path / ADAPTER_CONFIG).write_text(json.dumps(plain, default=_plain, indent=2), encoding="utf-8")
        self.write_s = time.perf_counter() - began
        check_adapter(self.path, self._base, self._config.get("r", 0))


def _adapter_of(
    weights: torch.nn.Module | Iterable[tuple[str, torch.Tensor]], config: Mapping[str, Any] | None
) -> tuple[Mapping[str, Any], Iterable[tuple[str, torch.Tensor]]]:
    """Return an adapter's configuration and tensors."""
    if not isinstance(weights, torch.nn.Module):
        if config is None:
            raise ConfigError("an adapter's tensors need lora_config, its LoraConfig as a dict", key="lora_config")
        return config, weights
    if not hasattr(weights, "peft_config"):
        raise ConfigError(f"lora publishes the adapter of a PeftModel; {type(weights).__name__} is none", key="lora")
    from peft import get_peft_model_state_dict

    module: Any = weights
    name = module.active_adapter
    # `save_embedding_layers` would look for the base at the hub.
    tensors = get_peft_model_state_dict(module, adapter_name=name, save_embedding_layers=False)
    return module.peft_config[name].to_dict(), tensors.items()


def _versions(backend: Backend, model: str) -> tuple[int, ...]:
    """Return the versions of a model that a backend serves."""
    return (backend.weight_version,) if backend.name == model else backend.adapters.get(model, ())


def _plain(value: Any) -> Any:
    """Return a value of a `LoraConfig` that JSON does not have."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def _tied_names(served: Path) -> set[str]:
    """Return the names under which a trainer may give copies that the served model does not have."""
    try:
        config = json.loads((served / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    tied = config.get("tie_word_embeddings") or config.get("text_config", {}).get("tie_word_embeddings")
    return {"lm_head.weight"} if tied else set()


def _place(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return what two names of one tensor share."""
    ours = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return (ours.data_ptr(), *tensor.shape, *tensor.stride())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
