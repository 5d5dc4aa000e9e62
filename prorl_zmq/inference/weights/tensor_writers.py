"""Writers of one version of weights, from tensors: in full, as a delta, as a LoRA adapter, or nowhere.

Each has `add` for every whole tensor, `finish`, which returns the version's folder if there is one, and `close`, which
drops what was not finished. Tensors stay unchanged until then. A folder gets its name, or its index, when it is whole.
The methods raise `InvalidWeights` for tensors that the served model cannot have, and `OSError` if the folder cannot be
written.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from ...errors import InvalidWeights
from ..adapters import CONFIG, EXPONENTS, WEIGHTS, check_adapter
from ..checkpoint import INDEX

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ..checkpoint import TensorKind
    from .published_weights import PublishedWeights, Written

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
DIGEST_BYTES = 32
FINITE_PIECE = 2**20
"""Elements that are checked at once: they stay in the processor's cache."""


class Tensors:
    """Checks the tensors of one version; a subclass takes them."""

    digest = ""
    """Identifies the content of what was finished; empty: not known."""

    def __init__(self, path: Path, served: dict[str, TensorKind], tied: set[str]) -> None:
        self.tensors = self.size_bytes = 0
        self._path = path
        self._served = served
        self._tied = tied
        self._added: set[str] = set()
        self._places: dict[tuple[int, ...], list[tuple[str, weakref.ref[torch.Tensor]]]] = {}
        """The tensors that came, by where they lie, which says something only while they live."""
        self._unknown: set[str] = set()

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
        if name in self._added:
            raise InvalidWeights(f"the tensor {name} comes twice", path=str(self._path))
        if tuple(tensor.shape) != kind.shape:
            message = f"the tensor {name} has the shape {list(tensor.shape)}, in the served model {list(kind.shape)}"
            raise InvalidWeights(message, path=str(self._path))
        if kind.dtype not in DTYPES:
            raise InvalidWeights(
                f"the served model has {name} as {kind.dtype}: publish none of it", path=str(self._path)
            )
        ours = tensor.detach().to(device="cpu", dtype=DTYPES[kind.dtype]).contiguous()
        if not _is_finite(ours, kind.dtype):
            message = f"the tensor {name} holds values that are not finite numbers as {kind.dtype}"
            raise InvalidWeights(message, path=str(self._path))
        self._added.add(name)
        self.tensors += 1
        self.size_bytes += ours.nbytes
        self._take(name, ours)

    def _take(self, name: str, ours: torch.Tensor) -> None:
        raise NotImplementedError

    def _check_whole(self) -> None:
        lacking = sorted(self._served.keys() - self._added)
        surplus = sorted(self._unknown)
        for names, problem in ((lacking, "does not give"), (surplus, "gives, and the served model does not have")):
            if names:
                some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
                message = f"there are tensors that the trainer {problem}: {some}; see `rename`"
                raise InvalidWeights(message, path=str(self._path))


class _Aside:
    """A folder that gets its name when it is whole."""

    def __init__(self, path: Path) -> None:
        self._named = path
        self.partial = path.with_name(f".{path.name}")
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir()

    def name(self) -> Path:
        shutil.rmtree(self._named, ignore_errors=True)  # of an earlier run of this trainer
        return self.partial.rename(self._named)

    def close(self) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)


class FullWriter(Tensors):
    """Writes one checkpoint, file by file."""

    def __init__(self, path: Path, served: dict[str, TensorKind], tied: set[str], part_bytes: int) -> None:
        super().__init__(path, served, tied)
        self.write_s = 0.0
        self._folder = _Aside(path)
        self._part_bytes = part_bytes
        self._part: dict[str, torch.Tensor] = {}
        self._held = self._parts = 0
        self._files: dict[str, str] = {}

    @property
    def written_bytes(self) -> int:
        return self.size_bytes

    def finish(self, _: int) -> Path:
        self._check_whole()
        self._write()
        self.digest = secrets.token_hex(DIGEST_BYTES)  # no other version has it
        index = {"metadata": {"total_size": self.size_bytes, "weights": self.digest}, "weight_map": self._files}
        (self._folder.partial / INDEX).write_text(json.dumps(index))
        return self._folder.name()

    def close(self) -> None:
        self._folder.close()

    def _take(self, name: str, ours: torch.Tensor) -> None:
        if ours.untyped_storage().nbytes() != ours.nbytes:
            ours = ours.clone()  # a slice of something larger, which may come too
        self._part[name] = ours
        self._files[name] = self._file
        self._held += ours.nbytes
        if self._held >= self._part_bytes:
            self._write()

    def _write(self) -> None:
        if self._part:
            began = time.perf_counter()
            save_file(self._part, self._folder.partial / self._file, metadata={"format": "pt"})
            self.write_s += time.perf_counter() - began
            self._part, self._held = {}, 0
            self._parts += 1

    @property
    def _file(self) -> str:
        return f"model-{self._parts:05d}.safetensors"


