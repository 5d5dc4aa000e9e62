"""The folder of one version of weights, in the form that slime publishes, so that each reads the other's.

A trainer's folder has one such folder per version:

    weight_v000012/                  a full version: a plain checkpoint. Or a delta (see `tensor_delta`)
      model-00000-of-00001.safetensors
      model.safetensors.index.json   written last: without it, the folder is no version
      delta/                         of a full version that has a version before it: the same version as a delta

A delta's files have one U8 tensor of rank 1 for each changed tensor, its frame. The index's `metadata` has slime's
`version`, `base_version`, `delta_encoding`, `compression_format` and `checksum_format`, all texts; the checksum of each
whole new tensor is in the `__metadata__` of its file. We add to the index what slime's reader ignores: in `metadata`
`weights`, the digest of all checksums, which identifies the version's content, and `base_weights`; and `files`, the
length of each file and the checksums of its chunks. `base_index` in a delta's metadata, and `delta_index` in that of a
full version, are the SHA-256 of the index of the base, and of the index in `delta/`: who knows that of the newest index
can check all others. Without `delta_encoding`, a version is full. slime's reader needs
numbers without gaps; ours follows `base_version`. slime's own deltas lack both digests: their files identify them,
whatever their number, so that a version that was written again is another one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from ...errors import InvalidWeights
from ...system.files import open_regular
from ..checkpoint import DELTA, INDEX, LENGTH_BYTES, TensorKind, read_header, read_index, some_names
from .tensor_delta import CHECKSUM, HASHERS, checksum
from .version_chain import Version

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from .tensor_delta import Bytes

CHUNK_BYTES = 4 * 2**20
"""A file's chunks have a checksum each, so that hosts can fetch them from each other."""
NAME = re.compile(r"weight_v(\d{6,18})")
ENCODINGS = ("xor", "overwrite")
TYPE_BYTES = (
    dict.fromkeys(("F64", "I64", "U64", "C64"), 8)
    | dict.fromkeys(("F32", "I32", "U32"), 4)
    | dict.fromkeys(("F16", "BF16", "I16", "U16"), 2)
    | dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1)
)


class Sums(msgspec.Struct, frozen=True):
    """A file's length, and the checksums of its chunks of `CHUNK_BYTES`."""

    size_bytes: int
    chunks: tuple[str, ...]


class Place(NamedTuple):
    """Where a tensor's bytes are."""

    file: str
    at: int
    length: int
    kind: TensorKind
    checksum: str
    """Of the whole tensor in this version; empty: the file has none."""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}
    files: dict[str, Sums] = {}
    checksums: dict[str, str] = {}
    """Of the tensors of a host's copy, whose files do not have them."""


