"""The kernel's own limits on a sandbox as a whole, where cgroups can be made: by root, or where one is delegated to us.

The watch (`execution.watch`) polls: it is too late for a fork bomb and does not see all memory, and many busy processes
of one sandbox slow all others. Cgroups bound and weigh all that joins them. Where none can be made, the watch and
priorities are all there is.

    CGROUP/prorl-PID-NUMBER/    CGROUP: where this process is itself; PID: the execution server that made it
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..processes.process_tree import PROC

if TYPE_CHECKING:
    from .specification import Limits

MOUNTS = Path("/sys/fs/cgroup")
CONTROLLERS = ("pids", "memory", "cpu", "")
"""Version 1 has a hierarchy for each controller, mounted below its name; version 2 one for all."""
PREFIX = "prorl-"
QUOTA = "quota"
"""The limit on processor time, of the controller `cpu`, which also weighs."""
PERIOD_US, LEAST_US = 100_000, 1_000
"""The kernel's own period, and the least time in it, in microseconds."""
SLACK = 64
"""Processes beyond a sandbox's limit: its runtime's threads, and room for the watch to see the excess."""
SLACK_BYTES = 256 * 2**20
"""Memory beyond the limit, for the same: the watch ends a sandbox and says why, the kernel only kills a process."""


class Cgroups:
    """Those of one sandbox: one, or one for each controller."""

    def __init__(self) -> None:
        self._folders: list[Path] = []
        self.descriptors: list[int] = []
        """For `enter`, in a forked child that sees other files by then."""
        self.limits: set[str] = set()
        """What is bounded or weighed: `pids`, `memory`, `cpu`, `QUOTA`."""

    def make(self, own: Path, name: str, settings: dict[str, dict[str, str]]) -> None:
        """Make one below `own`, with those of the settings, by controller, that it accepts."""
        folder = own / name
        if not (own / "cgroup.procs").exists():
            return  # no cgroup at all: anybody can make folders there
        folder.mkdir(0o755)
        found = {each for each, files in settings.items() if _set(folder, files)}
        try:
            if not found:
                raise FileNotFoundError(folder)
            self.descriptors.append(os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
        except OSError:
            folder.rmdir()
            raise
        self._folders.append(folder)
        self.limits |= found

    def enter(self) -> None:
        """Move the calling process into them; EAGAIN: they are full."""
        for descriptor in self.descriptors:
            os.write(descriptor, b"0")

    def add(self, pid: int) -> None:
        for descriptor in self.descriptors:
            os.write(descriptor, str(pid).encode())

    def close(self) -> None:
        """Remove them; one that still has processes stays, for `make_cgroups` of a later container."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()
        for folder in self._folders:
            with suppress(OSError):
                folder.rmdir()


def make_cgroups(number: int, limits: Limits) -> Cgroups:
    """Make what the node allows; remove those that killed servers left."""
    memory = str(limits.memory_bytes + SLACK_BYTES)
    settings = {
        "pids": {"pids.max": str(limits.processes + SLACK)},
        "memory": {"memory.max": memory, "memory.limit_in_bytes": memory},
        "cpu": {"cpu.weight": "25", "cpu.shares": "256"},  # a quarter of what others have
        QUOTA: {},
    }
    if limits.cpus is not None:
        quota = str(max(LEAST_US, int(limits.cpus * PERIOD_US)))
        settings[QUOTA] = {"cpu.max": f"{quota} {PERIOD_US}", "cpu.cfs_quota_us": quota}
    made = Cgroups()
    for controller in CONTROLLERS:
        wanted = settings
        if controller:
            wanted = {each: settings[each] for each in (controller, *((QUOTA,) if controller == "cpu" else ()))}
        with suppress(OSError):
            own = MOUNTS / controller / _own_cgroup(controller).lstrip("/")
            _sweep(own)
            made.make(own, f"{PREFIX}{os.getpid()}-{number}", wanted)
    return made


def _set(folder: Path, files: dict[str, str]) -> bool:
    """Write the values of the files that are there, by either version's name; return whether one was."""
    done = False
    for name, value in files.items():
        with suppress(OSError):
            with (folder / name).open("r+") as file:
                file.write(value)
            done = True
    return done


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
