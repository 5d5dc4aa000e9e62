"""A host's copy as a folder that others fetch: an index that is computed from its bytes."""

from __future__ import annotations

import json
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...errors import InvalidWeights
from ..weights.tensor_delta import CHECKSUM, HASHERS
from ..weights.version_folder import file_sums, read_version, weights_digest
from .offered_folder import OfferedFolder

if TYPE_CHECKING:
    from ..weights.local_copy import LocalCopy
    from ..weights.version_folder import Sums, VersionFolder


def offered_copy(copy: LocalCopy, weights: str) -> OfferedFolder | None:
    """Return this host's copy as a folder to offer; None: it has another content, or changed meanwhile.

    It reads the whole copy without its lock, so that new weights do not wait.

    Raises:
        ProrlError, OSError: it cannot be read.
    """
    had = copy.had
    if had is None or had.weights != weights:
        return None
    own = read_version(copy.folder)
    files: dict[str, Sums] = {}
    checksums: dict[str, str] = {}
    for file in sorted({*own.weight_map.values()}):
        files[file], found = _sums(own, file)
        checksums |= found
        if copy.had != had:
            return None
    if weights_digest(checksums) != weights:
        raise own.invalid("is damaged: its tensors are not those of its version")
    metadata = {"version": f"{had.version:06d}", "checksum_format": CHECKSUM, "weights": weights}
    index = {"metadata": metadata, "weight_map": own.weight_map, "checksums": checksums}
    content = json.dumps(index | {"files": msgspec.to_builtins(files)}).encode()
    return OfferedFolder(copy.folder, content, whole=True, copy=copy, content=had)


def content_of(index: bytes) -> str:
    """Return the digest of the content that an index of a copy describes; empty: it is none."""
    with suppress(InvalidWeights, ValueError):
        folder = OfferedFolder(Path("copy"), index, whole=False).version
        if folder.checksums.keys() == folder.weight_map.keys() and folder.base_version is None:
            return weights_digest(folder.checksums)
    return ""


def _sums(version: VersionFolder, file: str) -> tuple[Sums, dict[str, str]]:
    """Return the checksums of a file's chunks and of its tensors, computed from its bytes in one pass."""
    places = {name: place for name, place in version.tensors.items() if place.file == file}
    hashers = {name: HASHERS[CHECKSUM]() for name in places}
    later = deque(sorted(places, key=lambda name: places[name].at))
    begun: list[str] = []

    def note(start: int, data: bytes) -> None:
        end = start + len(data)
        while later and places[later[0]].at < end:
            begun.append(later.popleft())
        for name in tuple(begun):
            at, length = places[name].at, places[name].length
            hashers[name].update(memoryview(data)[max(at - start, 0) : max(at + length - start, 0)])
            if at + length <= end:
                begun.remove(name)

    sums = file_sums(version.path / file, note)
    return sums, {name: hasher.hexdigest() for name, hasher in hashers.items()}


def copy_problem(path: Path) -> str:
    """Return what is wrong with a fetched copy, such as a tensor with other bytes; empty: nothing."""
    try:
        version = read_version(path)
        known = version.tensors
    except InvalidWeights as error:
        return error.message
    found: dict[str, str] = {}
    for file in {*version.weight_map.values()}:
        found |= _sums(version, file)[1]
    wrong = next((name for name, place in known.items() if found[name] != place.checksum), "")
    return f"has other bytes of {wrong} than its checksum says" if wrong else ""
