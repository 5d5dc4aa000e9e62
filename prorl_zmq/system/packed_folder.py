"""Packs parts of a folder into bytes, for machines without a shared disk. Keeps modes, drops owners."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def pack(folder: Path, parts: Iterable[str]) -> bytes:
    """Return a tar file of some files and folders below `folder`."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for part in parts:
            tar.add(folder / part, part, filter=lambda member: member.replace(uid=0, gid=0, uname="", gname=""))
    return file.getvalue()


def unpack(packed: bytes, folder: Path) -> None:
    """Write what `pack` made into a private folder, replacing existing files."""
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        tar.extractall(folder, filter="tar")  # keeps modes, and writes nothing outside of the folder
