"""A host's copy as a folder that others fetch: an index that is computed from its bytes."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...errors import InvalidWeights
from ..weights.stored_tensor import StoredTensor
from ..weights.tensor_delta import CHECKSUM
from ..weights.version_folder import file_sums, read_version, weights_digest
from .offered_folder import OfferedFolder

if TYPE_CHECKING:
    from ..weights.local_copy import LocalCopy

LOCK_S = 1.0
"""How long the copy's lock is waited for: engines of this machine hold it for a moment when they load."""


def offered_copy(copy: LocalCopy, weights: str) -> OfferedFolder | None:
    """Return this host's copy as a folder to offer; None: it has another content. Reads all of it.

    Raises:
        RequestTimeout: another process held its lock for `LOCK_S`.
        ProrlError, OSError: it cannot be read.
    """
    had = copy.had
    if had is None or had.weights != weights:
        return None
    with copy.reading(had, time.monotonic() + LOCK_S) as path:
        own = read_version(path)
        files = {file: file_sums(path / file) for file in sorted({*own.weight_map.values()})}
        checksums = _checksums(path)
    if weights_digest(checksums) != weights:
        raise own.invalid("is damaged: its tensors are not those of its version")
    metadata = {"version": f"{had.version:06d}", "checksum_format": CHECKSUM, "weights": weights}
    index = {"metadata": metadata, "weight_map": own.weight_map, "checksums": checksums}
    content = json.dumps(index | {"files": msgspec.to_builtins(files)}).encode()
    return OfferedFolder(path, content, whole=True, copy=copy, content=had)


def content_of(index: bytes) -> str:
    """Return the digest of the content that an index of a copy describes; empty: it is none."""
    with suppress(InvalidWeights, ValueError):
        folder = OfferedFolder(Path("copy"), index, whole=False).version
        if folder.checksums.keys() == folder.weight_map.keys() and folder.base_version is None:
            return weights_digest(folder.checksums)
    return ""


def _checksums(path: Path) -> dict[str, str]:
    """Return the checksums of all tensors of a full version, computed from their bytes."""
    found = {}
    version = read_version(path)
    for file in {*version.weight_map.values()}:
        with (path / file).open("rb") as opened:
            for name, place in version.tensors.items():
                if place.file == file:
                    found[name] = StoredTensor(opened.fileno(), place.at, place.length).checksum(CHECKSUM)
    return found


def copy_problem(path: Path) -> str:
    """Return what is wrong with a fetched copy, such as a tensor with other bytes; empty: nothing."""
    try:
        known = read_version(path).tensors
        found = _checksums(path)
    except InvalidWeights as error:
        return error.message
    wrong = next((name for name, place in known.items() if found[name] != place.checksum), "")
    return f"has other bytes of {wrong} than its checksum says" if wrong else ""
