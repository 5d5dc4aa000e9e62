"""The process of one tracker: reads messages from its socket and passes them to the adapter, one after the other.

`python -m prorl_zmq.trackers.tracker_child NAME SOCKET`, started by `tracker_process`. An adapter that cannot begin its
run is retried at growing intervals, while messages wait in the socket and in the trainer. A message that the adapter
rejects is lost. The first error of each kind is reported. The end of the socket, by the trainer's close or its death,
ends the run; if the library hangs then, a thread ends the process. What libraries print goes to a bounded log.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING

import msgspec

from ..system.plugins import load_plugin
from .adapter import ADAPTER, GROUP, PACKET_BYTES, Answer, Entry, Opened, RunSettings, Samples, Trouble

if TYPE_CHECKING:
    from .adapter import Adapter

RETRY_S, RETRY_MOST_S = 1.0, 60.0
"""The first and the longest wait before an adapter is retried."""
END_S = 60.0
"""How long an adapter may take to end its run after the trainer has gone."""
NICE = 10
"""The trainer goes first."""
LOG_BYTES = 2**20
MESSAGE_CHARACTERS = 500
_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


class Line:
    """The socket to the trainer."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._told: set[str] = set()
        self.settings = msgspec.msgpack.decode(peer.recv(PACKET_BYTES), type=RunSettings)

    def next_entry(self) -> Entry | None:
        """Wait for an entry; None: there are no more."""
        packet = self._peer.recv(PACKET_BYTES)
        return _decoder.decode(packet) if packet else None

    def run_ends(self, within_s: float) -> bool:
        """Wait for the trainer to end the run."""
        return self._poll(select.POLLRDHUP, within_s)

    def wait_gone(self) -> None:
        """Wait until the trainer has closed the socket, or is dead."""
        self._poll(select.POLLHUP, None)

    def tell(self, trouble: str, error: Exception) -> None:
        """Write an error to the log, and report the first of its kind."""
        message = f"{trouble}: {type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]
        print(message, file=sys.stderr, flush=True)
        if trouble not in self._told:
            self._told.add(trouble)
            self.answer(Trouble(message))

    def answer(self, answer: Answer) -> None:
        with suppress(OSError):
            self._peer.send(msgspec.msgpack.encode(answer), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _poll(self, event: int, within_s: float | None) -> bool:
        poller = select.poll()  # of this thread's own
        poller.register(self._peer, event)
        return bool(poller.poll(None if within_s is None else 1000 * within_s))


def begin(kind: type[Adapter], line: Line) -> Adapter | None:
    """Begin the run; None: the trainer ended it first."""
    retry_s = RETRY_S
    while True:
        try:
            adapter = kind(line.settings)
        except Exception as error:  # noqa: BLE001 - a library's
            line.tell("it cannot begin its run, and tries again", error)
        else:
            line.answer(Opened(adapter.where))
            return adapter
        if line.run_ends(retry_s):
            return None
        retry_s = min(2 * retry_s, RETRY_MOST_S)


def record(adapter: Adapter, line: Line) -> None:
    """Pass all entries to the adapter, and end the run."""
    while (entry := line.next_entry()) is not None:
        try:
            if isinstance(entry, Samples):
                adapter.samples(entry.rows, entry.step)
            else:
                adapter.log(entry.values, entry.step)
        except Exception as error:  # noqa: BLE001 - a library's
            line.tell("it loses what it cannot take", error)
        if os.fstat(sys.stderr.fileno()).st_size > LOG_BYTES:
            os.ftruncate(sys.stderr.fileno(), 0)
    try:
        adapter.close()
    except Exception as error:  # noqa: BLE001 - a library's
        line.tell("it cannot end its run", error)


def main(name: str, descriptor: int) -> None:
    os.nice(NICE)
    with socket.socket(fileno=descriptor) as peer:
        line = Line(peer)
        Thread(target=_end_late, args=(line,), daemon=True).start()
        adapter = begin(load_plugin(GROUP, name, "tracker", key="log", base=ADAPTER), line)
        if adapter is not None:
            record(adapter, line)


def _end_late(line: Line) -> None:
    """End the process `END_S` after the trainer has gone, in case the adapter hangs."""
    line.wait_gone()
    time.sleep(END_S)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
