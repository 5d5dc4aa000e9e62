"""Files that prorl_zmq leaves on a machine's disk, which of them this account may remove, and their removal.

Kept are files that a live process uses or another account owns, targets of links, and files of other file systems. A
run folder is locked while it is emptied, so no service can start in it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import socket
import tempfile
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ConfigError, EndpointInUse
from ..inference.weights.copy_folder import find_copies, shared_kind, unused_copy
from ..system.held_file import holder
from ..system.run_folder import JOURNAL_SUFFIX, RUN_DIR_MARK, run_dir_problem
from ..system.run_places import base_run_dir, default_run_dir, shared_run_dir
from ..tools.images.fingerprint import size_bytes
from ..tools.images.image import lock_alone
from ..tools.images.image_store import ImageStore
from ..tools.images.kept_folder import TRASH, remove
from .run_dir import LOCK, held_run_dir
from .service_folder import LOCK as SERVICE_LOCK
from .service_folder import ServiceFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..tools.images.image import Image

USED = "a process of a service uses it; stop that first"
DEAR = "it takes long to make; {flag} removes it too"
SHARED = (
    "it is on {kind}, where another machine's engine may use it, which its lock need not show; remove the folder "
    "yourself if none does"
)
UNCOLLECTED = "may hold results that were not collected; --journals removes it too"


@dataclass(frozen=True, slots=True)
class Leftover:
    path: Path
    what: str
    size_bytes: int
    kept: str
    """Why it is kept; empty: it may be removed."""
    remove: Callable[[], None]


class Wanted(NamedTuple):
    """Which files may be removed that are not recreated automatically."""

    journals: bool = False
    """Including services' folders."""
    images: bool = False
    programs: bool = False


def find_leftovers(
    folders: Sequence[Path], images: Path, unpacked: Path, programs: Path, wanted: Wanted
) -> list[Leftover]:
    """Return this account's leftovers in the usual places, or only in `folders`.

    Args:
        folders: run folders, services' folders and copies of weights; images and programs are included if they are
            wanted.
        images: the folder of `prorl image`.
        unpacked: the folder of unpacked images, which are unpacked again on demand.
        programs: the folder of `prorl harness`.
        wanted: what else may be removed.

    Raises:
        ConfigError: one of `folders` is something else.
    """
    found: list[Leftover] = []
    run_folders = dict.fromkeys(filter(_is_run_folder, folders) if folders else usual_run_folders())
    for folder in run_folders:
        copies = _copies(folder)
        own = sum(each.size_bytes for each in copies if each.path.is_relative_to(folder))
        found += _in_run_folder(folder, own, journals=wanted.journals)
        found += copies
    for folder in folders:
        if folder in run_folders:
            continue
        if copies := _copies(folder):
            found += copies
        else:
            found.append(_service_folder(folder, journals=wanted.journals))
    used = USED if any(one.kept == USED for one in found) else ""
    if (wanted.images or not folders) and (images.is_symlink() or images.is_dir()):
        reason, store = _foreign(images), ImageStore(images)
        if reason:
            found.append(Leftover(images, "images", 0, reason, _nothing))
        for image in [] if reason else store.list():
            delete = partial(_remove_image, store, image.name)
            reason = used or _why_used(image) or ("" if wanted.images else DEAR.format(flag="--images"))
            found.append(Leftover(images / image.name, "image", image.manifest.size_bytes, reason, delete))
    dear = "" if wanted.programs else DEAR.format(flag="--programs")
    kinds = [(unpacked, "unpacked images", "")] if not folders else []
    kinds += [(programs, "agent programs", dear)] if wanted.programs or not folders else []
    for folder, what, why in kinds:
        if folder.is_symlink() or folder.is_dir():
            reason = _foreign(folder)
            size = 0 if reason else size_bytes(folder)
            found.append(Leftover(folder, what, size, reason or used or why, partial(remove, folder)))
    return found


def usual_run_folders() -> Iterator[Path]:
    """Find the default run folder, those of named services, and others in the temporary folder."""
    default, base = default_run_dir(), base_run_dir()
    if default.is_symlink() or default.is_dir():
        yield default
    named = base.parent.glob(f"{base.name}-*") if base != shared_run_dir() else ()
    for path in sorted({base, *named, *Path(tempfile.gettempdir()).glob("prorl-*")}):
        if _is_run_folder(path) and path.lstat().st_uid == os.getuid():
            yield path


def _is_run_folder(path: Path) -> bool:
    try:
        return not path.is_symlink() and (path / RUN_DIR_MARK).is_file()
    except PermissionError:  # another account's
        return False


def _foreign(path: Path) -> str:
    """Return why this account may not remove a folder; empty if it may."""
    if path.is_symlink():
        return "it is a link, which is not followed"
    owner = path.stat().st_uid
    return "" if owner == os.getuid() else f"it belongs to another account (uid {owner})"


