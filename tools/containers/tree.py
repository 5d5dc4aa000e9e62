"""Whole folder trees that a hostile process wrote: copied and removed, with everything in them.

Both walks go over descriptors and take constant time and descriptors for each step, so neither a planted link, nor a
tree deeper than Python's stack or the longest path, nor a folder without permissions stops them; `shutil` fails at the
last three. The copy goes depth first and returns by `..`, which it checks to be the folder it came from; the removal
flattens. Both have a time limit. They block: call them in threads.

If the content of a tree is why it cannot be copied, its writer is at fault, not the machine: then, and only then, the
error's `reason` is `tree`.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import time
import uuid
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import SandboxFailed
from .files import FILE_FLAGS, FOLDER_FLAGS, open_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
CHUNK_BYTES = 16 * 2**20
BATCH = 1024
"""Entries of a folder that are read at a time while it is being emptied."""
DEPTH_LIMIT = 1000
"""Most levels of folders that are copied; the longest path of Linux has fewer with sensible names."""
ENTRY_LIMIT = 200_000
"""Most entries that are copied, which fit into the time limit on a busy machine."""
LARGE_SHARE = 0.25
"""A tree of this share of either limit is itself the reason if the time is over."""
TREE_ERRORS = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.ENOENT,
        errno.ELOOP,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
        errno.ENAMETOOLONG,
        errno.ENXIO,
        errno.EFBIG,
        errno.EOVERFLOW,
    }
)
"""What only the tree's own content can cause, once both of its roots are open."""


def copy_tree(source: Path, target: Path, limit_bytes: int, timeout_s: float) -> None:
    """Copy the content of `source` into the empty folder `target`.

    Holes in files stay holes; modes and times of files are kept, hard links and owners are not. FIFOs, sockets and
    devices are omitted, since opening one may block. Symbolic links stay links if they lead only into the tree, and are
    omitted if not: through a link to /proc/self/cmdline a check would read itself.

    Raises:
        SandboxFailed: it holds more than `limit_bytes` of data in all or than `ENTRY_LIMIT` entries, is deeper than
            `DEPTH_LIMIT`, has what cannot be copied, or is large and takes too long (`reason` is `tree`); it takes
            longer than `timeout_s` (`reason` is `time`); or the disk refuses it (`reason` is `system`).
    """
    name = source.parent.name
    budget = _Budget(time.monotonic() + timeout_s, limit_bytes, ENTRY_LIMIT)
    try:
        pair = _FolderPair(source, target)
    except OSError as error:
        raise SandboxFailed(f"{name} cannot be copied: {error.strerror}", reason="system") from error
    try:
        _copy_folders(pair, budget)
    except TimeoutError:
        large = budget.bytes < (1 - LARGE_SHARE) * limit_bytes or budget.entries < (1 - LARGE_SHARE) * ENTRY_LIMIT
        reason = "tree" if large else "time"
        raise SandboxFailed(f"copying {name} took longer than {timeout_s:g} s", reason=reason) from None
    except _TreeRefused as error:
        raise SandboxFailed(f"{name} cannot be copied: {error}", reason="tree") from None
    except OSError as error:
        reason = "tree" if error.errno in TREE_ERRORS else "system"
        raise SandboxFailed(f"{name} cannot be copied: {error.strerror}", reason=reason) from error
    finally:
        pair.close()


def remove_tree(path: Path, timeout_s: float) -> None:
    """Remove a folder and all below it. Its name is free at once; a call after a failed one continues.

    Several processes may remove one folder at a time.

    Raises:
        SandboxFailed: it takes longer than `timeout_s`, or the disk refuses it; the rest lies in `.NAME.removed`.
    """
    deadline = time.monotonic() + timeout_s
    rest = path.with_name(f".{path.name}.removed")
    taken_over = False
    try:
        while True:
            try:
                _remove(path, rest, deadline)
            except PermissionError:
                if taken_over or not _take_over(rest, timeout_s):
                    raise
                taken_over = True
            except OSError as error:
                # Another process has removed something that was looked at here, or has moved something there.
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                    raise
                if not path.parent.exists():
                    return  # with all that was in it
                _check_time(deadline)
            else:
                return
    except TimeoutError:
        raise SandboxFailed(f"removing {path.name} took longer than {timeout_s:g} s; the rest is in {rest}") from None
    except OSError as error:
        raise SandboxFailed(f"{path.name} cannot be removed: {error}; the rest is in {rest}") from error


