"""The event loop of a broker's process: poll sockets, drain ready ones, and do housekeeping.

The loop uses a plain `zmq.Poller`, since `zmq.asyncio` reached a fifth of its throughput. A signal, or `stop` from
another thread, wakes the loop through a socket pair.
"""

from __future__ import annotations

import math
import signal
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import zmq

from ..metrics.catalog import PROCESS_PAUSED, UNREAD_ROUNDS
from ..metrics.reporter import MetricsReporter
from ..system.memory import give_memory_back
from ..system.pauses import RunningClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BATCH = 256
"""Most messages that are read from one socket before the next socket is served."""
MAX_WAIT_S = 60.0
MAX_SOCKETS = 65_535
"""Limit of sockets per context: a rollout broker has one per stage process, and libzmq's default is 1,023."""


class Loop:
    """A loop that owns a ZeroMQ context and its sockets, and runs in one thread until `stop`."""

    def __init__(self) -> None:
        give_memory_back()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, min(MAX_SOCKETS, self.context.get(zmq.SOCKET_LIMIT)))
        self._poller = zmq.Poller()
        self._drains: dict[int, tuple[zmq.Socket[bytes], Callable[[], None]]] = {}
        self._files: dict[int, Callable[[], None]] = {}
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._poller.register(self._wake_receiver.fileno(), zmq.POLLIN)
        self._stopped = False
        self.has_read_all = True
        """Whether the last round left no messages unread, so a peer's silence is not caused by unread messages."""
        self.clock = RunningClock()
        self._unread_rounds = 0
        self._reporter: MetricsReporter | None = None

    def report_metrics(self, run_dir: Path, process: str, set_gauges: Callable[[], None]) -> None:
        """Report the metrics of the process once a second while the loop runs (see `MetricsReporter`)."""

        def set_all() -> None:
            set_gauges()
            UNREAD_ROUNDS.total(self._unread_rounds, process)
            PROCESS_PAUSED.total(self.clock.lost_s, process)

        self._reporter = MetricsReporter(run_dir, process, set_all)

    def register(self, zmq_socket: zmq.Socket[bytes], drain: Callable[[], None]) -> None:
        """Call `drain` whenever the socket has messages; `drain` may leave some for the next round."""
        self._poller.register(zmq_socket, zmq.POLLIN)
        self._drains[id(zmq_socket)] = (zmq_socket, drain)

    def unregister(self, zmq_socket: zmq.Socket[bytes]) -> None:
        """Remove a socket before it is closed; may be called while messages are drained."""
        self._poller.unregister(zmq_socket)
        del self._drains[id(zmq_socket)]

    def register_file(self, file: socket.socket, ready: Callable[[], None]) -> None:
        """Call `ready` once in each round in which a plain socket is readable or accepts a connection."""
        self._poller.register(file.fileno(), zmq.POLLIN)
        self._files[file.fileno()] = ready

    def unregister_file(self, file: socket.socket) -> None:
        """Remove a plain socket before it is closed."""
        self._poller.unregister(file.fileno())
        del self._files[file.fileno()]

    def run(self, housekeep: Callable[[], float], on_ready: Callable[[], None]) -> None:
        """Serve until `stop`, or until SIGTERM or SIGINT in the main thread.

        `on_ready` is called once, after the signal handlers are installed; `housekeep` after each round, and returns
        the seconds until its next call is due.
        """
        restore = self._handle_signals() if threading.current_thread() is threading.main_thread() else None
        try:
            on_ready()
            wait_s = 0.0
            while not self._stopped:
                wait_ms = math.ceil(min(wait_s, MAX_WAIT_S) * 1000)
                self.clock.waits(wait_ms / 1000)
                ready = dict(self._poller.poll(wait_ms))
                now = self.clock.now()
                self.has_read_all = True
                for zmq_socket, drain in tuple(self._drains.values()):
                    if id(zmq_socket) in self._drains and zmq_socket in ready:
                        drain()
                        if not zmq_socket.closed and int(zmq_socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                            self.has_read_all = False
                for file, drain in tuple(self._files.items()):
                    if file in ready:
                        drain()
                self._unread_rounds += not self.has_read_all
                wait_s = housekeep()
                if self._reporter is not None:
                    self._reporter.report_if_due(now)
        finally:
            if restore is not None:
                restore()

    def stop(self) -> None:
        """Make `run` return soon; may be called repeatedly, from any thread or signal handler."""
        with suppress(OSError):  # the loop is already awake, or closed
            self._wake_sender.send(b"\0")
        self._stopped = True  # after the byte, which `resume` reads

    def resume(self) -> None:
        """Allow another `run` after `stop`."""
        self._wake_receiver.recv(64)
        self._stopped = False

    def close(self) -> None:
        if self._reporter is not None:
            self._reporter.close()
        self._stopped = True
        self.context.destroy(linger=0)
        self._wake_receiver.close()
        self._wake_sender.close()

    def _handle_signals(self) -> Callable[[], None]:
        numbers = (signal.SIGTERM, signal.SIGINT)
        previous = [(number, signal.signal(number, lambda *_: self.stop())) for number in numbers]

        def restore() -> None:
            for number, handler in previous:
                signal.signal(number, handler)

        return restore
