"""A system call filter that allows threads, but no child processes and nothing that outlives the process.

A test's limits apply to one process: with more, a solution could multiply its CPU time, or leave a process for the next
test. The BPF is written by hand, because a machine may lack the system library libseccomp.
"""

from __future__ import annotations

import errno
import os
import struct

from ...tools.containers.seccomp import ARCHITECTURES, X32

CLONE_THREAD = 0x00010000
FORKS = {"x86_64": (57, 58), "aarch64": ()}
"""`fork` and `vfork`, by the kernel's name for the machine."""
CLONE = {"x86_64": 56, "aarch64": 220}
SHARED = {"x86_64": (29, 68, 64, 240), "aarch64": (194, 186, 190, 180)}
"""`shmget`, `msgget`, `semget` and `mq_open`: their objects outlive a test, and the next one finds them by key."""
MARKS = {
    "x86_64": (141, 251, 142, 144, 203, 314, 101, 311),
    "aarch64": (140, 30, 118, 119, 122, 274, 117, 271),
}
"""`setpriority`, `ioprio_set`, `sched_setparam`, `sched_setscheduler`, `sched_setaffinity`, `sched_setattr`, `ptrace`
and `process_vm_writev`: they change another process of the sandbox, where the next test finds the change."""
PRLIMIT = {"x86_64": 302, "aarch64": 261}
"""`prlimit64` too, unless it targets the caller: the first argument is 0."""
SIGNALS = {"x86_64": (62, 200, 234, 129, 297), "aarch64": (129, 130, 131, 138, 240)}
"""`kill`, `tkill`, `tgkill`, `rt_sigqueueinfo` and `rt_tgsigqueueinfo`: allowed for the process itself only. Stopping
another one leaves a mark; killing it ends the sandbox, which would not count as the solution's failure."""
PIDFD = (434, 424, 438)
"""`pidfd_open`, `pidfd_send_signal` and `pidfd_getfd`: signals by another path."""
SOCKET = {"x86_64": 41, "aarch64": 198}
"""Allowed for the family AF_UNIX only: the counters of the loopback device outlive a test."""
AF_UNIX = 1
OWN_PID = 0x7EADBEEF
"""A placeholder in the filter for the process's own number; the process fills it in."""
CLONE3 = 435
"""Answered as an unknown call, because a filter cannot read its flags in memory. Libc then uses `clone`."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW = (_RETURN, 0, 0, 0x7FFF0000)
_REFUSE = (_RETURN, 0, 0, 0x00050000 | errno.EPERM)
_UNKNOWN = (_RETURN, 0, 0, 0x00050000 | errno.ENOSYS)


def childless_program(machine: str = "") -> bytes:
    """Return the filter as classic BPF, with `OWN_PID` in it; empty for an unknown machine."""
    machine = machine or os.uname().machine
    if machine not in CLONE:
        return b""
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, ARCHITECTURES[machine]),
        _REFUSE,
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, X32),
        _UNKNOWN,
        (_EQUAL, 0, 1, CLONE3),
        _UNKNOWN,
    ]
    for number in (*FORKS[machine], *SHARED[machine], *MARKS[machine], *PIDFD):
        program += [(_EQUAL, 0, 1, number), _REFUSE]
    only = [(PRLIMIT[machine], 0), (SOCKET[machine], AF_UNIX), *((number, OWN_PID) for number in SIGNALS[machine])]
    for number, allowed in only:
        program += [
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
            (_EQUAL, 1, 0, allowed),
            _REFUSE,
            _ALLOW,
        ]
    program += [
        (_EQUAL, 0, 3, CLONE[machine]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_ANY_BIT, 1, 0, CLONE_THREAD),
        _REFUSE,
        _ALLOW,
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