def _take_over(rest: Path, timeout_s: float) -> bool:
    """Take over what belongs to this user's subordinate ids, as commands of a `fakeroot` sandbox may leave it."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["unshare", "--user", "--map-root-user", "--map-auto", "chown", "-hR", "0:0", "--", str(rest)]
        subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False, env={"PATH": PATH}
        )
        return True
    return False


def _remove(path: Path, rest: Path, deadline: float) -> None:
    with suppress(FileExistsError):
        rest.mkdir(0o700)
    with suppress(FileNotFoundError):
        path.rename(rest / uuid.uuid4().hex)
    with open_folder(rest, ()) as flat:
        folders = deque(os.listdir(flat))  # noqa: PTH208 - of the descriptor
        while folders:
            _check_time(deadline)
            name = folders.popleft()
            grant(name, flat, 0o700)
            with _opened(name, flat) as folder:
                folders += _empty(folder, flat, deadline)
            os.rmdir(name, dir_fd=flat)
    rest.rmdir()


def _empty(folder: int, flat: int, deadline: float) -> list[str]:
    """Empty one folder; the folders in it that are not empty move to `flat`, under the names that are returned."""
    moved: list[str] = []
    while True:
        with os.scandir(folder) as found:
            entries = list(islice(found, BATCH))
        if not entries:
            return moved
        for entry in entries:
            _check_time(deadline)
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=folder)
                continue
            try:
                os.rmdir(entry.name, dir_fd=folder)
            except OSError:
                grant(entry.name, folder, 0o700)  # a folder that one may not write cannot move either
                moved.append(uuid.uuid4().hex)
                os.rename(entry.name, moved[-1], src_dir_fd=folder, dst_dir_fd=flat)


def grant(name: str, folder: int | None, needed: int) -> int:
    """Add the owner's permissions `needed` to an entry, never through a symbolic link; return those it had.

    `name` is in the open `folder`, or is a path if that is None.
    """
    entry = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        mode = os.fstat(entry).st_mode
        if mode & needed != needed and not stat.S_ISLNK(mode):
            # chmod has no form for O_PATH descriptors; /proc names the very file that is open.
            Path(f"/proc/self/fd/{entry}").chmod(stat.S_IMODE(mode) | needed)
    finally:
        os.close(entry)
    return stat.S_IMODE(mode)


class _TreeRefused(Exception):
    """The tree's own content is why it is not copied."""


@dataclass(slots=True)
class _Budget:
    deadline: float
    bytes: int
    entries: int

    def take_entry(self) -> None:
        _check_time(self.deadline)
        self.entries -= 1
        if self.entries < 0:
            raise _TreeRefused("it has more entries than may be copied")

    def take_bytes(self, count: int) -> None:
        _check_time(self.deadline)
        self.bytes -= count
        if self.bytes < 0:
            raise _TreeRefused("it holds more than may be copied")


