"""Gives all engines a trainer's weights, from its tensors to their next token. Needs the extra `[train]`."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from .errors import Closed, ConfigError, EngineFailed, InvalidWeights, NoBackend, ProrlError, RequestTimeout
from .inference.checkpoint import index_metadata, read_tensors
from .inference.weights.version_chain import Content
from .system.held_file import claim_folder
from .system.installation import how_to_install
from .wire.messages.base import POLICY

try:
    import torch
    from torch.distributed.tensor import DTensor

    from .inference.weights.tensor_writers import AdapterWriter, DeltaWriter, FullWriter, HeldTensors
    from .system.ranks import raise_everywhere, rank
except ImportError as error:
    message = f"prorl_zmq.weights_publisher needs PyTorch and safetensors: {how_to_install('train')}"
    raise ImportError(message) from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Self

    from .client.blocking.client import RolloutClient
    from .inference.checkpoint import TensorKind
    from .inference.relay.publisher_relay import PublisherRelay
    from .inference.weights.published_weights import PublishedWeights
    from .wire.messages.backends import Backend
    from .wire.messages.engines import UpdateMode, UpdateTimes
    from .wire.messages.relay import WeightRelay

log = logging.getLogger("prorl.trainer")

WeightsForm = Literal["full", "delta", "vllm"]
"""What is written of a version; `vllm`: nothing."""
PART_BYTES = 5 * 2**30
LARGE_SHARE = 0.2
"""Of a full version: of a larger delta, the trainer is warned."""
UPDATE_S = 600.0
VERSIONS = range(2**31)
RETRY_S = 1.0
Writer = FullWriter | DeltaWriter | AdapterWriter | HeldTensors
MADE = re.compile(r"\.?weights-\d+")
"""The folders that are ours to remove."""


class Published(NamedTuple):
    """What one `publish` did."""

    path: Path | None
    """The folder that the engines have read; None: they have read none."""
    tensors: int
    size_bytes: int
    """Of all tensors."""
    gather_s: float
    """Seconds until all tensors were whole, of the served dtype, and on the CPU. For a delta, also until they were
    compared and compressed."""
    write_s: float
    """Seconds of writing files."""
    update_s: float
    """Seconds until all engines served them."""
    written_bytes: int
    """Of the version's files."""
    engines: Mapping[str, UpdateTimes]
    """What the update cost each engine, by its backend's id; empty if one failed."""

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
        folder: where the folders of weights go; all engine hosts see it under this path. Made if it is not there. With
            `form="vllm"` it is not used, and may be None.
        form: `full` writes all tensors. `delta` writes what changed since the last version, compressed, and a full
            version first and whenever the deltas since would be half of one; it keeps a copy of the weights in memory.
            Folders are then named `weight_v000012`; those that an engine or a new host needs stay. `vllm` writes none:
            while the engines pause, rank 0 sends the tensors by vLLM's own weight transfer, from a copy in its memory.
            It needs vLLM here and in all engines of the model, which start with `--weight-transfer-config`.
        keep: how many folders of full weights stay.
        rename: gives the served model's name of a trainer's tensor, or None for one that it does not have.
        mode: what becomes of running generations; see `RolloutClient.begin_weights`.
        part_bytes: a file is ended when it has so many bytes.
        all_ranks: every rank calls `publish`. False: only rank 0 does, with tensors that are whole.
        model: the name of the model that the weights are of.
        lora: the weights are a LoRA adapter on `served`, which the engines serve as `model`; see `publish`. The folder
            is then one that PEFT's `save_pretrained` could have written; `rename` and `part_bytes` do not concern it.
        base: with `lora`, the name of the model that it adapts, if backends of several models have adapter slots.
        relay: with `form="delta"`, where this process serves the folder to engine hosts that do not see it, as
            `tcp://ADDRESS:*` with an address that they reach. They fetch the versions from here and from each other.
            Empty: all hosts see the folder. Beyond loopback, the client needs keys.
        group: with `form="vllm"`, gives the `TrainerInitInfo` of vLLM for a group of so many processes, of which this
            one is rank 0; it is called for each update. None: one of vLLM's backend `nccl`.

    Raises:
        InvalidEndpoint, EndpointInUse: `relay` cannot be bound, or needs keys that the client does not have.
        ConfigError: another publisher uses the folder, another account could write to it, a rank has a client that
            should not, or lacks one, or a library for deltas is missing.
        InvalidWeights: `served` has no safetensors files, or one cannot be read.
    """

    def __init__(
        self,
        client: RolloutClient | Callable[[], RolloutClient] | None,
        served: str | Path,
        folder: str | Path | None,
        *,
        form: WeightsForm = "full",
        keep: int = 2,
        rename: Callable[[str], str | None] | None = None,
        mode: UpdateMode = "keep",
        part_bytes: int = PART_BYTES,
        all_ranks: bool = True,
        model: str = POLICY,
        lora: bool = False,
        base: str = "",
        relay: str = "",
        group: Callable[[int], Any] | None = None,
    ) -> None:
        if keep < 1:
            raise ConfigError("keep is at least 1: engines read the newest folder", key="keep")
        _check_form(form, folder, lora=lora, relay=relay, grouped=group is not None)
        if base and not lora:
            raise ConfigError("only an adapter (lora=True) has a base model", key="base")
        if (client is not None) != (rank() == 0) and not callable(client):
            raise ConfigError(f"rank 0 has the client, all others None; this is rank {rank()}", key="client")
        self._owned: RolloutClient | None = client() if callable(client) and rank() == 0 else None
        """A client that `close` closes."""
        self._client = self._owned if callable(client) else client
        self._folder = Path(folder or served).absolute()
        self._form = form
        self._group = group
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
        self._versions: PublishedWeights | None = None
        """The versions of the form `delta`."""
        self._relay: PublisherRelay | None = None
        self._warned = False
        self._closed = False
        self._lock: int | None = None
        if self._client is not None:
            try:
                self._open(self._client, form, relay)
            except BaseException:
                self.close()
                raise

    def _open(self, client: RolloutClient, form: str, relay: str) -> None:
        self._served = read_tensors(self._served_folder)
        self._tied = _tied_names(self._served_folder)
        if form == "vllm":
            from .group_transfer import nccl_group

            self._group = self._group or nccl_group
            return
        try:
            self._lock = claim_folder(self._folder, ".lock")
        except BlockingIOError:
            message = f"another trainer publishes its weights in {self._folder}: end it, or give another `folder`"
            raise ConfigError(message, key="folder") from None
        if form == "delta":
            try:
                from .inference.weights.published_weights import PublishedWeights
            except ImportError as error:
                raise ConfigError(str(error), key="form") from error
            self._versions = PublishedWeights(self._folder, self._served)
        if relay:
            from .inference.relay.publisher_relay import PublisherRelay
            from .inference.relay.relay_address import check_relay_address, warn_of_unreached

            backends = client.backends
            check_relay_address(relay, has_keys=backends.keyring is not None)
            warn_of_unreached(relay, [one.backend for one in backends.list()])
            self._relay = PublisherRelay(self._folder, relay, backends.keyring, backends.ask)
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
            weight_version: what to call them, such as the trainer's step, from 0 to 2147483647; its tokens carry it.
            timeout_s: longest wait until an engine serves them, if all fail or are being started again. Engines that
                come back later load them then.
            lora_config: with `lora` and tensors, the `LoraConfig` of the adapter as a dict.

        Raises:
            Closed: the publisher was closed.
            ConfigError: `weight_version` is not allowed; or with `lora`, the module is no `PeftModel`, or `lora_config`
                is missing.
            InvalidWeights: their names or shapes are not the served model's, or they hold values that are not finite,
                or the adapter is no plain LoRA of linear layers; no engine has seen them. Or an engine refused them.
            ProrlError: as `RolloutClient.update_weights`, at once if no engine will ever take them; the folder stays.
            OSError: the folder cannot be written.
        """
        if self._lora:
            lora_config, pairs = _adapter_of(weights, lora_config)
        else:
            pairs = weights.state_dict().items() if isinstance(weights, torch.nn.Module) else weights
        failure = self._refusal(weight_version)
        writer = None if self._client is None or failure is not None else self._writer(weight_version, lora_config)
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
                writer.close()
        if self._all_ranks:
            raise_everywhere(failure)
        elif failure is not None:
            raise failure
        return published

    def close(self) -> None:
        """Let others publish in this folder, and close a client that was opened here."""
        self._closed = True
        if self._relay is not None:
            self._relay.close()
        if self._versions is not None:
            self._versions.close()
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refusal(self, weight_version: object) -> Exception | None:
        """Return the error of a publisher, or a version, that cannot be published."""
        if self._closed:
            return Closed("this publisher was closed: make another one to publish")
        if not isinstance(weight_version, int) or weight_version not in VERSIONS:
            allowed = f"a whole number from 0 to {VERSIONS[-1]}"
            return ConfigError(f"weight_version is {allowed}, not {weight_version!r}", key="weight_version")
        return None

    def _writer(self, weight_version: int, lora_config: Mapping[str, Any] | None) -> Writer:
        if self._form == "vllm":
            return HeldTensors(self._folder, self._served, self._tied)
        if self._versions is not None:
            return DeltaWriter(self._folder, self._served, self._tied, self._versions)
        path = self._folder / f"weights-{weight_version:08d}"
        if lora_config is not None:
            return AdapterWriter(path, self._served_folder, lora_config)
        return FullWriter(path, self._served, self._tied, self._part_bytes)

    def _finish(
        self,
        writer: Writer,
        weight_version: int,
        passed_s: float,
        timeout_s: float,
    ) -> Published:
        assert self._client is not None, "rank 0 writes"
        gather_s = passed_s - writer.write_s
        path = writer.finish(weight_version)
        size_bytes = writer.size_bytes
        if LARGE_SHARE * size_bytes < writer.written_bytes < size_bytes and not self._warned:
            self._warned = True
            share = writer.written_bytes / size_bytes
            log.warning(
                "the delta to weights %d is %.0f %% of all weights: deltas pay at low learning rates and with an "
                "update for each step",
                weight_version,
                100 * share,
            )
        began = time.perf_counter()
        write_s = writer.write_s
        try:
            try:
                engines = self._update(writer, path, weight_version, timeout_s)
            except InvalidWeights as error:
                is_ours = path is not None and index_metadata(path).get("weights") == writer.digest
                if not isinstance(writer, DeltaWriter) or writer.is_full or not is_ours:
                    raise
                log.warning("%s; weights %d are published again, in full", error.message, weight_version)
                path = writer.finish_in_full()
                engines = self._update(writer, path, weight_version, timeout_s)
        except InvalidWeights:
            if self._versions is not None:
                self._versions.discard()  # the next version is full: it needs none that an engine lacks or rejects
            raise
        update_s = time.perf_counter() - began - (writer.write_s - write_s)
        if self._versions is None and path is not None:
            made = [old for old in self._folder.iterdir() if MADE.fullmatch(old.name) and old != path]
            for old in sorted(made, key=lambda old: -old.stat().st_mtime)[self._keep - 1 :]:
                shutil.rmtree(old, ignore_errors=True)
        elif self._versions is not None:
            self._prune(self._versions, weight_version)
        spent = (gather_s, writer.write_s, update_s)
        return Published(path, writer.tensors, size_bytes, *spent, writer.written_bytes, engines)

    def _prune(self, versions: PublishedWeights, weight_version: int) -> None:
        """Delete versions that no engine needs, unless the service does not say what engines have."""
        assert self._client is not None, "rank 0 writes"
        try:
            backends = [one.backend for one in self._client.backends.list()]
        except ProrlError as error:
            log.warning("no old weights are deleted: %s", error.message)
            return
        have = [Content(one.weight_version) for one in backends if one.name == self._model and not one.frozen]
        versions.prune(weight_version, have)

    def _update(
        self, writer: Writer, path: Path | None, weight_version: int, timeout_s: float
    ) -> Mapping[str, UpdateTimes]:
        """Have the engines take the weights; one that dies meanwhile loads them from a folder when it is back."""
        assert self._client is not None, "rank 0 updates"
        until = time.monotonic() + timeout_s
        relay = self._relay.relay(path) if self._relay is not None and path is not None else None
        while True:
            left_s = until - time.monotonic()
            try:
                try:
                    return self._give(writer, path, weight_version, max(1.0, left_s), relay)
                except (NoBackend, EngineFailed, RequestTimeout) as error:
                    backends = [one.backend for one in self._client.backends.list()]
                    if not any(weight_version in _versions(one, self._model) for one in backends):
                        raise
                    log.warning("%s; the others serve the weights %d", error.message, weight_version)
                    return {}
            except (NoBackend, EngineFailed, RequestTimeout) as error:
                if left_s < RETRY_S or error.fields.get("final"):
                    raise
                log.warning("%s; again in a second", error.message)
                time.sleep(RETRY_S)

    def _give(
        self, writer: Writer, path: Path | None, weight_version: int, limit_s: float, relay: WeightRelay | None
    ) -> Mapping[str, UpdateTimes]:
        assert self._client is not None, "rank 0 updates"
        if path is not None:
            return self._client.update_weights(
                path,
                weight_version,
                mode=self._mode,
                timeout_s=limit_s,
                model=self._model,
                base=self._base,
                digest=writer.digest,
                relay=relay,
            )
        from .group_transfer import give

        assert isinstance(writer, HeldTensors), "only those have no folder"
        assert self._group is not None, "made with the publisher"
        give(
            self._client,
            writer.held,
            weight_version,
            model=self._model,
            mode=self._mode,
            group=self._group,
            limit_s=limit_s,
        )
        return {}


def _check_form(form: WeightsForm, folder: str | Path | None, *, lora: bool, relay: str, grouped: bool) -> None:
    if form not in get_args(WeightsForm):
        raise ConfigError(f"form is {' or '.join(get_args(WeightsForm))}, not {form!r}", key="form")
    if folder is None and form != "vllm":
        raise ConfigError(f"the form {form} needs a folder", key="folder")
    if grouped and form != "vllm":
        raise ConfigError("only the form vllm has a group", key="group")
    if lora and relay:
        raise ConfigError("adapters (lora=True) have no relay: all hosts must see their folder", key="relay")
    if lora and form != "full":
        raise ConfigError("an adapter (lora=True) is written in full each time", key="form")
    if relay and form != "delta":
        raise ConfigError(f"relay is for form='delta': the form {form} has no checksums", key="relay")


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


def _tied_names(served: Path) -> set[str]:
    """Return the names under which a trainer may give copies that the served model does not have."""
    try:
        config = json.loads((served / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    tied = config.get("tie_word_embeddings") or config.get("text_config", {}).get("tie_word_embeddings")
    return {"lm_head.weight"} if tied else set()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