@dataclass(frozen=True)
class VersionFolder:
    """A version whose index was read."""

    path: Path
    version: int | None
    """None: a checkpoint that does not say."""
    base_version: int | None
    """The version before a delta; None: it is a full version."""
    encoding: str
    """Of a delta: `xor` or `overwrite`."""
    checksum_format: str
    weights: str
    """Identifies the content: the trainer's digest, or without one the files as they were written."""
    base_weights: str
    weight_map: Mapping[str, str]
    files: Mapping[str, Sums]
    base_index: str = ""
    """The SHA-256 of the base's index; empty: not known."""
    delta_index: str = ""
    """That of the index in `delta/`; empty: there is none, or it is not known."""
    checksums: Mapping[str, str] = field(default_factory=dict)
    """Of tensors whose files do not have them."""

    @property
    def name(self) -> str:
        """The folder's name, for messages."""
        return _name(self.path)

    def size_bytes(self) -> int:
        """Return the bytes of its files.

        Raises:
            InvalidWeights: one is missing.
        """
        try:
            return sum((self.path / file).stat().st_size for file in {*self.weight_map.values()})
        except OSError as error:
            raise self.invalid(f"cannot be read: {error}") from error

    @cached_property
    def tensors(self) -> dict[str, Place]:
        """The tensors of all its files, or of a delta their frames.

        Raises:
            InvalidWeights: a file is not whole, or its tensors are not those of the index.
        """
        places: dict[str, Place] = {}
        for file in sorted({*self.weight_map.values()}):
            header = read_header(self.path / file)
            for name, entry in header.entries.items():
                begin, end = entry.data_offsets
                kind = TensorKind(entry.dtype, entry.shape)
                known = header.metadata.get(name) or self.checksums.get(name, "")
                place = Place(file, header.data_at + begin, end - begin, kind, known)
                if self.weight_map.get(name) != file:
                    raise self.invalid(f"has the tensor {name} in {file}, which is not in its index")
                if begin < 0 or place.length != tensor_bytes(kind):
                    raise self.invalid(f"has {name} as {entry.dtype} {list(entry.shape)} in {place.length} bytes")
                if self.base_version is not None and (entry.dtype != "U8" or len(entry.shape) != 1):
                    raise self.invalid(f"has the difference of {name} as {entry.dtype} {list(entry.shape)}, not U8 [N]")
                if self.base_version is not None and not place.checksum:
                    raise self.invalid(f"has no checksum of {name}")
                places[name] = place
        if lost := self.weight_map.keys() - places.keys():
            raise self.invalid(f"lacks tensors that its index names: {some_names(lost)}")
        return places

    def read_file(self, file: str) -> memoryview:
        """Return a whole file, whose chunks are checked if the index has their checksums.

        Raises:
            InvalidWeights: it is not what the index says.
        """
        sums = self.files.get(file)
        try:
            with open(self.path / file, "rb", opener=open_regular) as opened:
                size_bytes = os.fstat(opened.fileno()).st_size
                if sums is not None and size_bytes != sums.size_bytes:
                    raise self.invalid(f"has {file} with {size_bytes} of {sums.size_bytes} bytes")
                content = opened.read()
        except OSError as error:
            raise self.invalid(f"cannot be read: {error}") from error
        data = np.frombuffer(content, np.uint8)
        if sums is not None and _chunk_sums(data) != sums.chunks:
            raise self.invalid(f"has {file} with bytes that are not those of its checksums")
        return memoryview(content)

    def invalid(self, problem: str) -> InvalidWeights:
        """Return an error about this folder."""
        return InvalidWeights(f"{self.name} {problem}", path=str(self.path))


def tensor_bytes(kind: TensorKind) -> int:
    """Return a tensor's length; -1: its type is not one of whole bytes that we know."""
    return TYPE_BYTES[kind.dtype] * prod(kind.shape) if kind.dtype in TYPE_BYTES else -1


def version_path(root: Path, version: int) -> Path:
    """Return the folder of a version in a trainer's folder."""
    return root / f"weight_v{version:06d}"


def published_versions(root: Path) -> tuple[set[int], set[int]]:
    """Return the versions in a trainer's folder, and those whose folders are not complete."""
    names = [NAME.fullmatch(path.name) for path in root.glob("weight_v*")]
    there = {int(name[1]): name[0] for name in names if name is not None}
    complete = {number for number, name in there.items() if (root / name / INDEX).exists()}
    return complete, there.keys() - complete


def index_digest(path: Path) -> str:
    """Return the SHA-256 of a version's index; empty: there is none that can be read."""
    with suppress(OSError, ValueError):
        return hashlib.sha256(read_index(path)).hexdigest()
    return ""


def read_version(path: Path, content: bytes | None = None) -> VersionFolder:
    """Read the index of a version, or find the files of a plain checkpoint that has none.

    Args:
        path: the folder.
        content: of the index, if it is not in the folder yet.

    Raises:
        InvalidWeights: it is not there or not whole, or its index is not one that we can read.
    """
    try:
        index = _read_index(path) if content is None else _decoded(content)
        version = _number(index.metadata, "version")
        encoding = index.metadata.get("delta_encoding", "")
        form = index.metadata.get("checksum_format", CHECKSUM)
        base_version = _number(index.metadata, "base_version") if encoding else None
        if not isinstance(form, str) or form not in HASHERS:
            raise ValueError(f"has checksums of the form {form!r}; we read {', '.join(HASHERS)}")
        if encoding:
            if encoding not in ENCODINGS:
                raise ValueError(f"has the encoding {encoding!r}; we read {', '.join(ENCODINGS)}")
            if index.metadata.get("compression_format") != "zstd":
                raise ValueError(f"has the compression {index.metadata.get('compression_format')!r}; we read zstd")
            if version is None or base_version is None or base_version >= version:
                raise ValueError(f"is version {version} on {base_version}")
        if any({"/", "\0"} & {*file} or file in ("", ".", "..") for file in index.weight_map.values()):
            raise ValueError("has an index that names files in other folders")
        weights, base_weights, base_index, delta_index = (
            str(index.metadata.get(key, "")) for key in ("weights", "base_weights", "base_index", "delta_index")
        )
        if not weights:
            files = {*index.weight_map.values()}
            weights = _files_digest(path, files | {INDEX} if encoding else files)
    except (OSError, ValueError) as error:
        raise InvalidWeights(f"{_name(path)} {error}", path=str(path)) from error
    known = (weights, base_weights, index.weight_map, index.files, base_index, delta_index, index.checksums)
    return VersionFolder(path, version, base_version, encoding, form, *known)


def _read_index(path: Path) -> _Index:
    if not path.is_dir():
        raise ValueError(f"is not a folder that this host can see in {path.parent}")
    try:
        content = read_index(path)
    except FileNotFoundError:
        if NAME.fullmatch(path.name) or path.name == DELTA:
            raise ValueError("has no index: it is not complete") from None
        headers = {file.name: read_header(file) for file in sorted(path.glob("*.safetensors"))}
        if not headers:
            raise ValueError("has no *.safetensors file") from None
        return _Index({name: file for file, header in headers.items() for name in header.entries})
    return _decoded(content)


def _decoded(content: bytes) -> _Index:
    try:
        return msgspec.json.decode(content, type=_Index)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"has an index that cannot be read: {error}") from error


def _files_digest(path: Path, files: set[str]) -> str:
    """Return what identifies a folder's content for this host, as far as files show without reading."""
    stats = {file: (path / file).stat() for file in sorted(files)}
    known = {file: (one.st_size, one.st_mtime_ns, one.st_ino) for file, one in stats.items()}
    return "files-" + checksum(np.frombuffer(repr((str(path.resolve()), known)).encode(), np.uint8))


def _number(metadata: Mapping[str, Any], key: str) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not re.fullmatch(r"[0-9]{1,18}", value):
        raise ValueError(f"has the {key} {value!r}, which is no version")
    return int(value)


def _name(path: Path) -> str:
    """Return a version's name for messages."""
    return f"{path.parent.name}/{path.name}" if path.name == DELTA else path.name


def published(path: Path, number: int) -> Version:
    """Return what a folder has of a version; a delta that comes with a full version and cannot be used is left out.

    Args:
        path: the folder.
        number: the version's, which the folder must have unless it does not say.

    Raises:
        InvalidWeights: as `read_version`, or a file is missing.
    """
    found = read_version(path)
    if found.version not in (None, number):
        raise found.invalid(f"says that it is version {found.version}")
    if found.base_version is not None:
        return Version(number, found.weights, None, found.base_version, found.base_weights, found.size_bytes())
    full = Version(number, found.weights, found.size_bytes())
    with suppress(InvalidWeights):
        delta = read_version(path / DELTA)
        if delta.version in (None, number):
            base, weights, size_bytes = delta.base_version, delta.base_weights, delta.size_bytes()
            return full._replace(base=base, base_weights=weights, delta_bytes=size_bytes)
    return full


# Writing --------------------------------------------------------------------------------------------------------------


