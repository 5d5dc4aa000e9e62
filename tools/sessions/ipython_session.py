"""A persistent Python in a sandbox, driven directly: IPython's shell in a child process, over a Unix socket.

Jupyter's messaging would cost several times the cell (`bench/tools.py`). `ipython_driver` is the other side, and
describes the socket and the pipe; its text is passed to the image's own interpreter through a descriptor, so the image
needs Python 3.8 and nothing else. This side imports nothing of IPython.

After a D exactly what is in the pipe at that moment is read: it was written before. A cell can write anything to the
socket: a frame with another number is ignored, one with its own number spoils only its own result, and for anything but
a frame the interpreter is ended.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import sys
import termios
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from ...errors import SandboxFailed
from ..processes.output import OUTPUT_LIMIT_BYTES
from .cell_session import START_LIMIT_S, CellOutcome, CellProcess, CellSession

if TYPE_CHECKING:
    from ..containers.container import Container
    from ..processes.output import HeadTail
    from .cell_session import Images

log = logging.getLogger("prorl.sandbox")

IPythonChoice = Literal["fallback", "require"]
HEADER = struct.Struct("!IIc")
CELL, READY, FAILED, IMAGE, DONE = b"C", b"R", b"F", b"I", b"D"
FRAME_LIMIT_BYTES = 9 * 2**20
"""Longest frame from the driver: an image; it sends none longer than 8 MiB."""
NAME_LIMIT, WORDS_LIMIT, PATH_LIMIT = 200, 4000, 4096
"""Most characters of other contents, which are passed on to other processes: a cell may write in the driver's name."""
READ_BYTES = 256 * 1024
READS = 16
"""Most reads before the loop's other callbacks."""
NUMBERS = 2**32
_BOOTSTRAP = (
    "import sys; sys.version_info >= (3, 8) or sys.exit('Python 3.8 or newer is needed; this is ' + sys.version); "
    "sys.path[:] = filter(None, sys.path); "  # so that no file of the workspace takes the place of a module of ours
    "import os, builtins, linecache; source = os.fdopen(int(sys.argv[1]), 'rb').read().decode(); "
    "linecache.cache['<ipython driver>'] = (len(source), None, source.splitlines(True), '<ipython driver>'); "
    "names = {'__name__': 'prorl_ipython_driver', '__builtins__': dict(vars(builtins))}; "
    "exec(compile(source, '<ipython driver>', 'exec'), names); "
    "names['main'](int(sys.argv[2]), need_ipython=sys.argv[3] == 'require')"
)


class Done(msgspec.Struct, frozen=True):
    error: Annotated[str, Meta(max_length=NAME_LIMIT)]
    directory: Annotated[str, Meta(max_length=PATH_LIMIT)]


class Ready(msgspec.Struct, frozen=True):
    python: Annotated[str, Meta(max_length=NAME_LIMIT)]
    ipython: Annotated[str, Meta(max_length=NAME_LIMIT)]
    problem: Annotated[str, Meta(max_length=WORDS_LIMIT)]
    """Why the image's IPython is not used; empty if it is."""


class Failed(msgspec.Struct, frozen=True):
    words: Annotated[str, Meta(max_length=WORDS_LIMIT)]


