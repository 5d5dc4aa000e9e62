"""Watches what all processes of a sandbox use together, and ends a sandbox that exceeds its limits.

The kernel's own limits are per process, and cgroups (see `containers.cgroups`) exist only on some nodes, so the watch
polls: the kernel reports no allocations. Between two looks a sandbox can take at most what its processes allocate in
one interval. Shared memory counts for each process that has touched it, and once more if it is an open memory file. The
processes that hold the container count too, since a command can trace them and have them work for it.

Many busy processes get the scheduling class idle, so that other sandboxes run first. Each look also reaps the orphans
that the server adopted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ...errors import SandboxFailed, SandboxLimitExceeded
from ..processes.process_tree import PROC
from .full_disk import FullDisk
from .memory_files import DESCRIPTORS, TooManyDescriptors, memory_files_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...errors import ProrlError
    from ..containers.container import Container

INTERVAL_S = 0.25
IDLE_INTERVAL_S = 1.0
"""While no request runs: otherwise 200 idle sandboxes would use half a core."""
TICKS = os.sysconf("SC_CLK_TCK")
COUNTED = (b"RssAnon", b"RssShmem", b"VmSwap")
"""In KiB, of `/proc/PID/status`."""


FAILURES = 4
"""After so many failed looks in a row the sandbox is ended."""
CROWD = 4
"""Threads per core of the node from which on a sandbox may be slowing others."""


log = logging.getLogger("prorl.sandbox")


class Usage(NamedTuple):
    threads: int
    memory_bytes: int


class Watch:
    """Looks at a container's processes from `start` to `stop`."""

    def __init__(
        self,
        container: Container,
        busy: Callable[[], bool],
        on_exceeded: Callable[[ProrlError], None],
        on_gone: Callable[[], None],
    ) -> None:
        self._container = container
        self._busy = busy
        self._on_exceeded = on_exceeded
        self._on_gone = on_gone
        self._disk = FullDisk(container.path)
        self._timer: asyncio.TimerHandle | None = None
        self._idle = True
        self._failures = 0
        self._used: tuple[float, float] | None = None
        """When its processes' CPU time was last added up, and the sum in seconds; None: they are few."""

    def start(self) -> None:
        self._idle = not self._busy()
        interval_s = IDLE_INTERVAL_S if self._idle else INTERVAL_S
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._look)

    def hurry(self) -> None:
        if self._idle:
            self.stop()
            self.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        error: ProrlError | None
        try:
            self._container.reap_orphans()
            if not self._container.path.exists():
                self._on_gone()
                return
            self._disk.look()
            error = self._excess() if self._container.isolated else None
            self._failures = 0
        except Exception as failure:
            log.exception("a look at the sandbox failed")  # the timer must not end with it, nor the limits
            self._failures += 1
            message = f"the sandbox cannot be watched any more: {type(failure).__name__}: {failure}"
            error = SandboxFailed(message, reason="watch") if self._failures == FAILURES else None
        if error is None:
            self.start()
        else:
            self._on_exceeded(error)

    def _give_way(self, pids: list[int], threads: int) -> None:
        """Set the scheduling class idle for many processes that take most of the node's CPU time."""
        cores = os.cpu_count() or 1
        if threads <= CROWD * cores:
            self._used = None
            return
        now, used = time.monotonic(), sum(map(_processor_s, pids))
        if self._used is not None and used - self._used[1] > (now - self._used[0]) * cores / 2:
            for pid in pids:
                with suppress(OSError):
                    for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - called often, and twice as quick
                        os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
        self._used = now, used

    def _excess(self) -> ProrlError | None:
        limits = self._container.spec.limits
        found = self._container.processes(limits.processes + 1)
        usages = {pid: _usage(pid) for pid in (*self._container.holding(), *found)}
        threads = sum(usage.threads for usage in usages.values())
        self._give_way(list(found), threads)
        if threads > limits.processes:
            message = f"the sandbox had {threads} processes and threads; at most {limits.processes} are allowed"
            return SandboxLimitExceeded(message, limit="processes")
        used = sum(usage.memory_bytes for usage in usages.values())
        try:
            used += memory_files_bytes((pid, usage.threads) for pid, usage in usages.items())
        except TooManyDescriptors:
            message = f"the sandbox had more than {DESCRIPTORS} open descriptors"
            return SandboxLimitExceeded(message, limit="descriptors")
        if used > limits.memory_bytes:
            message = f"the sandbox used {used >> 20} MiB of memory; at most {limits.memory_bytes >> 20} are allowed"
            return SandboxLimitExceeded(message, limit="memory_bytes")
        return None


def _processor_s(pid: int) -> float:
    with suppress(OSError):
        _, _, fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")
        user, system = fields.split()[11:13]
        return (int(user) + int(system)) / TICKS
    return 0.0


def _usage(pid: int) -> Usage:
    fields: dict[bytes, int] = {}
    with suppress(OSError):
        for line in (PROC / str(pid) / "status").read_bytes().splitlines():
            name, _, value = line.partition(b":")
            if name in COUNTED or name == b"Threads":
                fields[name] = int(value.split()[0])
    return Usage(max(fields.get(b"Threads", 1), 1), 1024 * sum(fields.get(name, 0) for name in COUNTED))
