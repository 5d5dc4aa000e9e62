"""System calls that commands in a container may not make: namespaces, mounts, keyrings, leases, tracing of strangers.

Where the service runs as root, a command is root to the kernel although it has no capability. A user namespace would
give it capabilities over mounts of its own, cgroup file systems among them; root's keyrings are shared by all
sandboxes; and a lease on a host's file blocks others that open it for up to a minute. A process that one command leaves
could trace the next, and answer in its place; a debugger may still trace what it starts. Mounts of memory would have no
limit, io_uring hides what it holds, and contexts for asynchronous I/O are few for the whole machine. The rules are the
same for every user, so that an image behaves alike everywhere.

There are two forms: a filter that a process installs before it executes a command, and a profile for the container
runtime. The filter is assembled here because not every machine has libseccomp.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import Any

CLONE_NEWUSER = 0x10000000
F_SETLEASE = 1024
PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206
FORBIDDEN = (
    *("keyctl", "add_key", "request_key", "process_vm_writev", "io_setup", "io_uring_setup"),
    *("mount", "umount2", "pivot_root", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick"),
    "mount_setattr",
)
FORBIDDEN_WITH_NEWUSER = ("unshare", "clone")
UNKNOWN = ("clone3",)
"""Answered as unknown calls: their flags lie in memory, which no filter can read. Libc then uses clone."""
NUMBERS = {
    "x86_64": {
        "keyctl": 250, "add_key": 248, "request_key": 249, "unshare": 272, "clone": 56, "clone3": 435, "fcntl": 72,
        "ptrace": 101, "process_vm_writev": 311, "io_setup": 206, "io_uring_setup": 425, "mount": 165, "umount2": 166,
        "pivot_root": 155, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
        "fspick": 433, "mount_setattr": 442,
    },
    "aarch64": {
        "keyctl": 219, "add_key": 217, "request_key": 218, "unshare": 97, "clone": 220, "clone3": 435, "fcntl": 25,
        "ptrace": 117, "process_vm_writev": 271, "io_setup": 0, "io_uring_setup": 425, "mount": 40, "umount2": 39,
        "pivot_root": 41, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
        "fspick": 433, "mount_setattr": 442,
    },
}  # fmt: skip
"""Of the system calls, by the kernel's name for the machine."""
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000
"""From here on are the calls of another interface to the same kernel, which is not in use."""

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT, _SECOND_ARGUMENT_AT = 0, 4, 16, 24
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_SECCOMP, _FILTER_MODE = 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def filter_program(machine: str) -> bytes:
    """Return the filter as classic BPF; empty for a machine whose numbers are unknown."""
    if machine not in NUMBERS:
        return b""
    numbers = NUMBERS[machine]
    refuse = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    missing = (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        refuse,
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_GREATER_EQUAL, 0, 1, X32),
        missing,
    ]
    for names, answer in ((FORBIDDEN, refuse), (UNKNOWN, missing)):
        for name in names:
            program += [(_JUMP_EQUAL, 0, 1, numbers[name]), answer]
    program += [
        (_JUMP_EQUAL, 0, 4, numbers["fcntl"]),
        (_LOAD, 0, 0, _SECOND_ARGUMENT_AT),
        (_JUMP_EQUAL, 0, 1, F_SETLEASE),
        refuse,
        (_RETURN, 0, 0, _ALLOW),
        (_JUMP_EQUAL, 0, 5, numbers["ptrace"]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_JUMP_EQUAL, 1, 0, PTRACE_ATTACH),
        (_JUMP_EQUAL, 0, 1, PTRACE_SEIZE),
        refuse,
        (_RETURN, 0, 0, _ALLOW),
    ]
    # Any of these: look at the flags. None of them: allow.
    first, second = (numbers[name] for name in FORBIDDEN_WITH_NEWUSER)
    program += [
        (_JUMP_EQUAL, 1, 0, first),
        (_JUMP_EQUAL, 0, 3, second),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_JUMP_SET, 0, 1, CLONE_NEWUSER),
        refuse,
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


_PROGRAM = filter_program(os.uname().machine)
_libc = ctypes.CDLL(None, use_errno=True)


def install() -> None:
    """Install the filter in this process, which must be unable to gain privileges."""
    if _PROGRAM:
        program = _Program(len(_PROGRAM) // 8, _PROGRAM)
        if _libc.prctl(_PR_SET_SECCOMP, _FILTER_MODE, ctypes.byref(program), 0, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def opened() -> int | None:
    """Return the filter as a descriptor for a runtime to read, which the caller closes; None without a filter."""
    if not _PROGRAM:
        return None
    descriptor = os.memfd_create("seccomp")
    os.pwrite(descriptor, _PROGRAM, 0)
    return descriptor


def profile() -> dict[str, Any]:
    """Return the same rules, except `UNKNOWN`, as a profile of the Open Container Initiative's form.

    Apptainer answers EPERM to all that a profile forbids, and with that its own runtime starts no thread.
    """
    refuse = {"action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM}
    newuser = {"index": 0, "value": CLONE_NEWUSER, "valueTwo": CLONE_NEWUSER, "op": "SCMP_CMP_MASKED_EQ"}
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [
            {"names": list(FORBIDDEN), **refuse},
            {"names": list(FORBIDDEN_WITH_NEWUSER), **refuse, "args": [newuser]},
            {"names": ["fcntl"], **refuse, "args": [{"index": 1, "value": F_SETLEASE, "op": "SCMP_CMP_EQ"}]},
            *(
                {"names": ["ptrace"], **refuse, "args": [{"index": 0, "value": request, "op": "SCMP_CMP_EQ"}]}
                for request in (PTRACE_ATTACH, PTRACE_SEIZE)
            ),
        ],
    }
