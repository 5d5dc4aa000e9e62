"""`GuardedProcess`: a template or a worker with the guard above it, as a stage process sees them.

The stage process owns their folder and the reading ends of their output and of the guard's line (`worker_process.py`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from ...system.pauses import wait_running

if TYPE_CHECKING:
    from collections.abc import Callable

OUTPUT_BYTES = 64 * 1024
"""Bytes of output that are read at a time, every `OUTPUT_S`; a process that prints more waits."""
OUTPUT_S = 0.01
WORDS = 2000
"""Characters of the end of the output, in errors."""
LINE_BYTES = 1024


class GuardedProcess:
    """One guarded process; once its `descriptors` are passed on, `listen`, and at its end `clear`."""

    def __init__(self) -> None:
        self.words = ""
        """How it ended; empty: it runs, or that is unknown."""
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._output: deque[bytes] = deque(maxlen=2)
        self.folder = tempfile.mkdtemp(prefix="prorl-environment-")
        self._line, self._guards = socket.socketpair()
        self._printed, self._printing = os.pipe()
        self._line.setblocking(False)
        os.set_blocking(self._printed, False)
        self._is_clear = False

    @property
    def descriptors(self) -> tuple[int, int]:
        """Where it prints, and its guard's end of the line."""
        return self._printing, self._guards.fileno()

    @property
    def ended(self) -> bool:
        """Whether it has ended, with all that it started."""
        return self._end.done()

    def listen(self) -> None:
        self._guards.close()
        os.close(self._printing)
        self._loop.add_reader(self._line, self._hear)
        self._loop.add_reader(self._printed, self._read_output)

    def when_ended(self, callback: Callable[[], None]) -> None:
        self._end.add_done_callback(lambda _: callback())

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the end; return whether it has come."""
        return await wait_running(self._end, timeout_s)

    def kill(self) -> None:
        """Have the guard kill it with all that it started."""
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_WR)

    def printed(self) -> str:
        """Return the end of its output."""
        self._read_output()
        return b"".join(self._output).decode(errors="replace").strip()[-WORDS:]

    def clear(self) -> None:
        """Free the folder and the descriptors; may be called again."""
        if not self._is_clear:
            self._read_output()
            self._is_clear = True
            self._loop.remove_reader(self._line)
            self._loop.remove_reader(self._printed)
            self._line.close()
            self._guards.close()
            os.close(self._printed)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _hear(self) -> None:
        heard = b""
        with suppress(ConnectionError):
            heard = self._line.recv(LINE_BYTES)
        self.words += heard.decode()
        if not heard:
            self._loop.remove_reader(self._line)
            self._end.set_result(None)

    def _read_output(self) -> None:
        if self._is_clear:
            return
        self._loop.remove_reader(self._printed)
        with suppress(OSError):
            if read := os.read(self._printed, OUTPUT_BYTES):
                self._output.append(read)
                self._loop.call_later(OUTPUT_S, self._listen_again)

    def _listen_again(self) -> None:
        if not self._is_clear:
            self._loop.add_reader(self._printed, self._read_output)
