"""Enters a container's namespaces and drops privileges, by system calls that Python 3.11 does not offer.

This happens in a forked child between `fork` and `exec`, where only plain calls are safe. The namespaces are opened
once, before the first command runs: a command could trace the process that they are taken from, and have it move to
others.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

_libc = ctypes.CDLL(None, use_errno=True)

USER = 0x10000000
KINDS = {
    "mnt": 0x00020000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "net": 0x40000000,
    "cgroup": 0x02000000,
    "pid": 0x20000000,
}
"""The namespaces of `/proc/PID/ns` except the user namespace, and their flags for `setns`, in the order of joining."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
"""What every container has of the host's own devices."""
INOTIFY_INSTANCES = 16
"""Of a sandbox; its user has 128 in all, by default."""
_NS_GET_USERNS = 0xB701
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522
_MS_RDONLY, _MS_REMOUNT, _MS_BIND = 1, 32, 4096
_KEPT_FLAGS = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME | os.ST_RELATIME
"""Flags of a mount that no process may clear in a user namespace. Most have the same numbers for `mount`."""
ROOTS_OWN = (0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 29, 31)
"""The capabilities that package managers need of root, by their numbers in `capabilities(7)`: over files, owners, users
and signals. None that mounts, traces, makes devices, or changes networks."""


class Namespaces:
    """The namespaces of a process that this one is not in; `close` them."""

    def __init__(self, pid: int) -> None:
        """Open them; nothing else may control the process yet."""
        self._opened: list[tuple[int, int]] = []
        """Descriptors with their flags, in the order of joining."""
        try:
            self._open(pid)
        except BaseException:
            self.close()
            raise

    @property
    def kinds(self) -> int:
        return sum({flag for _, flag in self._opened})

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What a forked child must keep for `enter`."""
        return tuple(descriptor for descriptor, _ in self._opened)

    def enter(self) -> None:
        for descriptor, flag in self._opened:
            _check(_libc.setns(descriptor, flag))

    def enter_network(self) -> None:
        """In a forked child: join the network alone, and the users that own it."""
        for descriptor, flag in self._opened:
            if flag == KINDS["net"]:
                owner = fcntl.ioctl(descriptor, _NS_GET_USERNS)
                if os.fstat(owner).st_ino != os.stat("/proc/self/ns/user").st_ino:  # noqa: PTH116
                    _check(_libc.setns(owner, USER))
                _check(_libc.setns(descriptor, flag))

    def close_devices(self) -> None:
        """In a forked child: make /dev, which is memory without an owner, and for root its devices read-only."""
        root = os.geteuid() == 0
        for descriptor, flag in self._opened:
            if flag == KINDS["mnt"] or (flag == USER and not root):
                _check(_libc.setns(descriptor, flag))
        flags = os.statvfs("/dev").f_flag
        if not flags & os.ST_RDONLY:
            kept = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | (flags & _KEPT_FLAGS)
            _check(_libc.mount(None, b"/dev", None, kept, None))
        for name in DEVICES if root else ():
            path = Path("/dev") / name
            with suppress(FileNotFoundError):
                if stat.S_ISCHR(path.stat().st_mode):
                    # It stays writable as a device: what is read-only is the file that stands for it.
                    _check(_libc.mount(None, bytes(path), None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY, None))

    def limit_inotify(self) -> None:
        """In a forked child, for a container that has users of its own: leave the user some inotify instances."""
        for descriptor, flag in self._opened:
            if flag == USER:
                _check(_libc.setns(descriptor, USER))
        with suppress(OSError):  # /proc/sys is read-only in some containers
            Path("/proc/sys/user/max_inotify_instances").write_text(str(INOTIFY_INSTANCES))

    def close(self) -> None:
        for descriptor, _ in self._opened:
            os.close(descriptor)
        self._opened.clear()

    def _open(self, pid: int) -> None:
        users = {os.stat("/proc/self/ns/user").st_ino}  # noqa: PTH116
        inner = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for name, flag in KINDS.items():
                descriptor = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
                if os.fstat(descriptor).st_ino == os.stat(f"/proc/self/ns/{name}").st_ino:  # noqa: PTH116
                    os.close(descriptor)
                    continue
                self._opened.append((descriptor, flag))
                if name == "mnt":
                    # Bubblewrap's are owned by an outer user namespace, whose rights are needed to join them.
                    owner = fcntl.ioctl(descriptor, _NS_GET_USERNS)
                    if os.fstat(owner).st_ino not in users:
                        users.add(os.fstat(owner).st_ino)
                        self._opened.insert(0, (owner, USER))
                    else:
                        os.close(owner)
            if os.fstat(inner).st_ino not in users:
                self._opened.append((os.dup(inner), USER))
        finally:
            os.close(inner)


def hide() -> None:
    """Let no process of the same user trace this one or open its descriptors, until it calls `exec`."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))


def forbid_new_privileges() -> None:
    """Let no program that this process executes gain privileges: no setuid, no file capabilities."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def drop_capabilities(kept: Collection[int] = ()) -> None:
    """Give up all capabilities but some, root's too, also for the programs that this process executes."""
    number = 0
    while number in kept or _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1  # ends at the first one that the kernel does not know, or at once where we may not
    low = sum(1 << each for each in kept)  # all are of the first 32
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)(low, low)))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
