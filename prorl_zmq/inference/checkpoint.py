"""Checks a folder of weights by the headers of its safetensors files, before an engine reads the folder.

An engine that reads wrong weights may die, or serve half of them. So new weights must have exactly the tensors of those
that the engine started with. Only headers are read, some kilobytes; the values are not checked.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from ..errors import InvalidWeights, RequestTimeout
from ..system.files import open_regular
from ..system.threads import run_aside

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from threading import Event

    from ..errors import ProrlError

INDEX = "model.safetensors.index.json"
"""Lists which file holds each tensor of a checkpoint in several files."""
DELTA = "delta"
"""In the folder of a full version of weights: the same version as a difference to the one before."""
DRAFT = "draft"
"""In the folder of a version of weights: those of the draft model, a whole checkpoint."""
NAMED_LIMIT = 3
"""Most tensors that a message names."""


READ_AHEAD_BYTES = 2**22
LENGTH_BYTES = 8
INDEX_LIMIT_BYTES = 64 * 2**20
HEADER_LIMIT_BYTES = 100 * 2**20
"""The limit of the safetensors library."""


_Read = TypeVar("_Read")


class Entry(msgspec.Struct):
    """One tensor in a file's header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Header(NamedTuple):
    """The beginning of a safetensors file."""

    data_at: int
    """The offset of the tensors' data in the file."""
    entries: dict[str, Entry]
    metadata: dict[str, str]


class TensorKind(NamedTuple):
    """A tensor's type and shape in a file's header."""

    dtype: str
    """In safetensors' notation: `F32`, `BF16`, …"""
    shape: tuple[int, ...]


async def read_in_time(
    limit_s: float, read: Callable[..., _Read], path: Path, *others: object, late: type[ProrlError] = InvalidWeights
) -> _Read:
    """Call `read` with new weights in its own thread, since a folder on a network may hang.

    Raises:
        ProrlError: of the type `late`, if it took longer than the limit; or as `read`.
    """
    try:
        async with asyncio.timeout(limit_s):
            return await run_aside(read, path, *others)
    except TimeoutError:
        raise late(f"{path} could not be read within {limit_s:.3g} s", path=str(path)) from None


def check_wanted(ended: Event | None) -> None:
    """Raise `RequestTimeout` once weights are not wanted any more."""
    if ended is not None and ended.is_set():
        raise RequestTimeout("other weights were asked for meanwhile, or these were cancelled")


def check_checkpoint(path: Path, like: Path) -> None:
    """Check that the weights in the folder `path` can replace those in the folder `like`.

    Raises:
        InvalidWeights: `path` is not a folder, has no safetensors files, one of them cannot be read to its end, or its
            tensors differ from those of `like` by name, shape or dtype.
    """
    ours, theirs = read_tensors(like), read_tensors(path)
    for names, problem in (
        (ours.keys() - theirs.keys(), "lacks tensors that the model has"),
        (theirs.keys() - ours.keys(), "has tensors that the model lacks"),
    ):
        if names:
            raise InvalidWeights(f"{path} {problem}: {some_names(names)}; is it of this model?", path=str(path))
    differing = [name for name, kind in ours.items() if theirs[name] != kind]
    if differing:
        name = min(differing)
        raise InvalidWeights(
            f"{path} differs from the model in {len(differing)} of {len(ours)} tensors: "
            f"{name} is {_kind(theirs[name])}, in the model {_kind(ours[name])}",
            path=str(path),
        )


def read_ahead(path: Path, until: float, ended: Event | None = None) -> int:
    """Read a checkpoint, a folder or a file, so that the machine has it in memory; return the bytes.

    What cannot be read is left to the engine, which says why.

    Args:
        path: of the checkpoint.
        until: the end of the time allowed, by `time.monotonic`.
        ended: set once the weights are not wanted any more.

    Raises:
        RequestTimeout: `ended` was set.
    """
    read_bytes = 0
    buffer = bytearray(READ_AHEAD_BYTES)
    with suppress(OSError):
        for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
            with open(file, "rb", buffering=0, opener=open_regular) as content:
                while time.monotonic() < until and (read := content.readinto(buffer)):
                    check_wanted(ended)
                    read_bytes += read
    return read_bytes


def delta_of(path: Path) -> Path | None:
    """Return the folder of a version as a difference to the one before: its own, if it is no full version.

    None: there is no difference, or no index that can be read.
    """
    if (path / DELTA).is_dir():
        return path / DELTA
    return path if index_metadata(path).get("delta_encoding") else None


def draft_of(path: Path) -> Path | None:
    """Return the folder of a version's draft model; None: it has none."""
    return path / DRAFT if (path / DRAFT).is_dir() else None


