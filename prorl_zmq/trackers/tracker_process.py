"""`TrackerProcess`: a tracker in a process of its own, so that its library cannot end, slow or litter the run it logs.

A thread would not do: libraries crash, print, and hold the interpreter, and a killed trainer's run must end in order.
Each message is one packet on a socket pair (see `adapter`), sent without waiting. Packets that the socket does not take
are kept, up to `PENDING_BYTES`, and sent with later ones; the rest is lost, with one warning. `close` waits for a time,
then kills the process. If the trainer dies, the kernel closes the socket, and the tracker ends its run.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..system.logs import one_line
from ..system.processes import ISOLATED
from .adapter import PACKET_BYTES, Answer, Opened

if TYPE_CHECKING:
    from .adapter import RunSettings

PENDING_BYTES = 8 * 2**20
KILL_S = 5.0
"""How long the kernel may take to end a process."""

log = logging.getLogger("prorl.trackers")
_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class TrackerProcess:
    """One tracker: its process, the socket to it, and the packets that wait to be sent."""

    def __init__(self, name: str, settings: RunSettings) -> None:
        self.name = name
        self.where = ""
        """Where to find the run; empty before it is open."""
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._lost = 0
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES)
        with theirs, (Path(settings.folder) / f"{name}.log").open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *ISOLATED, "-m", "prorl_zmq.trackers.tracker_child", name, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.send(msgspec.msgpack.encode(settings))

    def hang_up(self, until: float) -> None:
        """Send the waiting packets, and then the end."""
        while self._pending and (left_s := until - time.monotonic()) > 0:
            poller = select.poll()
            poller.register(self._socket, select.POLLOUT)
            poller.poll(1000 * left_s)
            self._flush()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self, until: float) -> None:
        """Wait for the process to end its run."""
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # a library may have processes of its own
            self._process.wait(KILL_S)
            log.warning("%s did not end its run in time, and was killed: the last values may be lost", self)
        self._hear()
        self._socket.close()

    def __str__(self) -> str:
        return f"tracker {self.name}"

    def send(self, packet: bytes) -> None:
        self._hear()
        if self._pending_bytes + len(packet) > PENDING_BYTES:
            self._lost += 1
            if self._lost == 1:
                log.warning("%s takes nothing at the moment: what is logged until it does is lost", self)
            return
        self._pending.append(packet)
        self._pending_bytes += len(packet)
        self._flush()

    def _flush(self) -> None:
        """Send what the socket takes; drop everything if the process has ended."""
        while self._pending:
            try:
                self._socket.send(self._pending[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self._ended()
                return
            self._pending_bytes -= len(self._pending.popleft())

    def _ended(self) -> None:
        self._pending.clear()
        self._pending_bytes = 0
        self._lost += 1
        if self._lost == 1:
            log.warning("%s has ended (exit code %s), and is off", self, self._process.poll())

    def _hear(self) -> None:
        while packet := self._next_answer():
            answer = _decoder.decode(packet)
            if isinstance(answer, Opened):
                self.where = one_line(answer.where)
            else:
                log.warning("%s: %s", self, one_line(answer.message))

    def _next_answer(self) -> bytes:
        try:
            return self._socket.recv(PACKET_BYTES)
        except BlockingIOError:
            return b""
        except ConnectionResetError:  # said once, where the process has ended without having read all; answers follow
            return self._next_answer()
