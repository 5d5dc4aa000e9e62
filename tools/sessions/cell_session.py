"""A persistent interpreter in a sandbox that runs an agent's cells: the base of Python sessions and Jupyter kernels.

State is kept from one cell to the next. The session owns one `CellProcess` at a time (see `tool_session` for its end).
No call lasts much longer than its limit. Output of a background thread or process belongs to the cell that runs at that
time; between cells it is dropped.
"""

from __future__ import annotations

import signal
import struct
from abc import abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ...errors import ToolSessionLost
from ..processes.output import OUTPUT_LIMIT_BYTES
from ..processes.process_tree import descendants, kill
from .tool_session import SessionProcess, ToolSession

if TYPE_CHECKING:
    from ..containers.container import Container
    from ..processes.output import HeadTail

CODE_LIMIT_BYTES = 4 * 2**20
"""Longest cell."""
IMAGES = 16
"""Most images of one cell that are kept."""
IMAGES_LIMIT_BYTES = 32 * 2**20
"""Most bytes of one cell's images together that are kept."""
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
START_LIMIT_S = 60.0
"""How long an interpreter may take to its first cell; IPython's first import from a cold disk takes seconds."""
INTERRUPT_LIMIT_S = 1.0
"""How long a cell may take to end after an interrupt."""
KILL_LIMIT_S = 2.0
"""How long it may take after its new children were killed. On a busy machine a traceback alone takes a second, and a
killed interpreter loses the agent's state."""
KILL_ROUNDS = 2
END_LIMIT_S = 10.0
"""Longest time that a killed interpreter may take to end."""


class CellResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str
    """What it wrote, its last expression's value and tracebacks, in order; of more than the limit the head and tail,
    with a note between them. Invalid UTF-8 is replaced."""
    images: tuple[bytes, ...] = ()
    """PNG files, in order."""
    error: str = ""
    """The name of the exception that ended the cell; empty if none did."""
    timed_out: bool = False
    """It was interrupted, or its interpreter killed, at the time limit."""
    restarted: bool = False
    """The interpreter ended, with this cell or while the one before was cancelled: only files were kept."""
    ended: str = ""
    """How the interpreter ended in this cell, such as "it was killed by signal 11 (SIGSEGV)"."""
    dropped_bytes: int = 0
    """Bytes of text that were left out."""
    dropped_images: int = 0
    """Images that were left out: too many, too large, or not PNG."""

    @property
    def ok(self) -> bool:
        """Whether the cell came to its end by itself, without an exception."""
        return not (self.error or self.ended or self.timed_out)


class Images:
    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self._size = 0
        self.dropped = 0
        """How many were left out."""

    def append(self, image: bytes) -> None:
        """Add one; omit it if it is not a PNG file, or too much."""
        fits = len(self._kept) < IMAGES and self._size + len(image) <= IMAGES_LIMIT_BYTES
        if fits and png_dimensions(image):
            self._kept.append(image)
            self._size += len(image)
        else:
            self.dropped += 1

    def content(self) -> tuple[bytes, ...]:
        return tuple(self._kept)

    def clear(self) -> None:
        self._kept.clear()
        self._size = self.dropped = 0


def png_dimensions(image: bytes) -> tuple[int, int] | None:
    """Return a PNG file's width and height in pixels; None if it is none."""
    if len(image) < 24 or not image.startswith(PNG_SIGNATURE):
        return None
    width, height = struct.unpack_from("!II", image, 16)
    return width, height


class CellOutcome(NamedTuple):
    error: str
    """The exception's name, or empty."""
    directory: str
    """Its working directory; empty if unknown."""


class CellProcess(SessionProcess[CellOutcome]):
    def __init__(self, container: Container, output: HeadTail, images: Images) -> None:
        super().__init__(container, output)
        self.fault = ""
        """Why it was ended from this side, if it was."""
        self._images = images
        self._before: frozenset[int] = frozenset()
        """The processes below it before the cell began."""

    def begin(self, code: str) -> None:
        """Start one cell; `wait` for it. The one before must be done."""
        self._done = self._loop.create_future()
        self._forget()
        self._output.clear()
        self._images.clear()
        if self._child.ended:
            self._done.set_result(None)
            return
        self._before = frozenset(descendants(self._child.pid))
        self._run(code)

    @abstractmethod
    def _forget(self) -> None: ...

    @abstractmethod
    def _run(self, code: str) -> None: ...

    def interrupt(self) -> None:
        """Do what ^C does: interrupt the interpreter and what the cell has started, but nothing older."""
        if not self._child.ended:
            kill(self._child.pid, *self._new(), number=signal.SIGINT)

    def kill_new(self) -> None:
        """Kill what the cell has started, and interrupt the interpreter, so that it starts no more."""
        if not self._child.ended:
            kill(*self._new())
            kill(self._child.pid, number=signal.SIGINT)

    def _new(self) -> list[int]:
        return [pid for pid in descendants(self._child.pid) if pid not in self._before]

    def _spoil(self, fault: str) -> None:
        """End an interpreter that a cell has turned against its own session."""
        self.fault = fault
        self.kill()


class CellSession(ToolSession[CellProcess, CellResult]):
    """A live interpreter: `start` it, `run` cells one at a time, `close` it."""

    name = "Python session"

    def __init__(self, container: Container, output_limit_bytes: int = OUTPUT_LIMIT_BYTES) -> None:
        super().__init__(container, output_limit_bytes, "")
        self._images = Images()

    async def run(self, code: str, timeout_s: float) -> CellResult:
        """Run one cell and wait for its end; background threads and processes may continue.

        Args:
            code: of any number of lines; an incomplete one is an error of the interpreter's.
            timeout_s: then it is interrupted; if that does not end it, the interpreter is killed.

        Raises:
            ValueError: the code is longer than `CODE_LIMIT_BYTES`; nothing was run.
            ToolSessionLost: the session is closed, or the interpreter could not be started again.
        """
        size = len(code.encode("utf-8", "replace"))
        if size > CODE_LIMIT_BYTES:
            raise ValueError(f"the code has {size} bytes; at most {CODE_LIMIT_BYTES} are taken")
        async with self._one_at_a_time:
            process = await self._process_for_call()
            process.begin(code)
            result = await self._finish(process, timeout_s)
            assert result is not None
            return result

    async def _stop(self, process: CellProcess) -> None:
        process.interrupt()
        stopped = await process.wait(INTERRUPT_LIMIT_S)
        for _ in range(KILL_ROUNDS):
            if not stopped:
                process.kill_new()
                stopped = await process.wait(KILL_LIMIT_S)
        if not stopped:
            process.kill()
            await process.wait(END_LIMIT_S)

    async def _result(self, process: CellProcess, *, timed_out: bool) -> CellResult:
        outcome = process.outcome()
        ended = ""
        if outcome is None:
            code = await self._end(process)
            ended = process.fault or _way(code)
        elif outcome.directory:
            self._directory = outcome.directory
        if self._closed:
            raise ToolSessionLost("the Python session was closed while a cell ran")
        restarted = outcome is None or self._restarted
        self._restarted = False
        return CellResult(
            self._output.content().decode("utf-8", "replace"),
            self._images.content(),
            error=outcome.error if outcome else "",
            timed_out=timed_out,
            restarted=restarted,
            ended=ended,
            dropped_bytes=self._output.dropped_bytes,
            dropped_images=self._images.dropped,
        )


def _way(code: int) -> str:
    if 128 < code <= 192:
        with suppress(ValueError):
            number = signal.Signals(code - 128)
            return f"it was killed by signal {number.value} ({number.name})"
    return f"it exited with code {code}"
