"""`PublishedWeights`: a trainer's folder of weight versions, and the encoder that writes the next one into it.

It keeps a copy of the last version in memory, 2 bytes per parameter of bfloat16, and writes what differs from it. A
version is full if there is no such copy (the first one of a process, which cannot know what its predecessor published;
or after a failure), if the chain of deltas has become long (see `version_chain`), or if its number does not grow.
Tensors are encoded by threads as they come. Nothing is deleted but by `prune` and by a version of the same number.
"""

from __future__ import annotations

import os
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...errors import InvalidWeights
from ..checkpoint import DELTA, TensorKind, some_names
from .tensor_delta import CHECKSUM, checksum, encode
from .version_chain import ANCHOR_SHARE, Version, is_anchor_due, needed_versions
from .version_folder import (
    FolderWriter,
    index_digest,
    published,
    published_versions,
    remove_version,
    tensor_bytes,
    version_path,
    weights_digest,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from concurrent.futures import Future
    from pathlib import Path
    from typing import Self

    from .tensor_delta import Bytes
    from .version_chain import Content

PART_BYTES = 5 * 2**30
DELTA_PART_BYTES = 2**29
"""A host reads a file of a delta at once."""
THREADS = min(16, os.cpu_count() or 1)


class Written(NamedTuple):
    """What was written of a version."""

    path: Path
    weights: str
    """Identifies the content."""
    index_digest: str
    """The SHA-256 of its index."""
    is_full: bool
    tensors: int
    """That the delta has: those that changed."""
    size_bytes: int
    """Of all tensors."""
    delta_bytes: int
    """Of the delta's files; 0 without one."""
    encode_s: float
    """CPU seconds of all threads."""
    write_s: float


class PublishedWeights:
    """The versions that one trainer writes. One process at a time uses the folder; its caller sees to that.

    Call `add` for each tensor, then `write`; `discard` after a failure between them.

    Args:
        root: the trainer's folder.
        kinds: the tensors of the model. Each version has exactly these.
        threads: that encode.
    """

    def __init__(self, root: Path, kinds: Mapping[str, TensorKind], threads: int = THREADS) -> None:
        self._root = root
        self._kinds = kinds
        self._lengths = {name: tensor_bytes(kind) for name, kind in kinds.items()}
        self._full_bytes = sum(self._lengths.values())
        self._version: int | None = None
        """The version of the copy; None: it is none that is published."""
        self._weights = ""
        """What identifies that version's content."""
        self._index = ""
        """The SHA-256 of that version's index."""
        self._copy: dict[str, Bytes] = {}
        self._checksums: dict[str, str] = {}
        self._frames: dict[str, bytes] = {}
        self._added: set[str] = set()
        self._frame_bytes = 0
        self._encode_s = 0.0
        self._chain_bytes = self._chain_length = 0
        """Of the deltas since the last full version."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self._encoding: deque[Future[tuple[str, bytes, str, float]]] = deque()
        self._encoding_limit = 2 * threads

    def add(self, name: str, data: Bytes) -> None:
        """Add a tensor of the next version.

        Args:
            name: the served model's name of it.
            data: its bytes, uint8 [N], which stay unchanged until `write` or `discard`.

        Raises:
            InvalidWeights: it comes twice, or the model has no tensor of this name and length.
        """
        if name in self._added or self._lengths.get(name) != len(data):
            raise InvalidWeights(
                f"the tensor {name} of {len(data)} bytes comes twice, or is not one of the model", path=str(self._root)
            )
        self._added.add(name)
        while len(self._encoding) >= self._encoding_limit:  # or all gathered tensors would be in memory
            self._take_encoded()
        self._encoding.append(self._pool.submit(self._encode, name, data, self._copy.get(name)))

    def write(self, version: int) -> Written:
        """Write the added tensors as a version; return when it is durable.

        Raises:
            InvalidWeights: a tensor is missing.
            OSError: the folder cannot be written.
        """
        path = version_path(self._root, version)
        try:
            while self._encoding:
                self._take_encoded()
            if missing := self._kinds.keys() - self._added:
                raise InvalidWeights(f"tensors were not added: {some_names(missing)}", path=str(path))
            began = time.perf_counter()
            try:
                written = self._write(path, version)
            except BaseException:
                remove_version(path)
                raise
        except BaseException:
            self.discard()
            raise
        tensors, encode_s = len(self._frames), self._encode_s
        self._version = version
        self._forget_added()
        return written._replace(tensors=tensors, encode_s=encode_s, write_s=time.perf_counter() - began)

    def write_in_full(self) -> Written:
        """Write the last version again, in full, for engines that cannot use its delta.

        Raises:
            OSError: the folder cannot be written; the version is gone.
        """
        assert self._version is not None, "a version was written"
        path, began = version_path(self._root, self._version), time.perf_counter()
        remove_version(path)
        try:
            self._write_full(path, self._version, self._weights)
        except BaseException:
            remove_version(path)
            self.discard()
            raise
        self._chain_bytes = self._chain_length = 0
        self._index, write_s = index_digest(path), time.perf_counter() - began
        return Written(path, self._weights, self._index, True, 0, self._full_bytes, 0, 0.0, write_s)

    def discard(self) -> None:
        """Drop the tensors that were added since the last `write`; the next version is full."""
        for future in self._encoding:
            future.cancel()
        while self._encoding:
            future = self._encoding.popleft()
            if not future.cancelled():
                future.exception()
        self._version = None
        self._forget_added()

    def prune(self, wanted: int, hosts: Iterable[Content]) -> set[int]:
        """Delete versions that no engine needs, and those that a process died or failed to write; return the former.

        Args:
            wanted: the version that engines should serve, so the oldest that one may still ask for.
            hosts: what the copies of live hosts have.
        """
        there: list[Version] = []
        complete, unfinished = published_versions(self._root)
        for number in unfinished:
            remove_version(version_path(self._root, number))
        for number in complete:
            with suppress(InvalidWeights):
                there.append(published(version_path(self._root, number), number))
        there.sort(key=lambda one: one.version == self._version)
        gone = {one.version for one in there} - needed_versions(there, wanted, hosts)
        for number in gone:
            remove_version(version_path(self._root, number))
        return gone

    def close(self) -> None:
        """End the threads, and free the copy."""
        self.discard()
        self._copy.clear()
        self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode(self, name: str, data: Bytes, kept: Bytes | None) -> tuple[str, bytes, str, float]:
        began = time.thread_time()
        if kept is None:
            self._copy[name] = data.copy()
            frame, new_checksum = b"", checksum(data)
        elif self._version is None or self._is_large:
            kept[:] = data
            frame, new_checksum = b"", checksum(data)
        else:
            frame, new_checksum = encode(data, kept)
        return name, frame, new_checksum, time.thread_time() - began

    @property
    def _is_large(self) -> bool:
        """Whether the next version must be full, since the delta is too large already."""
        return self._frame_bytes > ANCHOR_SHARE * self._full_bytes

    def _take_encoded(self) -> None:
        name, frame, self._checksums[name], seconds = self._encoding.popleft().result()
        self._encode_s += seconds
        if frame:
            self._frames[name] = frame
            self._frame_bytes += len(frame)

    def _write(self, path: Path, version: int) -> Written:
        weights = weights_digest(self._checksums)
        full_bytes, base = self._full_bytes, self._version
        has_delta = base is not None and base < version and not self._is_large
        due = is_anchor_due(self._frame_bytes, self._chain_bytes, self._chain_length, full_bytes)
        is_full = not has_delta or due
        delta_bytes = 0
        remove_version(path)
        if has_delta:
            folder = FolderWriter(path / DELTA if is_full else path, DELTA_PART_BYTES)
            for name, frame in self._frames.items():
                folder.add(name, TensorKind("U8", (len(frame),)), np.frombuffer(frame, np.uint8), self._checksums[name])
            delta_bytes = folder.finish(
                {
                    "version": f"{version:06d}",
                    "base_version": f"{base:06d}",
                    "delta_encoding": "xor",
                    "compression_format": "zstd",
                    "checksum_format": CHECKSUM,
                    "weights": weights,
                    "base_weights": self._weights,
                    "base_index": self._index,
                }
            )
        if is_full:
            self._write_full(path, version, weights)
        self._weights, self._index = weights, index_digest(path)
        self._chain_bytes = 0 if is_full else self._chain_bytes + delta_bytes
        self._chain_length = 0 if is_full else self._chain_length + 1
        return Written(path, weights, self._index, is_full, 0, full_bytes, delta_bytes, 0.0, 0.0)

    def _write_full(self, path: Path, version: int, weights: str) -> None:
        folder = FolderWriter(path, PART_BYTES)
        for name, kind in self._kinds.items():
            folder.add(name, kind, self._copy[name], self._checksums[name])
        numbered = {"version": f"{version:06d}", "checksum_format": CHECKSUM, "weights": weights}
        delta_index = index_digest(path / DELTA)
        folder.finish({**numbered, "total_size": self._full_bytes, "delta_index": delta_index})

    def _forget_added(self) -> None:
        self._frames, self._added = {}, set()
        self._frame_bytes, self._encode_s = 0, 0.0
