"""The output of a child of `prorl serve`: its destination, and the reason for the child's exit in it."""

from __future__ import annotations

import errno
import os
import re
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

STANDARD_ERROR = 2
TAIL_BYTES = 65_536
RELAY_END_S = 1.0
"""How long to wait for the last lines of an exited child, whose own children may keep the pipe open."""
_CAUSE = re.compile(r"(?:prorl-engine: )?cannot start: (.+)")
"""The line in which an engine host writes the root cause; in JSON lines the program's name is a separate field."""


class ChildOutput:
    """A child's log file, or a pipe whose lines are copied to this process's standard error."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._tail = b""
        self._begin = 0
        self._relay: threading.Thread | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.write_end = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._begin = os.fstat(self.write_end).st_size
            return
        read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        # A thread: an unread standard error must block this child only.
        self._relay = threading.Thread(target=self._copy, args=(read_end,), daemon=True)
        try:
            self._relay.start()
        except RuntimeError as error:
            os.close(read_end)
            os.close(self.write_end)
            raise OSError(errno.EAGAIN, str(error)) from error

    @property
    def name(self) -> str:
        """Where a person reads it."""
        return str(self._path) if self._path is not None else "the standard error of prorl serve"

    def close(self) -> None:
        """Close this process's write end, once the child has its own."""
        os.close(self.write_end)

    def tail(self) -> str:
        """Return the end of an exited child's output; call in a thread."""
        if self._relay is not None:
            self._relay.join(RELAY_END_S)
        elif self._path is not None:
            with suppress(OSError), self._path.open("rb") as file:
                file.seek(max(self._begin, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                self._tail = file.read(TAIL_BYTES)
        return self._tail.decode("utf-8", "replace")

    def _copy(self, read_end: int) -> None:
        with open(read_end, "rb", buffering=0) as pipe:
            while chunk := pipe.read(TAIL_BYTES):
                self._tail = (self._tail + chunk)[-TAIL_BYTES:]
                with suppress(OSError):
                    while chunk:
                        chunk = chunk[os.write(STANDARD_ERROR, chunk) :]


def reason_of(output: str) -> str:
    """Return the last root cause that an engine host wrote, else the last line with words."""
    lines = [text for line in output.splitlines() if any(map(str.isalnum, text := _text(line)))]
    causes = [cause[1] for line in lines if (cause := _CAUSE.match(line))]
    return next(reversed(causes or lines), "it said nothing")


def _text(line: str) -> str:
    """Return a line's text, which is `event` in a JSON line."""
    line = line.strip()
    if line.startswith("{"):
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(line, type=_LogLine).event
    return line


class _LogLine(msgspec.Struct):
    event: str
