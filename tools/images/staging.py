"""Copies of images on a host's own disk: one of each per host, whoever asks, and complete or not there.

    FOLDER/NAME                   link to the copy; replaced in one step
    FOLDER/.NAME/lock             held by the process that copies
    FOLDER/.NAME/VERSION/NAME     the copy; VERSION is size and time of the image that it is of
    FOLDER/.NAME/partial          a copy that was begun; a leftover if the lock is free

A sandbox locks the copy that it runs from (`image.lock_image`), so one that was replaced goes when no sandbox has it.
The copies stay when the host's allocation ends: the next one on this host finds them.
"""

from __future__ import annotations

import fcntl
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

from ...errors import ConfigError, SandboxFailed
from ...system.unix_peers import way_problem
from .fingerprint import size_bytes
from .image import check_name, lock_alone

if TYPE_CHECKING:
    from pathlib import Path

LOCK, PARTIAL = "lock", "partial"


def stage_image(source: Path, folder: Path) -> Path:
    """Copy an image, a file or a folder, to a folder of this host unless it is there; return the copy's link.

    Raises:
        ConfigError: the folder is not this user's alone, or there is no such image.
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
    place = folder / f".{name}"
    copy = place / f"{state.st_size}-{state.st_mtime_ns}" / name
    link = folder / name
    try:
        place.mkdir(exist_ok=True)
        with (place / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not copy.exists():
                _copy(source, place / PARTIAL, copy)
            if link.resolve() != copy.resolve():
                (place / "link").unlink(missing_ok=True)
                (place / "link").symlink_to(copy.relative_to(folder))
                # A link is relative to where it lies: made beside the lock, it would lead elsewhere until it is moved.
                (place / "link").replace(link)
            _remove_unused(place, copy.parent)
    except OSError as error:
        raise SandboxFailed(f"{source} cannot be copied to {folder}: {error.strerror or error}") from error
    return link


def images_in(folder: Path) -> list[str]:
    """Return the names of the complete images in a folder that this module, or an `ImageStore`, keeps."""
    return [each.name for each in folder.iterdir() if each.name[0] != "." and each.is_symlink() and each.exists()]


def _copy(source: Path, partial: Path, copy: Path) -> None:
    _remove(partial)  # of a process that was killed
    try:
        partial.mkdir()
        if source.is_dir():
            shutil.copytree(source, partial / copy.name, symlinks=True)
        else:
            shutil.copy2(source, partial / copy.name)
        wanted, there = size_bytes(source), size_bytes(partial / copy.name)
        if wanted != there:
            raise SandboxFailed(f"the copy of {source} has {there} bytes in place of {wanted}; was it being written?")
        partial.rename(copy.parent)
    except BaseException:
        _remove(partial)
        raise


def _remove_unused(place: Path, used: Path) -> None:
    for version in place.iterdir():
        if version.name in (LOCK, used.name) or not version.is_dir():
            continue
        image = next(version.iterdir(), None)
        with suppress(OSError):
            lock = lock_alone(image) if image is not None else None
            if lock is not None:
                with lock:
                    shutil.rmtree(version)


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(path)
