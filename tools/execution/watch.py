"""Watches what all processes of a sandbox use together, since a limit of the kernel's is for each of them alone.

Memory that is shared counts for each process that has touched it, and once more if it is an open memory file. The
processes that hold the container count too, since a command can trace them and have them work for it: Apptainer's have
some seven threads and 6 MB, those of others next to nothing.

It looks at them at intervals, since nothing tells us of an allocation. A sandbox that is over a limit is ended; what
the node may lose until then is what a process can take in one interval. At the same times it reaps what the server has
adopted: the event loop keeps the signal of a child's end to itself.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ...errors import SandboxLimitExceeded
from ..processes import PROC
from .memory_files import DESCRIPTORS, TooManyDescriptors, memory_files_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...errors import ProrlError
    from ..sandbox.container import Container

INTERVAL_S = 0.25
IDLE_INTERVAL_S = 1.0
"""While nobody waits for anything: 200 idle sandboxes would take half a core otherwise."""
COUNTED = (b"RssAnon", b"RssShmem", b"VmSwap")
"""In KiB, of `/proc/PID/status`."""


class Usage(NamedTuple):
    threads: int
    memory_bytes: int


class Watch:
    """Looks at a container's processes until it is stopped."""

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
        self._timer: asyncio.TimerHandle | None = None
        self._idle = True

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
        self._container.reap_orphans()
        if not self._container.path.exists():
            self._on_gone()
            return
        error = self._excess() if self._container.isolated else None
        if error is None:
            self.start()
        else:
            self._on_exceeded(error)

    def _excess(self) -> ProrlError | None:
        limits = self._container.spec.limits
        found = self._container.processes(limits.processes + 1)
        usages = {pid: _usage(pid) for pid in (*self._container.holding(), *found)}
        threads = sum(usage.threads for usage in usages.values())
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


def _usage(pid: int) -> Usage:
    fields: dict[bytes, int] = {}
    with suppress(OSError):
        for line in (PROC / str(pid) / "status").read_bytes().splitlines():
            name, _, value = line.partition(b":")
            if name in COUNTED or name == b"Threads":
                fields[name] = int(value.split()[0])
    return Usage(max(fields.get(b"Threads", 1), 1), 1024 * sum(fields.get(name, 0) for name in COUNTED))