class _FolderPair:
    """One folder of the source and its copy: owns a descriptor of each; the way back up needs none."""

    def __init__(self, source: Path, target: Path) -> None:
        self.origin = os.open(source, FOLDER_FLAGS)
        try:
            self.copy = os.open(target, FOLDER_FLAGS)
        except BaseException:
            os.close(self.origin)
            raise
        self._above: list[tuple[os.stat_result, os.stat_result, int]] = []

    @property
    def depth(self) -> int:
        return len(self._above)

    def enter(self, name: str) -> None:
        """Enter a folder of the source, and make its copy."""
        mode = grant(name, self.origin, 0o700)
        with _opened(name, self.origin) as origin:
            os.mkdir(name, 0o700, dir_fd=self.copy)
            with _opened(name, self.copy) as copy:
                self._above.append((os.fstat(self.origin), os.fstat(self.copy), mode))
                self._move(origin, copy)

    def leave(self) -> None:
        """Return to the parents, and give the finished copy its mode, which may exclude even us."""
        origin_above, copy_above, mode = self._above.pop()
        with _opened("..", self.origin) as origin, _opened("..", self.copy) as copy:
            if not (os.path.samestat(os.fstat(origin), origin_above) and os.path.samestat(os.fstat(copy), copy_above)):
                raise _TreeRefused("its folders were moved while they were copied")
            os.fchmod(self.copy, mode & 0o777)
            self._move(origin, copy)

    def close(self) -> None:
        os.close(self.origin)
        os.close(self.copy)

    def _move(self, origin: int, copy: int) -> None:
        os.dup2(origin, self.origin, inheritable=False)
        os.dup2(copy, self.copy, inheritable=False)


def _copy_folders(pair: _FolderPair, budget: _Budget) -> None:
    waiting = [_copy_entries(pair, budget)]
    while waiting:
        _check_time(budget.deadline)
        if waiting[-1]:
            if pair.depth == DEPTH_LIMIT:
                raise _TreeRefused(f"its folders are more than {DEPTH_LIMIT} levels deep")
            try:
                pair.enter(waiting[-1].pop())
            except FileNotFoundError:
                continue  # it was removed since it was listed
            waiting.append(_copy_entries(pair, budget))
        else:
            waiting.pop()
            if waiting:
                pair.leave()


def _copy_entries(pair: _FolderPair, budget: _Budget) -> list[str]:
    """Copy all of a folder except the folders in it, whose names are returned."""
    folders: list[str] = []
    with os.scandir(pair.origin) as found:
        for entry in found:
            budget.take_entry()
            with suppress(FileNotFoundError):  # it was removed since it was listed
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISLNK(mode):
                    leads_to = os.readlink(entry.name, dir_fd=pair.origin)
                    if _stays_inside(leads_to, pair.depth):
                        os.symlink(leads_to, entry.name, dir_fd=pair.copy)
                elif stat.S_ISDIR(mode):
                    folders.append(entry.name)
                elif stat.S_ISREG(mode):
                    _copy_file(entry.name, pair, budget)
    return folders


def _stays_inside(link: str, depth: int) -> bool:
    """Return whether a link in a folder of that depth leads into the tree, whatever the other links are.

    After a name, which may be a link's, `..` could lead anywhere; at the beginning it is the folder's own parent.
    """
    steps = [step for step in link.split("/") if step not in ("", ".")]
    up = next((number for number, step in enumerate(steps) if step != ".."), len(steps))
    return not link.startswith("/") and up <= depth and ".." not in steps[up:]


def _copy_file(name: str, pair: _FolderPair, budget: _Budget) -> None:
    mode = grant(name, pair.origin, 0o400)
    source = os.open(name, os.O_RDONLY | FILE_FLAGS, dir_fd=pair.origin)
    try:
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode):
            return  # it was replaced since it was listed
        target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=pair.copy)
        try:
            os.ftruncate(target, status.st_size)
            _copy_data(source, target, status.st_size, budget)
            os.fchmod(target, mode & 0o777)
            os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
        finally:
            os.close(target)
    finally:
        os.close(source)


def _copy_data(source: int, target: int, size: int, budget: _Budget) -> None:
    """Copy the data up to `size`; holes stay holes, or an agent could blow up a small file to any size."""
    end = 0
    while end < size:
        try:
            start = os.lseek(source, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return  # only a hole is left
            raise
        end = min(os.lseek(source, start, os.SEEK_HOLE), size)
        os.lseek(target, start, os.SEEK_SET)
        while start < end and (count := os.sendfile(target, source, start, min(CHUNK_BYTES, end - start))):
            budget.take_bytes(count)
            start += count
        if start < end:
            return  # it was cut since it was opened


@contextmanager
def _opened(name: str, folder: int) -> Iterator[int]:
    descriptor = os.open(name, FOLDER_FLAGS, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _check_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError
