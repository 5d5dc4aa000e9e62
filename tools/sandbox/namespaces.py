"""Entering another process's namespaces, and giving up privileges: system calls that Python has not.

All of this happens in a forked child between `fork` and `exec`, where only plain calls are safe. A pidfd names the
process to join, so its number cannot have been given to another one; with it one call joins all namespaces at once, and
the kernel checks each against our rights before any of them changes (`setns(2)`, Linux 5.8).
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)

KINDS = {
    "user": 0x10000000,
    "mnt": 0x00020000,
    "pid": 0x20000000,
    "net": 0x40000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "cgroup": 0x02000000,
}
"""The namespaces of `/proc/PID/ns`, and their flags for `setns`."""
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522


def different(pid: int) -> int:
    """Give the flags of the namespaces in which a process is and this one is not.

    Raises:
        OSError: the process is gone, or not ours to look at.
    """
    flags = 0
    for name, flag in KINDS.items():
        theirs, ours = Path(f"/proc/{pid}/ns/{name}"), Path(f"/proc/self/ns/{name}")
        if theirs.readlink() != ours.readlink():
            flags |= flag
    return flags


def enter(pidfd: int, flags: int) -> None:
    """Join the namespaces; of the process namespace only children to come are members.

    Raises:
        OSError: the process ended, or the kernel refuses.
    """
    _check(_libc.setns(pidfd, flags))


def become_subreaper() -> None:
    """Adopt whatever is orphaned below this process, so that nothing it started can escape it."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def die_with_parent(number: int, parent: int) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0))
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def hide() -> None:
    """Let no process of the same user trace this one or open its descriptors, until it calls `exec`."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))


def forbid_new_privileges() -> None:
    """Let no program that this process executes gain privileges: no setuid, no file capabilities."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def drop_capabilities() -> None:
    """Give up all capabilities, for programs to come as well, root's included."""
    number = 0
    while _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1  # ends at the first one that the kernel does not know, or at once where we may not
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
