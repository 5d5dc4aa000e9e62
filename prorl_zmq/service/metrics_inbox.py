"""`MetricsInbox`: collects the metrics of one run folder's processes and passes them to its gateways.

    metrics.in   Unix datagrams  ← every process of the run folder, once a second
    metrics.out  Unix stream     → the gateways: all metrics as Prometheus text, to each connection

The supervisor owns it, since it outlives its children and sees them exit. Failures end no process and are logged once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from importlib.metadata import version
from typing import TYPE_CHECKING

import msgspec

from ..metrics.catalog import BUILD, PROCESS_RESTARTS, SANDBOXES
from ..metrics.collector import MetricsCollector
from ..metrics.report import INBOX, OUTLET, MetricsReport
from ..metrics.reporter import MetricsReporter
from ..tools.sandbox.sandboxes import sandboxes_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

DATAGRAM_BYTES = 2**18
BATCH = 1024
"""Reports read before other callbacks run; more than the kernel queues."""
ASKERS_LIMIT = 8
TELL_S = 10.0
"""How long a reader may take to read everything."""

log = logging.getLogger("prorl.serve")
_decode = msgspec.msgpack.Decoder(MetricsReport).decode


class MetricsInbox:
    """The inbox of one run folder, which the caller must have locked."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._collector = MetricsCollector()
        self._askers = asyncio.Semaphore(ASKERS_LIMIT)
        self._inbox: socket.socket | None = None
        self._malformed = False
        self._sandboxes = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Collect while the context is open; if the run folder cannot have sockets, collect nothing."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as inbox:
            try:
                inbox.bind(str(self._run_dir / INBOX))
                server = await asyncio.start_unix_server(self._tell, self._run_dir / OUTLET, backlog=ASKERS_LIMIT)
            except OSError as error:
                log.warning("no metrics are collected: %s", error)
                with contextlib.suppress(OSError):
                    (self._run_dir / INBOX).unlink(missing_ok=True)  # or processes would report in vain
                yield
                return
            self._inbox = inbox
            loop.add_reader(inbox, self._take_some, inbox)
            reporter = MetricsReporter(self._run_dir, "supervisor", self._set_gauges)
            tasks = [asyncio.create_task(reporter.report_forever()), asyncio.create_task(self._count_sandboxes())]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                loop.remove_reader(inbox)
                self._inbox = None
                server.close()
                reporter.close()

    def ended(self, pid: int) -> None:
        """Record that a child has exited, which ends its gauges."""
        if self._inbox is not None:
            self._take_some(self._inbox)  # its last report may be queued
        self._collector.ended(pid)

    def restarted(self, process: str) -> None:
        PROCESS_RESTARTS.add(process)

    def _take_some(self, inbox: socket.socket) -> None:
        for _ in range(BATCH):
            try:
                datagram = inbox.recv(DATAGRAM_BYTES)
            except OSError:
                return
            try:
                self._collector.take(_decode(datagram), time.monotonic())
            except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                if not self._malformed:
                    log.warning("dropped malformed metrics: %s; further ones are not logged", error)
                self._malformed = True

    async def _tell(self, _: asyncio.StreamReader, asker: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            async with self._askers, asyncio.timeout(TELL_S):
                asker.write(self._collector.text(time.monotonic()))
                await asker.drain()
                asker.close()
                await asker.wait_closed()
        asker.transport.abort()

    def _set_gauges(self) -> None:
        BUILD.set(1, version("prorl-zmq"))
        SANDBOXES.set(self._sandboxes)

    async def _count_sandboxes(self) -> None:
        """Count the sandboxes' folder every second, in a thread, since a network file system may be slow."""
        while True:
            with contextlib.suppress(OSError):
                self._sandboxes = await asyncio.to_thread(sandboxes_in, self._run_dir / "sandboxes")
            await asyncio.sleep(1.0)