class PythonProcess(CellProcess):
    """One Python with our driver in it."""

    def __init__(
        self,
        container: Container,
        output: HeadTail,
        images: Images,
        python: str,
        ipython: IPythonChoice,
        directory: str,
    ) -> None:
        super().__init__(container, output, images)
        self._python = python
        self.ready: Ready | None = None
        self._number = 0
        self._received = bytearray()
        self._unsent = memoryview(b"")
        self._failed = ""
        with ExitStack() as resources:
            self._open(resources, ipython, directory)
            self._resources = resources.pop_all()

    def _open(self, resources: ExitStack, ipython: IPythonChoice, directory: str) -> None:
        self._control, theirs = socket.socketpair()
        resources.enter_context(self._control)
        self._pipe, written = os.pipe()
        resources.callback(os.close, self._pipe)
        with ExitStack() as for_child:
            for_child.enter_context(theirs)
            for_child.callback(os.close, written)
            nothing = os.open(os.devnull, os.O_RDWR)
            for_child.callback(os.close, nothing)
            source = os.memfd_create("driver")
            for_child.callback(os.close, source)
            os.write(source, _driver_source())
            os.lseek(source, 0, os.SEEK_SET)
            argv = (self._python, "-c", _BOOTSTRAP, str(source), str(theirs.fileno()), ipython)
            try:
                self._child = self._container.spawn(
                    argv,
                    stdin=nothing,
                    stdout=written,
                    stderr=written,
                    directory=directory,
                    pass_fds=(source, theirs.fileno()),
                )
            except OSError as error:
                raise SandboxFailed(
                    f"the sandbox has no Python: {self._python} cannot be started ({error.strerror}); use an image "
                    "with Python 3.8 or newer, or name its interpreter",
                    reason="python",
                ) from error
        self._control.setblocking(False)
        os.set_blocking(self._pipe, False)
        self._child.when_ended(self._on_end)
        self._loop.add_reader(self._control, self._on_control)
        resources.callback(self._loop.remove_reader, self._control)
        resources.callback(self._loop.remove_writer, self._control)
        self._loop.add_reader(self._pipe, self._on_pipe)
        resources.callback(self._loop.remove_reader, self._pipe)

    async def _get_ready(self) -> None:
        """Wait until the shell is ready and warm.

        Raises:
            SandboxFailed: Python is missing or too old, or IPython is required and missing (`reason`).
        """
        if not await self.wait(START_LIMIT_S):
            raise SandboxFailed(f"{self._python} did not get ready within {START_LIMIT_S:g} s", reason="time")
        if self._failed:
            raise SandboxFailed(
                f"IPython cannot be used in the sandbox ({self._failed}); install it in the image "
                '(pip install ipython), or allow plain Python with ipython="fallback"',
                reason="ipython",
            )
        if self.ready is None:
            words = self._output.content().decode("utf-8", "replace").strip()
            raise SandboxFailed(f"{self._python} ended as it started: {words or 'it said nothing'}", reason="python")

    def _forget(self) -> None:
        self._drain()

    def _run(self, code: str) -> None:
        self._number = (self._number + 1) % NUMBERS
        content = code.encode("utf-8", "replace")
        self._unsent = memoryview(HEADER.pack(len(content), self._number, CELL) + content)
        self._send()

    def _send(self) -> None:
        try:
            sent = self._control.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:  # it ends just now, which is an event of its own
            sent = len(self._unsent)
        self._unsent = self._unsent[sent:]
        if self._unsent:
            self._loop.add_writer(self._control, self._send)
        else:
            self._loop.remove_writer(self._control)

    def _on_pipe(self) -> None:
        for _ in range(READS):
            try:
                data = os.read(self._pipe, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._loop.remove_reader(self._pipe)
                return
            self._output.append(data)

    def _drain(self) -> None:
        """Read what is in the pipe now, and no more: background processes may write without end."""
        size = bytearray(4)
        fcntl.ioctl(self._pipe, termios.FIONREAD, size)
        left = int.from_bytes(size, sys.byteorder)
        while left:
            data = os.read(self._pipe, left)
            self._output.append(data)
            left -= len(data)

    def _on_control(self) -> None:
        for _ in range(READS):
            try:
                data = self._control.recv(READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                # It ends, or a cell has closed it; then its end, or the time limit, comes next.
                self._loop.remove_reader(self._control)
                return
            self._received += data
            self._take_frames()

    def _take_frames(self) -> None:
        while len(self._received) >= HEADER.size:
            length, number, kind = HEADER.unpack_from(self._received)
            if length > FRAME_LIMIT_BYTES or kind not in (READY, FAILED, IMAGE, DONE):
                self._received.clear()
                self._spoil("it wrote to the descriptor by which it is controlled")
                return
            end = HEADER.size + length
            if len(self._received) < end:
                return
            content = bytes(self._received[HEADER.size : end])
            del self._received[:end]
            if number == self._number and not (self._done.done() or self.fault):
                self._take(kind, content)

    def _take(self, kind: bytes, content: bytes) -> None:
        try:
            if kind == IMAGE:
                self._images.append(content)
            elif kind == DONE:
                done = msgspec.json.decode(content, type=Done)
                self._drain()
                self._done.set_result(CellOutcome(done.error, done.directory))
            elif kind == READY:
                self.ready = msgspec.json.decode(content, type=Ready)
                if self.ready.problem:
                    log.info("plain Python runs instead of IPython: %s", self.ready.problem)
                self._done.set_result(CellOutcome("", ""))
            else:
                self._failed = msgspec.json.decode(content, type=Failed).words
        except msgspec.DecodeError:
            self._spoil("it wrote to the descriptor by which it is controlled")

    def _on_end(self) -> None:
        if self._freed:
            return
        # What it said before it ended was sent before, but may not have been read.
        self._on_control()
        self._drain()
        if not self._done.done():
            self._done.set_result(None)


class IPythonSession(CellSession):
    """A live Python: IPython's shell, or plain `exec` where the image has no IPython (see `CellSession`)."""

    def __init__(
        self,
        container: Container,
        *,
        python: str = "",
        ipython: IPythonChoice = "fallback",
        output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
    ) -> None:
        super().__init__(container, output_limit_bytes)
        self._python = python or ("python3" if container.isolated else sys.executable)
        self._ipython: IPythonChoice = ipython

    def _new_process(self) -> CellProcess:
        return PythonProcess(self._container, self._output, self._images, self._python, self._ipython, self._directory)

    @property
    def ipython_version(self) -> str:
        """Known once it has started; empty if the image has no IPython."""
        return self._process.ready.ipython if isinstance(self._process, PythonProcess) and self._process.ready else ""


@cache
def _driver_source() -> bytes:
    return Path(__file__).with_name("ipython_driver.py").read_bytes()
