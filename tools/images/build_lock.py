"""The folder in which one image is built, its lock, and what killed builders left in it.

The lock is `flock` on a file in the folder. The kernel frees it when the last process that has it open ends: the
builder, or, if that was killed, what it had started. So the process that gets the lock knows that no other writes to
the folder, and that a `building-…` in it is a leftover. A removal first renames to `trash-…`, so that it leaves no half
image if it is interrupted, and uses `rm --one-file-system`: it must never follow something mounted below.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import subprocess
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ...errors import SandboxFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LOCK = "lock"
BUILDING, TRASH = "building-", "trash-"
REMOVE_LIMIT_S = 600.0
PID_BYTES = 32


class BuildFolder:
    """A locked folder; `locked` makes it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        """The lock; programs that write to the folder inherit it."""

    def clear(self) -> None:
        """Remove what interrupted builds and removals left."""
        for each in list(self.path.iterdir()):
            if each.name.startswith((BUILDING, TRASH)):
                remove(each)

    @contextmanager
    def building(self) -> Iterator[Path]:
        """Make a folder to build in. It is removed at the end, unless it was renamed: then it is complete."""
        path = self.path / f"{BUILDING}{secrets.token_hex(4)}"
        path.mkdir(0o755)
        try:
            yield path
        finally:
            if path.exists():
                remove(path)

    def throw_away(self, path: Path) -> None:
        """Remove something of this folder; it is gone from its name at once."""
        trash = self.path / f"{TRASH}{secrets.token_hex(4)}"
        path.rename(trash)
        remove(trash)

    def remove_if_empty(self) -> None:
        if [each.name for each in self.path.iterdir()] == [LOCK]:
            (self.path / LOCK).unlink()
            with suppress(OSError):  # a process that waits has made another lock
                self.path.rmdir()


@contextmanager
def locked(path: Path, *, wait_s: float, say: Callable[[str], None]) -> Iterator[BuildFolder]:
    """Make a folder if there is none, and hold its lock; wait at most so long for another builder."""
    descriptor = _acquire(path, wait_s, say)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield BuildFolder(path, descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or folder with all that is in it, also folders that their owner may not write."""
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
