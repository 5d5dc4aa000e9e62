"""`MetricsReporter`: sends the counts of this process to the collector of its run folder (see `report`).

Nothing is counted without a collector. A report neither waits nor raises: undelivered counts are sent with a later one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import resource
import socket
import time
from itertools import islice
from typing import TYPE_CHECKING, NoReturn

import msgspec

from ..wire.messages.base import new_id
from .catalog import METRICS, PROCESS_CPU, PROCESS_MEMORY, PROCESSES
from .metric import Gauge, Metric
from .report import CHUNK, FLUSH_S, INBOX, MetricsReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from .metric import Row

log = logging.getLogger("prorl.metrics")

PAGE_BYTES = resource.getpagesize()


class MetricsReporter:
    """One per process.

    Args:
        run_dir: where the collector is.
        process: what kind of process this is.
        set_gauges: sets all gauges of this process, before each report.
    """

    def __init__(self, run_dir: Path, process: str, set_gauges: Callable[[], None] = lambda: None) -> None:
        self._inbox = str(run_dir / INBOX)
        self._process = process
        self._set_gauges = set_gauges
        self._life = new_id()
        self._number = 0
        self._due = -math.inf
        self._random = random.Random()  # noqa: S311 - no secret; the process's own generator is its user's
        self._failed = False
        self._socket: socket.socket | None = None
        if (run_dir / INBOX).is_socket():
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            Metric.counting = True

    def report_if_due(self, now: float) -> None:
        """Report if a second has passed, on any clock; cheap enough for each round of a loop."""
        if now >= self._due:
            self._due = now + FLUSH_S
            self.report()

    async def report_forever(self) -> NoReturn:
        """Report once a second, with jitter."""
        while True:
            self.report()
            await asyncio.sleep(FLUSH_S * self._random.uniform(0.8, 1.2))

    def report(self) -> None:
        if self._socket is None:
            return
        self._number += 1
        gauges = [metric for metric in METRICS.values() if isinstance(metric, Gauge)]
        for gauge in gauges:
            gauge.clear()
        try:
            self._set_gauges()
        except Exception:  # metrics must not end a process
            if not self._failed:
                log.exception("metrics could not be read; this is said once")
            self._failed = True
        PROCESSES.set(1, self._process)
        PROCESS_MEMORY.set(_memory_bytes(), self._process)
        PROCESS_CPU.total(time.process_time(), self._process)
        rows = (row for metric in METRICS.values() for row in tuple(metric.rows()))
        while (chunk := list(islice(rows, CHUNK))) and self._is_sent(self._socket, chunk):
            for name, labels, _ in chunk:
                METRICS[name].delivered(labels)

    def close(self) -> None:
        """Send the last report."""
        if self._socket is not None:
            self.report()
            self._socket.close()
            self._socket = None

    def _is_sent(self, sender: socket.socket, rows: Sequence[Row]) -> bool:
        packed = msgspec.msgpack.encode(MetricsReport(self._life, os.getpid(), self._number, list(rows)))
        try:
            sender.sendto(packed, self._inbox)
        except OSError:  # it has too many unread, or has gone; a successor comes with its run folder's next service
            return False
        return True


def _memory_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - a Path would cost more than the rest
        return int(file.read().split()[1]) * PAGE_BYTES
