"""Copies of images on a host's own disk: one copy per image and host, which is complete or absent.

    FOLDER/NAME                   link to the copy; replaced atomically
    FOLDER/.NAME/VERSION/NAME     the copy; VERSION is size and time of its image (see `kept_folder`)

A sandbox locks the copy that it runs from (`image.lock_image`), so a replaced copy is removed when no sandbox uses it.
Copies outlast the host's allocation: the next one on this host finds them.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from ...errors import ConfigError, SandboxFailed
from ...system.unix_peers import way_problem
from .fingerprint import size_bytes
from .image import check_name
from .kept_folder import locked

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COPY_LIMIT_S = 3600.0
"""Longest wait for another process that copies the same image."""


def stage_image(source: Path, folder: Path, say: Callable[[str], None]) -> Path:
    """Copy an image, a file or a folder, to a folder of this host unless it is there; return the copy's link.

    `say` is called with a line for a person if another process copies it at the moment.

    Raises:
        ConfigError: the folder is not this user's alone, or the image is missing.
        SandboxFailed: the copy cannot be made; on a full disk nothing of it is left.
    """
    name = check_name(source.name)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if problem := way_problem(folder):
            raise ConfigError(f"images cannot be copied to {folder}: {problem}", key="to")
        folder.chmod(0o700)
        state = source.stat()
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}", key="source") from error
    try:
        with locked(folder / f".{name}", wait_s=COPY_LIMIT_S, say=say) as kept:
            version = kept.path / f"{state.st_size}-{state.st_mtime_ns}"
            if not version.exists():
                kept.clear()
                with kept.building() as build:
                    _copy(source, build / name)
                    build.rename(version)
            kept.publish(folder / name, version / name)
            kept.remove_unused(version)
    except OSError as error:
        raise SandboxFailed(f"{source} cannot be copied to {folder}: {error.strerror or error}") from error
    return folder / name


def images_in(folder: Path) -> list[str]:
    """Return the names of the complete images in a folder that this module, or an `ImageStore`, fills."""
    return [each.name for each in folder.iterdir() if each.name[0] != "." and each.is_symlink() and each.exists()]


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target)
    wanted, there = size_bytes(source), size_bytes(target)
    if wanted != there:
        raise SandboxFailed(f"the copy of {source} has {there} bytes in place of {wanted}; was it being written?")