def lost_index(path: Path) -> bool:
    """Return whether a folder has files of a delta, and not their index."""
    if (path / INDEX).exists():
        return False
    with suppress(InvalidWeights):
        header = read_header(next(iter(sorted(path.glob("*.safetensors"))), path))
        are_frames = all(one.dtype == "U8" and len(one.shape) == 1 for one in header.entries.values())
        return are_frames and bool(header.entries) and header.entries.keys() <= header.metadata.keys()
    return False


def index_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata in a checkpoint's index; empty: it has none that can be read."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return dict(json.loads(read_index(path))["metadata"])
    return {}


def read_index(path: Path) -> bytes:
    """Return the index of a checkpoint.

    Raises:
        OSError: it cannot be read, or is not a regular file.
        ValueError: it is too long.
    """
    with open(path / INDEX, "rb", opener=open_regular) as file:
        content = file.read(INDEX_LIMIT_BYTES + 1)
    if len(content) > INDEX_LIMIT_BYTES:
        raise ValueError(f"has an index of more than {INDEX_LIMIT_BYTES} bytes")
    return content


def no_cpu_updates(model: str) -> str:
    """Return why vLLM's CPU build takes no new weights of a mixture."""
    return (
        f"the mixture {model} takes no new weights with vLLM's CPU build: a reload leaves the old weights of its "
        "experts. Start the engine again with the new ones, or use a GPU or the engine transformers"
    )


def read_tensors(path: Path) -> dict[str, TensorKind]:
    """Return the tensors of the safetensors files in a folder, by name.

    Raises:
        InvalidWeights: there are none, or they cannot be read.
    """
    index = path / INDEX
    try:
        if not path.is_dir():
            raise InvalidWeights(f"{path} is not a folder that this host can see", path=str(path))
        if not index.is_file():
            files = sorted(path.glob("*.safetensors"))
            if not files:
                raise InvalidWeights(f"{path} holds no *.safetensors file", path=str(path))
            headers = {file.name: read_header(file).entries for file in files}
            return _kinds(headers)
        places = _read_index(index)
        headers = {file: read_header(path / file).entries for file in sorted(set(places.values()))}
    except OSError as error:
        raise InvalidWeights(f"{path} cannot be read: {error}", path=str(path)) from error
    lost = [name for name, file in places.items() if name not in headers[file]]
    if lost:
        raise InvalidWeights(f"{index} names tensors that are not where it says: {some_names(lost)}", path=str(path))
    return _kinds(headers)


def _kinds(headers: dict[str, dict[str, Entry]]) -> dict[str, TensorKind]:
    return {name: TensorKind(entry.dtype, entry.shape) for header in headers.values() for name, entry in header.items()}


def _read_index(index: Path) -> dict[str, str]:
    try:
        places = json.loads(read_index(index.parent))["weight_map"]
        if all(isinstance(file, str) and "/" not in file for file in places.values()):
            return dict(places)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise InvalidWeights(f"{index} is not an index of safetensors files", path=str(index.parent))


def read_header(file: Path) -> Header:
    """Read the header of a safetensors file, which locates the tensors.

    Implemented in Python: the library opens a file with the interpreter's lock held, so a hanging file would block
    everything.

    Raises:
        InvalidWeights: it is not a whole safetensors file.
    """
    try:
        with open(file, "rb", opener=open_regular) as content:
            size = os.fstat(content.fileno()).st_size
            length = int.from_bytes(content.read(LENGTH_BYTES), "little")
            if not 0 < length <= min(HEADER_LIMIT_BYTES, size - LENGTH_BYTES):
                raise ValueError("it has no header")
            header = msgspec.json.decode(content.read(length), type=dict[str, Any])
        metadata = msgspec.convert(header.pop("__metadata__", None) or {}, dict[str, str])
        entries = msgspec.convert(header, dict[str, Entry])
        end = max((entry.data_offsets[1] for entry in entries.values()), default=0)
        if LENGTH_BYTES + length + end != size:
            raise ValueError("its length is not what its header says")
    except (ValueError, msgspec.MsgspecError, RecursionError, OSError) as error:
        raise InvalidWeights(f"{file} is not a whole safetensors file: {error}", path=str(file.parent)) from error
    return Header(LENGTH_BYTES + length, entries, metadata)


def some_names(names: set[str] | list[str]) -> str:
    """Return the first names for a message, and how many more there are."""
    first = ", ".join(sorted(names)[:NAMED_LIMIT])
    more = len(names) - NAMED_LIMIT
    return f"{first} and {more} more" if more > 0 else first


def _kind(tensor: TensorKind) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