class FolderWriter:
    """Writes the files of one version into a folder that is empty, or not there.

    Its methods raise `OSError` if the folder cannot be written, which is then no version.
    """

    def __init__(self, path: Path, part_bytes: int) -> None:
        self._path = path
        self._part_bytes = part_bytes
        self._part: dict[str, tuple[TensorKind, Bytes, str]] = {}
        self._held_bytes = 0
        self._parts: list[tuple[Path, Sums, list[str]]] = []
        path.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, kind: TensorKind, data: Bytes, tensor_checksum: str) -> None:
        """Add a tensor, whose bytes must stay unchanged until `finish`."""
        self._part[name] = (kind, data, tensor_checksum)
        self._held_bytes += len(data)
        if self._held_bytes >= self._part_bytes:
            self._write_part()

    def finish(self, metadata: dict[str, Any]) -> int:
        """Name the files, write the index, and return the bytes of the files."""
        self._write_part()
        count = len(self._parts)
        index: dict[str, Any] = {"metadata": metadata, "weight_map": {}, "files": {}}
        for number, (written, sums, names) in enumerate(self._parts):
            file = f"model-{number:05d}-of-{count:05d}.safetensors"
            written.rename(self._path / file)
            index["weight_map"] |= dict.fromkeys(names, file)
            index["files"][file] = msgspec.to_builtins(sums)
        write_aside(self._path / INDEX, json.dumps(index).encode())
        return sum(sums.size_bytes for _, sums, _ in self._parts)

    def _write_part(self) -> None:
        if not self._part:
            return
        entries: dict[str, Any] = {"__metadata__": {name: one[2] for name, one in self._part.items()}}
        entries["__metadata__"]["format"] = "pt"
        end = 0
        for name, (kind, data, _) in self._part.items():
            entries[name] = {"dtype": kind.dtype, "shape": kind.shape, "data_offsets": (end, end := end + len(data))}
        path = self._path / f"part-{len(self._parts)}.tmp"
        sums = _write_summed(path, [header_bytes(entries), *(data for _, data, _ in self._part.values())])
        self._parts.append((path, sums, list(self._part)))
        self._part, self._held_bytes = {}, 0


def header_bytes(entries: Mapping[str, Any]) -> Bytes:
    """Return the beginning of a safetensors file."""
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % LENGTH_BYTES)
    return np.frombuffer(len(header).to_bytes(LENGTH_BYTES, "little") + header, np.uint8)


def weights_digest(checksums: Mapping[str, str]) -> str:
    """Return what identifies the content of a version, from the checksums of all its tensors: a SHA-256 in hex."""
    lines = "\n".join(f"{name} {checksums[name]}" for name in sorted(checksums))
    return hashlib.sha256(lines.encode()).hexdigest()


def write_aside(path: Path, content: bytes) -> None:
    """Write a file so that it is whole whenever it is there, also after a power failure."""
    aside = path.with_name(f"{path.name}.tmp")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Have the names in a folder outlive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_version(path: Path) -> None:
    """Delete a version's folder, its index first: it is no version from then on."""
    with suppress(FileNotFoundError):
        (path / INDEX).unlink()
    shutil.rmtree(path, ignore_errors=True)


def _write_summed(path: Path, buffers: list[Bytes]) -> Sums:
    """Write buffers to a file; return its length and the checksums of its chunks."""
    chunks: list[str] = []
    size_bytes = 0
    hasher = HASHERS[CHECKSUM]()
    with path.open("wb") as file:
        for buffer in buffers:
            start = 0
            while start < len(buffer):
                piece = buffer[start : start + CHUNK_BYTES - size_bytes % CHUNK_BYTES]
                file.write(piece.data)
                hasher.update(piece.data)
                start += len(piece)
                size_bytes += len(piece)
                if size_bytes % CHUNK_BYTES == 0:
                    chunks.append(hasher.hexdigest())
                    hasher = HASHERS[CHECKSUM]()
        file.flush()
        os.fsync(file.fileno())
    if size_bytes % CHUNK_BYTES:
        chunks.append(hasher.hexdigest())
    return Sums(size_bytes, tuple(chunks))


def file_sums(path: Path, note: Callable[[int, bytes], None] | None = None) -> Sums:
    """Return a file's length and the checksums of its chunks; `note` gets each chunk's offset and bytes."""
    chunks = []
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            chunks.append(checksum(np.frombuffer(piece, np.uint8)))
            if note is not None:
                note(file.tell() - len(piece), piece)
        return Sums(file.tell(), tuple(chunks))


def _chunk_sums(data: Bytes) -> tuple[str, ...]:
    return tuple(checksum(data[start : start + CHUNK_BYTES]) for start in range(0, len(data), CHUNK_BYTES))
