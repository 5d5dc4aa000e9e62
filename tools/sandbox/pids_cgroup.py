"""The kernel's own limit on the processes of a sandbox, where the service runs as root.

`RLIMIT_NPROC` does not bind root, and what looks at processes at intervals (`execution.watch`) is too late for a fork
bomb that takes the node's last processor. A cgroup of the `pids` controller bounds all that joins it. Where none can be
made (an ordinary user, whom RLIMIT_NPROC binds; a node that delegates none), the container does without.

    CGROUP/prorl-PID-NUMBER/    CGROUP: where this process is itself; PID: the execution server that made it
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ..processes import PROC

ROOTS = {"pids": Path("/sys/fs/cgroup/pids"), "": Path("/sys/fs/cgroup")}
"""Where the hierarchies are mounted: version 1 has one for each controller, version 2 one for all."""
PREFIX = "prorl-"
SLACK = 64
"""Processes beyond a sandbox's limit: the threads of its runtime, and room for the watch to see that it is exceeded."""


class PidsCgroup:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.descriptor = os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        """For `enter`, in a forked child that sees other files by then."""

    def enter(self) -> None:
        """Move the calling process into it; EAGAIN: it is full."""
        os.write(self.descriptor, b"0")

    def add(self, pid: int) -> None:
        os.write(self.descriptor, str(pid).encode())

    def close(self) -> None:
        """Remove it; one that still has processes stays, for `make` of a later container."""
        os.close(self.descriptor)
        with suppress(OSError):
            self._folder.rmdir()


def make_pids_cgroup(number: int, processes: int) -> PidsCgroup | None:
    """Make a cgroup for at most so many processes; None where the node allows none.

    Those that killed servers left are removed.
    """
    if os.geteuid() != 0:
        return None
    for controller, root in ROOTS.items():
        own = root / _own_cgroup(controller).lstrip("/")
        folder = own / f"{PREFIX}{os.getpid()}-{number}"
        with suppress(OSError):
            _sweep(own)
            folder.mkdir(0o755)
            try:
                (folder / "pids.max").write_text(str(processes + SLACK), encoding="ascii")
                return PidsCgroup(folder)
            except OSError:
                folder.rmdir()
    return None


def _own_cgroup(controller: str) -> str:
    for line in (PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    raise FileNotFoundError(controller)


def _sweep(own: Path) -> None:
    for folder in own.glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if not (PROC / pid).exists():
            with suppress(OSError):
                folder.rmdir()
