"""A SIF file unpacked into a folder, once, for machines where Apptainer cannot mount it (a user without /dev/fuse).

    ROOT/IDENTITY                  the root filesystem, made by one rename: absent or complete
    ROOT/.IDENTITY/                its lock and what is unfinished (see `kept_folder`)

The identity is of the file's path, inode, size and time of change, so a replaced file is unpacked again. Concurrent
calls share one unpacking. A damaged file is detected by the digest in its manifest; without a manifest only Apptainer
or the decompression can detect it. The owner may empty the folder, a cache, when no sandbox runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import ConfigError, SandboxFailed
from .builder import Builder, ignore_line
from .fingerprint import digest
from .kept_folder import locked
from .sources import SifSource, check_sif

if TYPE_CHECKING:
    from pathlib import Path

UNPACK_LIMIT_S = 600.0


def unpacked(sif: Path, root: Path, *, timeout_s: float = UNPACK_LIMIT_S) -> Path:
    """Return a SIF file's root filesystem as a folder below `root`, the cache, which is made for its owner alone.

    Blocks: 4 s for 170 MB the first time, 1 ms after that. `timeout_s` limits the unpacking, and as long again the wait
    for another process that does it. Raises `SandboxFailed`.
    """
    try:
        path = sif.resolve(strict=True)
        status = path.stat()
        identity = digest(repr((str(path), status.st_ino, status.st_size, status.st_mtime_ns)).encode())[:32]
        target = root.absolute() / identity
        if not target.is_dir():
            check_sif(path)
            _unpack(path, target, timeout_s)
    except ConfigError as error:
        raise SandboxFailed(error.message, path=str(sif)) from error
    except SandboxFailed as error:
        raise SandboxFailed(
            f"{sif} cannot be unpacked; it may be corrupt: {error.message}", **{**error.fields, "path": str(sif)}
        ) from error
    except OSError as error:
        raise SandboxFailed(f"{sif} cannot be unpacked: {error.strerror or error}", path=str(sif)) from error
    return target


def _unpack(sif: Path, target: Path, timeout_s: float) -> None:
    target.parent.mkdir(0o700, parents=True, exist_ok=True)
    with locked(target.with_name(f".{target.name}"), wait_s=timeout_s, say=ignore_line) as folder:
        folder.clear()
        if not target.is_dir():
            with folder.building() as build:
                builder = Builder(build, folder.descriptor, timeout_s, ignore_line)
                builder.build(SifSource(sif), "directory").rename(target)
        folder.remove_if_empty()
