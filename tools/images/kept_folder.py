"""A folder of versions of one thing: each is built under a temporary name and renamed, so it is complete or absent.

    FOLDER/lock           held by the process that builds or removes
    FOLDER/building-ID    a version that is being built; a leftover if the lock is free
    FOLDER/trash-ID       one that is being removed; a leftover too
    FOLDER/VERSION/       a complete version

The lock is `flock` on a file: the kernel frees it when the last process that has it open ends, which is the builder or,
if that was killed, a program it started. `rm --one-file-system` removes, since it never enters mounts.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import subprocess
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ...errors import SandboxFailed
from .image import lock_alone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LOCK = "lock"
BUILDING, TRASH = "building-", "trash-"
REMOVE_LIMIT_S = 600.0
PID_BYTES = 32


class KeptFolder:
    """A locked folder; made by `locked`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        """The lock; programs that write to the folder inherit it."""

    def clear(self) -> None:
        """Remove leftovers of interrupted builds and removals."""
        for each in list(self.path.iterdir()):
            if each.name.startswith((BUILDING, TRASH)):
                remove(each)

    @contextmanager
    def building(self) -> Iterator[Path]:
        """Make a folder to build in; remove it at the end unless the caller has renamed it."""
        path = self.path / f"{BUILDING}{secrets.token_hex(4)}"
        path.mkdir(0o755)
        try:
            yield path
        finally:
            if path.exists():
                remove(path)

    def versions(self) -> list[Path]:
        """Return the complete versions."""
        unfinished = (BUILDING, TRASH)
        return [each for each in self.path.iterdir() if each.is_dir() and not each.name.startswith(unfinished)]

    def publish(self, link: Path, target: Path) -> None:
        """Point `link`, in the parent folder, to a path in a version; an older link is replaced atomically."""
        fresh = self.path / f"{BUILDING}{secrets.token_hex(4)}"
        fresh.symlink_to(target.relative_to(link.parent))  # relative to where it is moved, not to where it is made
        fresh.rename(link)

    def remove_unused(self, kept: Path | None) -> bool:
        """Remove leftovers, and all versions but `kept` that no sandbox has locked; return whether none is left."""
        self.clear()
        all_gone = True
        for version in self.versions():
            if version == kept:
                continue
            locks = [lock_alone(each) for each in version.iterdir()]
            if None in locks:
                all_gone = False
            else:
                self.throw_away(version)
            for each in locks:
                if each is not None:
                    each.close()
        return all_gone

    def throw_away(self, path: Path) -> None:
        """Remove an entry of this folder; its name is free at once."""
        trash = self.path / f"{TRASH}{secrets.token_hex(4)}"
        path.rename(trash)
        remove(trash)

    def remove_if_empty(self) -> None:
        if [each.name for each in self.path.iterdir()] == [LOCK]:
            (self.path / LOCK).unlink()
            with suppress(OSError):  # a process that waits has made another lock
                self.path.rmdir()


@contextmanager
def locked(path: Path, *, wait_s: float, say: Callable[[str], None]) -> Iterator[KeptFolder]:
    """Hold the lock of a folder, which is made if it is missing; wait at most `wait_s` for another builder."""
    descriptor = _acquire(path, wait_s, say)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield KeptFolder(path, descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or a folder tree, including folders that their owner may not write."""
    problem = _run("rm", "-rf", "--one-file-system", "--", str(path))
    if problem and os.geteuid() != 0:
        _run("chmod", "-R", "u+rwX", "--", str(path))
        problem = _run("rm", "-rf", "--one-file-system", "--", str(path))
    if problem:
        raise SandboxFailed(f"{path} cannot be removed: {problem}")


def _acquire(path: Path, wait_s: float, say: Callable[[str], None]) -> int:
    while True:
        with suppress(FileExistsError):  # with `exist_ok`, mkdir raises if the folder is removed as it looks
            path.mkdir(0o755)
        try:
            descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            continue  # the folder was removed just now
        try:
            _flock(descriptor, path, wait_s, say)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), (path / LOCK).stat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the lock of a folder that was removed while this process waited


def _flock(descriptor: int, path: Path, wait_s: float, say: Callable[[str], None]) -> None:
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    owner = os.pread(descriptor, PID_BYTES, 0).decode("ascii", "replace") or "another process"
    say(f"process {owner} builds it at the moment; waiting for it to end")
    # The program locks the open file that this process shares with it. Python's flock has no time limit.
    done = subprocess.run(
        ["flock", "--exclusive", "--timeout", f"{wait_s:.3f}", str(descriptor)], pass_fds=(descriptor,), check=False
    )
    if done.returncode != 0:
        raise SandboxFailed(
            f"process {owner} still holds {path / LOCK} after {wait_s:g} s; wait longer, or end it and all it started"
        )


def _run(*argv: str) -> str:
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=REMOVE_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {REMOVE_LIMIT_S:g} s"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["rm failed"])[-1]
