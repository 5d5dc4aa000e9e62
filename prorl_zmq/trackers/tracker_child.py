"""The process of one tracker: takes entries from its socket and gives them to the adapter, one after the other.

`python -m prorl_zmq.trackers.tracker_child NAME SOCKET`, started by `tracker_process`. An adapter that cannot begin its
run is tried again with the next entry; what it cannot take is lost, and the first such loss is told. After many in a
row the process only empties its socket. The socket's end, by the trainer's close or its death, ends the run; of a
library that hangs, a thread ends the process some time later. What libraries print is in a log of bounded size.
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
from .entries import PACKET_BYTES, Answer, Entry, Opened, Samples, Trouble
from .tracker import ADAPTER, GROUP, RunSettings

if TYPE_CHECKING:
    from .tracker import Adapter

FAILURES = 20
"""So many in a row turn the tracker off."""
END_S = 60
"""How long the adapter may take to end the run when nobody waits for it any more."""
LOG_BYTES = 2**20
MESSAGE_CHARACTERS = 500
_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


class Recorder:
    """Keeps the adapter of a run, as long as it works."""

    def __init__(self, kind: type[Adapter], settings: RunSettings, answers: socket.socket) -> None:
        self._kind = kind
        self._settings = settings
        self._answers = answers
        self._adapter: Adapter | None = None
        self._failures = 0
        """In a row."""
        self._told = False

    def open(self) -> None:
        if self._adapter is None:
            self._adapter = self._kind(self._settings)
            self._answer(Opened(self._adapter.where))

    def attempt(self, entry: Entry | None = None) -> None:
        """Open the run, and take an entry."""
        if self._failures >= FAILURES:
            return
        try:
            self.open()
            self._take(entry)
        except Exception as error:  # noqa: BLE001 - a library's
            self._failed(error)
        else:
            self._failures = 0

    def close(self) -> None:
        if self._adapter is not None:
            try:
                self._adapter.close()
            except Exception as error:  # noqa: BLE001 - a library's
                self._failed(error)

    def _take(self, entry: Entry | None) -> None:
        assert self._adapter is not None
        if isinstance(entry, Samples):
            self._adapter.samples(entry.rows, entry.step)
        elif entry is not None:
            self._adapter.log(entry.values, entry.step)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        said = f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]
        print(said, file=sys.stderr, flush=True)
        if self._failures == FAILURES:
            self._answer(Trouble(f"{said}; it has failed {FAILURES} times in a row, and is off"))
        elif not self._told:
            self._told = True
            self._answer(Trouble(f"{said}; what it cannot take is lost, and the run goes on"))

    def _answer(self, answer: Answer) -> None:
        with suppress(OSError):
            self._answers.send(msgspec.msgpack.encode(answer), socket.MSG_DONTWAIT)


def main(name: str, descriptor: int) -> None:
    Thread(target=_end_late, args=(descriptor,), daemon=True).start()
    with socket.socket(fileno=descriptor) as entries:
        settings = msgspec.msgpack.decode(entries.recv(PACKET_BYTES), type=RunSettings)
        recorder = Recorder(load_plugin(GROUP, name, "tracker", key="log", base=ADAPTER), settings, entries)
        recorder.attempt()
        while packet := entries.recv(PACKET_BYTES):
            recorder.attempt(_decoder.decode(packet))
            if os.fstat(2).st_size > LOG_BYTES:
                os.ftruncate(2, 0)
        recorder.close()


def _end_late(descriptor: int) -> None:
    """Wait for the other side's end, which may come while an adapter hangs, and then for the adapter's."""
    poller = select.poll()
    poller.register(descriptor, select.POLLRDHUP)
    poller.poll()
    time.sleep(END_S)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
