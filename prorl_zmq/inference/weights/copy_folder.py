"""The folder of a host's copy of weights: whether it can be written, which hosts use it, and its removal.

A host that was given the folder shares the lock `hosts.lock` in it while it lives, and leaves a link to it in its run
folder, by which `prorl clean` finds it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ConfigError
from ...system.file_system import LOCAL, file_system_of

if TYPE_CHECKING:
    from collections.abc import Iterator

SYNC = ".weight_sync"
LOCKS = ("hosts.lock", "lock")
"""In `SYNC`: shared by the hosts that use the copy, and held by who reads or changes it."""
LINKS = "copies"
"""In a run folder: links to the copies of its engines."""

log = logging.getLogger("prorl.engine")


@contextmanager
def used_copy(folder: Path, model: str, run_dir: Path) -> Iterator[None]:
    """Check that a host can write a copy of a model's weights, and mark its folder, which is made, as used.

    Args:
        folder: of the copy.
        model: the folder with the model's weights; a hub's name or an empty text does not say how much room it needs.
        run_dir: of the host.

    Raises:
        ConfigError: the folder cannot be written, has other files, or has no room.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(_shared(folder, model))
            link = run_dir / LINKS / hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
            link.parent.mkdir(exist_ok=True)
            with suppress(FileExistsError):
                link.symlink_to(folder)
        except OSError as error:
            message = f"no copy of the weights can be made: {error}; give another `weights_dir`"
            raise ConfigError(message, key="weights_dir") from error
        if kind := shared_kind(folder):
            log.warning("%s is on %s; `weights_dir` is for a local disk of each machine", folder, kind)
        yield


def shared_kind(folder: Path) -> str:
    """Return the kind of a copy's file system if other machines may use it, such as `nfs4`; empty: it is local."""
    kind = file_system_of(folder / SYNC)
    return kind if kind not in LOCAL else ""


def find_copies(folder: Path) -> list[Path]:
    """Return the copies to which a run folder links, those in a `weights_dir`, or the folder if it is one."""
    links = folder / LINKS
    linked = [link.readlink() for link in sorted(links.iterdir()) if link.is_symlink()] if links.is_dir() else []
    found = dict.fromkeys((*linked, folder, *sorted(folder.glob("weights/*"))))
    return [path for path in found if _is_copy(path)]


@contextmanager
def unused_copy(folder: Path) -> Iterator[bool]:
    """Hold the locks of a copy if no process has one; whether it is so.

    Raises:
        OSError: a lock cannot be opened: for instance, it belongs to another account.
    """
    with ExitStack() as stack:
        yield all(_held(folder / SYNC / name, stack) for name in LOCKS)


def _is_copy(path: Path) -> bool:
    try:
        return (path / SYNC).is_dir()
    except PermissionError:
        return True  # for all that is known


@contextmanager
def opened_lock(path: Path) -> Iterator[int]:
    """Open the file of a lock, which is made: its descriptor. Writable and readable, since NFS locks no others.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        yield lock
    finally:
        os.close(lock)


def _held(path: Path, stack: ExitStack) -> bool:
    """Hold a lock, which is made: a host that is about to make it must find it."""
    try:
        lock = stack.enter_context(opened_lock(path))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True


def _shared(folder: Path, model: str) -> ExitStack:
    """Check a folder, which is made, and share its lock; begin again if `prorl clean` removes it meanwhile."""
    path = folder / SYNC / LOCKS[0]
    while True:
        _check(folder, model)
        with ExitStack() as stack, suppress(FileNotFoundError):
            lock = stack.enter_context(opened_lock(path))
            fcntl.flock(lock, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(lock), path.stat()):
                return stack.pop_all()


def _check(folder: Path, model: str) -> None:
    if folder.is_dir() and any(folder.iterdir()) and not (folder / SYNC).is_dir():
        raise FileExistsError(errno.EEXIST, "it has files that are no copy of weights", str(folder))
    (folder / SYNC).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder / SYNC) as file:
        file.write(b"prorl")
    needed = _weights_bytes(Path(model)) if model else 0
    free = shutil.disk_usage(folder).free + _weights_bytes(folder)
    if free < needed:
        room = f"{os.strerror(errno.ENOSPC)}: the model has {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free"
        raise OSError(errno.ENOSPC, room, str(folder))


def _weights_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
