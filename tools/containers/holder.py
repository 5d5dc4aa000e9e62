"""Process 1 of a container: it keeps the namespaces open, reaps orphans, and is out of the commands' reach.

Commands could reach a program of the host or the image through `/proc/1`: as root they could change the mode of the
host's file, as any user trace the process and work unseen. This one is a file in memory, one per container, and it
closes itself to all but the service.

    _start:  sigaction(SIGCHLD, ignore)     the kernel reaps what is orphaned
             prctl(PR_SET_NAME, "prorl-holder")
             write(1, READY)
             read(0, …, 1)                  meanwhile the service opens the namespaces and sets limits
             prctl(PR_SET_DUMPABLE, 0)      from now on /proc/1 is closed, and it cannot be traced
             write(1, READY)
             read(0, …, 1) for ever; at the end of the input: exit(0)

It is machine code because it must be a program without an interpreter, on machines that have no compiler.
"""

from __future__ import annotations

import fcntl
import os
import struct

READY = b"ready\n"
CODE = {
    "x86_64": bytes.fromhex(
        "31d25252526a014889e66a115f6a08415a6a0d580f05"  # sigaction
        "488d35610000006a0f5fb89d0000000f05"  # its name
        "e81d000000e82b00000031f66a045fb89d0000000f05e807000000"  # tell, wait, not dumpable, tell
        "e815000000ebf9"  # wait for ever
        "6a015f488d35250000006a065a6a01580f05c3"  # tell: write
        "5031ff4889e66a015a31c00f0585c0597e01c3"  # wait: read
        "31ffb8e70000000f05"  # exit
    ),
    "aarch64": bytes.fromhex(
        "200080d2e07fbea9ff7f01a9200280d2e1030091020080d2030180d2c81080d2010000d4"
        "e00180d2c1030050e81480d2010000d4"
        "090000940e000094800080d2010080d2e81480d2010000d403000094"
        "08000094ffffff17"
        "200080d201020010c20080d2080880d2010000d4c0035fd6"
        "000080d2e1030091220080d2e80780d2010000d41f0000f14d000054c0035fd6"
        "000080d2c80b80d2010000d4"
    ),
}
"""By the kernel's name for the machine; behind it come `READY` and the name."""
NAME = b"prorl-holder"
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
_LOADED_AT, _HEADERS_BYTES, _PAGE_BYTES = 0x400000, 120, 4096
_EXECUTABLE, _READ_AND_EXECUTE, _LOAD = 2, 5, 1
_F_SEAL_EXEC = 0x20


def program(machine: str) -> bytes:
    """Return the holder as an ELF file; raise `KeyError` for an unknown machine."""
    content = CODE[machine] + READY + NAME + b"\0"
    size = _HEADERS_BYTES + len(content)
    identity = b"\x7fELF\2\1\1" + bytes(9)
    start = _LOADED_AT + _HEADERS_BYTES
    header = struct.pack("<HHIQQQIHHHHHH", _EXECUTABLE, _ELF_MACHINES[machine], 1, start, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", _LOAD, _READ_AND_EXECUTE, 0, _LOADED_AT, _LOADED_AT, size, size, _PAGE_BYTES)
    return identity + header + segment + content


def opened() -> int:
    """Return a memory file with the program, sealed; the caller closes it.

    Raises:
        KeyError: there is no program for this machine.
        OSError: the kernel makes no such file.
    """
    descriptor = os.memfd_create("prorl-holder", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.pwrite(descriptor, program(os.uname().machine), 0)
        os.fchmod(descriptor, 0o555)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals | _F_SEAL_EXEC)
        except OSError:  # before Linux 6.3
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