class DeltaWriter(Tensors):
    """Writes one version as a delta, or in full where one is due."""

    def __init__(self, path: Path, served: dict[str, TensorKind], tied: set[str], versions: PublishedWeights) -> None:
        super().__init__(path, served, tied)
        self.write_s = 0.0
        self.written_bytes = 0
        self._versions = versions
        self._is_written = False
        self.is_full = False

    def finish(self, version: int) -> Path:
        self._check_whole()
        return self._note(self._versions.write(version))

    def finish_in_full(self) -> Path:
        """Write the finished version again, in full."""
        return self._note(self._versions.write_in_full())

    def _note(self, written: Written) -> Path:
        self._is_written = True
        self.is_full = written.is_full
        self.write_s += written.write_s
        self.digest = written.weights
        self.written_bytes += written.delta_bytes + written.is_full * written.size_bytes
        return written.path

    def close(self) -> None:
        if not self._is_written:
            self._versions.discard()

    def _take(self, name: str, ours: torch.Tensor) -> None:
        self._versions.add(name, ours.reshape(-1).view(torch.uint8).numpy())


class HeldTensors(Tensors):
    """Writes nothing: the tensors go to the engines from memory, by their names."""

    write_s = 0.0
    written_bytes = 0

    def __init__(self, path: Path, served: dict[str, TensorKind], tied: set[str]) -> None:
        super().__init__(path, served, tied)
        self.held: dict[str, torch.Tensor] = {}

    def finish(self, _: int) -> None:
        self._check_whole()

    def close(self) -> None:
        self.held = {}

    def _take(self, name: str, ours: torch.Tensor) -> None:
        self.held[name] = ours


class AdapterWriter:
    """Writes one adapter, and checks that the served model can have it."""

    digest = ""

    def __init__(self, path: Path, base: Path, config: Mapping[str, Any]) -> None:
        self._folder = _Aside(path)
        self.tensors = self.size_bytes = 0
        self.write_s = 0.0
        self._base = base
        self._config = config
        self._held: dict[str, torch.Tensor] = {}

    @property
    def written_bytes(self) -> int:
        return self.size_bytes

    def add(self, name: str, tensor: torch.Tensor, given: torch.Tensor) -> None:  # noqa: ARG002 - as `Tensors.add`
        ours = tensor.detach().to("cpu", copy=True).contiguous()
        self._held[name] = ours
        self.tensors += 1
        self.size_bytes += ours.nbytes

    def finish(self, _: int) -> Path:
        began = time.perf_counter()
        path = self._folder.partial
        save_file(self._held, path / WEIGHTS, metadata={"format": "pt"})
        plain = {key: value for key, value in self._config.items() if key != "runtime_config"}  # not PEFT's to save
        (path / CONFIG).write_text(json.dumps(plain, default=_plain, indent=2), encoding="utf-8")
        self.write_s = time.perf_counter() - began
        check_adapter(path, self._base, self._config.get("r", 0))
        return self._folder.name()

    def close(self) -> None:
        self._folder.close()


def _is_finite(tensor: torch.Tensor, dtype: str) -> bool:
    """Return whether a tensor has no NaN and no infinity, by its bits: as numbers, each would be copied to float32."""
    if dtype not in EXPONENTS:
        return not tensor.is_floating_point() or bool(torch.isfinite(tensor.float()).all())
    integer, exponent = EXPONENTS[dtype]
    bits = tensor.reshape(-1).view(torch.uint8).numpy().view(integer)
    pieces = (bits[at : at + FINITE_PIECE] for at in range(0, len(bits), FINITE_PIECE))
    return all((piece & exponent).max() != exponent for piece in pieces)


def _plain(value: Any) -> Any:
    """Return a value of a `LoraConfig` that JSON does not have."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def _place(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return what two names of one tensor share."""
    ours = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return (ours.data_ptr(), *tensor.shape, *tensor.stride())