def _in_run_folder(path: Path, size_of_copies: int, *, journals: bool) -> Iterator[Leftover]:
    reason = _foreign(path) or run_dir_problem(path) or (USED if _is_used(path) else "")
    readable = not _foreign(path)
    records = [each for each in path.iterdir() if JOURNAL_SUFFIX in each.name] if readable else []
    size_of_records = sum(map(size_bytes, records))
    size = size_bytes(path) if readable else 0
    left = size_of_copies + (0 if journals else size_of_records)  # those have their own rows
    delete = partial(_remove_run_folder, path, journals=journals)
    yield Leftover(path, "run folder", size - left, reason, delete)
    if records and not journals:
        yield Leftover(path / f"*{JOURNAL_SUFFIX}*", "journals", size_of_records, reason or UNCOLLECTED, _nothing)


def _copies(folder: Path) -> list[Leftover]:
    """Return the copies of weights of a run folder's engines, or in a folder."""
    return list(map(_copy, find_copies(folder))) if folder.is_dir() and not _foreign(folder) else []


def _copy(path: Path) -> Leftover:
    size = 0
    try:
        reason = _foreign(path)
        if not path.is_symlink():
            size = size_bytes(path)
        if not reason:
            with _unused_copy(path) as is_unused:
                reason = "" if is_unused else USED
            kind = shared_kind(path)
            if not reason and kind:
                reason = SHARED.format(kind=kind)
    except OSError as error:
        reason = f"it cannot be looked at: {error}"
    return Leftover(path, "copy of weights", size, reason, partial(_remove_copy, path))


@contextmanager
def _unused_copy(path: Path) -> Iterator[bool]:
    """Hold a copy's locks if no process uses it; whether it is so. Hosts of a service use those in its run folder."""
    with unused_copy(path) as is_unused:
        yield is_unused and not any(_is_run_folder(each) and _is_used(each) for each in path.resolve().parents)


def _remove_copy(path: Path) -> None:
    with _unused_copy(path) as is_unused:
        if not is_unused:  # used since it was found
            raise EndpointInUse(f"{path}: {USED}", endpoint=str(path))
        trash = path.with_name(f"{TRASH}{secrets.token_hex(4)}")
        with suppress(FileNotFoundError):  # it went with its run folder
            path.rename(trash)  # a host that begins to use the copy now makes another one
    remove(trash)


def _service_folder(path: Path, *, journals: bool) -> Leftover:
    if not path.is_symlink() and not ServiceFolder.is_made(path):
        raise ConfigError(
            f"{path} is neither a run folder nor a service's folder, and has no copy of weights", key="folder"
        )
    reason = _foreign(path)
    if not reason:
        ServiceFolder.open(path)
        reason = f"used by {used}" if (used := holder(path / SERVICE_LOCK)) else ""
    if not reason and not journals:
        reason = f"it has keys and journals, which {UNCOLLECTED.replace('removes it', 'removes them')}"
    size = size_bytes(path) if not path.is_symlink() else 0
    return Leftover(path, "service", size, reason, partial(_remove_service_folder, path))


def _is_used(folder: Path) -> bool:
    """Return whether a process listens in a run folder, or has a lock there."""
    return any(_is_locked(each) or _is_listening(each) for each in folder.iterdir())


def _is_locked(path: Path) -> bool:
    if path.suffix != ".lock" or path.is_symlink():
        return False
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # just removed
        return False
    return False


def _is_listening(path: Path) -> bool:
    if not path.is_socket() or path.is_symlink():
        return False
    with closing(socket.socket(socket.AF_UNIX)) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) == 0


def _remove_run_folder(path: Path, *, journals: bool) -> None:
    if _is_used(path):  # used since it was found
        raise EndpointInUse(f"{path}: {USED}", endpoint=str(path))
    asyncio.run(_empty_run_folder(path, journals=journals))
    if not any(path.iterdir()):
        path.rmdir()


async def _empty_run_folder(path: Path, *, journals: bool) -> None:
    async with held_run_dir(path):
        await asyncio.to_thread(_remove_content, path, journals=journals)


def _remove_content(path: Path, *, journals: bool) -> None:
    left = [each for each in path.iterdir() if journals or JOURNAL_SUFFIX not in each.name]
    for each in sorted(left, key=lambda each: each.name == LOCK):  # the lock last: it keeps others out
        remove(each)


def _remove_service_folder(path: Path) -> None:
    with ServiceFolder.open(path).held():
        remove(path)


def _remove_image(store: ImageStore, name: str) -> None:
    if not store.remove(name, wait_s=0.0):
        raise EndpointInUse(
            f"a sandbox uses the files of {name}; they go when that name is next removed", endpoint=name
        )


def _why_used(image: Image) -> str:
    lock = lock_alone(image.path)
    if lock is None:
        return "a sandbox uses it"
    lock.close()
    return ""


def _nothing() -> None: ...
