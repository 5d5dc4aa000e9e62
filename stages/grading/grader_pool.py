"""`GraderPool`: calls grading functions in separate processes, so that none can block or end the stage process.

Each call has a process (`grader_process.py`) to itself, with limits on time, memory and output. A process that has
answered is reused. All processes end with the pool, and with the process that owns it. `multiprocessing` does not
suffice: it pickles, and leaves behind the children of a killed grader or owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import msgspec

from ...errors import Closed, GraderFailed
from ...system import interpreters
from ...system.open_files import lower_open_files
from ...tools.processes.process_tree import descendants, kill
from .grader_process import LENGTH, MESSAGE_LIMIT_BYTES, Answer, Call

if TYPE_CHECKING:
    from collections.abc import Callable

GRADE_S = 60.0
"""Default time limit of a call, in seconds."""
START_LIMIT_S = 60.0
"""Longest time in seconds until a grader is ready; the first grader waits for imports."""
END_LIMIT_S = 2.0
"""Seconds in which the template must end its children once its control socket is closed."""
MEMORY_BYTES = 4 * 2**30
"""Address space of one grader process."""
SHOWN_OUTPUT = 4000


@dataclass(slots=True)
class _Grader:
    channel: socket.socket
    output: int
    """A memory file with the output of the last call."""
    template: subprocess.Popen[bytes] | None = None
    """The process that it is forked from, and ends with."""
    pid: int = 0
    calls: int = 0

    def printed(self) -> str:
        size = os.fstat(self.output).st_size
        tail = os.pread(self.output, SHOWN_OUTPUT, max(0, size - SHOWN_OUTPUT))
        return tail.decode(errors="replace")

    def end(self) -> None:
        """Kill the grader, if it has started, with all its children."""
        if self.pid:
            kill(self.pid, *descendants(self.pid))
        self.channel.close()
        os.close(self.output)


class _Died(Exception):
    """A grader's channel closed before it answered."""


class GraderPool:
    """Calls functions in grader processes; `close` it, or use it as a context."""

    def __init__(self, processes: int = 0, memory_bytes: int = MEMORY_BYTES) -> None:
        self._slots = asyncio.Semaphore(processes or len(os.sched_getaffinity(0)))
        self._memory_bytes = memory_bytes
        self._idle: list[_Grader] = []
        self._control: socket.socket | None = None
        self._template: subprocess.Popen[bytes] | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def call(
        self, function: Callable[..., Any], /, *arguments: Any, timeout_s: float = GRADE_S, returns: Any = float
    ) -> Any:
        """Call a function in a grader process and return its result.

        Args:
            function: a module-level function; the process imports its module.
            arguments: plain data.
            timeout_s: the process is killed after this time.
            returns: the type of the result, which msgspec checks; numbers must be finite.

        Raises:
            GraderFailed: the function hung, died, raised, or returned another type.
            Closed: the pool was closed before the answer came.
        """
        packed = msgspec.msgpack.encode(Call(*_name_of(function), arguments))
        if len(packed) > MESSAGE_LIMIT_BYTES:
            raise TypeError(f"the arguments take {len(packed)} bytes; at most {MESSAGE_LIMIT_BYTES} are passed on")
        async with self._slots:
            answer, printed = await self._answer(function, packed, timeout_s)
        name = f"the grader {function.__qualname__}"
        if answer.raised:
            raise GraderFailed(f"{name} raised {answer.problem}", reason="raised", output=printed)
        if answer.problem:
            raise GraderFailed(f"{name} returned {answer.problem}", reason="result", output=printed)
        return _checked(answer.value, returns, name, printed)

    def close(self) -> None:
        """End all processes, also those of calls under way; may be called again."""
        self._closed = True
        for grader in self._idle:
            grader.end()
        self._idle.clear()
        self._end_template()

    async def _answer(self, function: Callable[..., Any], packed: bytes, timeout_s: float) -> tuple[Answer, str]:
        """Ask a grader. If a reused grader dies, or one dies with its template, the call is not to blame."""
        fresh = False
        while True:
            grader = await self._start(function.__module__) if fresh or not self._idle else self._idle.pop()
            before, done = grader.calls, False
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await _ask(grader, packed)
                done = True
            except _Died:
                if before or grader.template is not self._template:
                    fresh = True
                    continue
                message = f"the grader {function.__qualname__} ended its process"
                raise GraderFailed(message, reason="crashed", output=grader.printed()) from None
            except TimeoutError:
                message = f"the grader {function.__qualname__} took longer than {timeout_s:g} s"
                raise GraderFailed(message, reason="hung", output=grader.printed()) from None
            finally:
                if not done:
                    grader.end()
            grader.calls += 1
            printed = grader.printed()
            self._idle.append(grader)
            return answer, printed

    async def _start(self, module: str) -> _Grader:
        if self._closed:
            raise Closed("the pool of graders is closed")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        grader = _Grader(ours, os.memfd_create("grader"))
        try:
            with theirs:
                self._request_grader(module, theirs.fileno(), grader.output)
            grader.template = self._template
            async with asyncio.timeout(START_LIMIT_S):
                grader.pid = LENGTH.unpack(await _received(ours, LENGTH.size))[0]
        except (OSError, _Died) as error:  # TimeoutError is an OSError
            grader.end()
            if grader.template is self._template:  # otherwise other calls have started a new template already
                self._end_template(within_s=0.0)
            message = f"no grader process could be started for {module}: {error or type(error).__name__}"
            raise GraderFailed(message, reason="crashed", output="") from error
        except BaseException:
            grader.end()  # once forked, the grader sees its channel closed
            raise
        return grader

    def _request_grader(self, module: str, channel: int, output: int) -> None:
        request = [module.encode()], [channel, output]
        if self._control is not None:
            with contextlib.suppress(OSError):
                socket.send_fds(self._control, *request)
                return
            self._end_template(within_s=0.0)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            path = msgspec.json.encode(sys.path).decode()
            self._template = interpreters.start_python(
                "prorl_zmq.stages.grading.grader_process",
                *(str(theirs.fileno()), str(self._memory_bytes), path),
                descriptor=theirs.fileno(),
                env={"OPENBLAS_NUM_THREADS": "1", **os.environ},  # a process that forks should have no threads
            )
        lower_open_files(self._template.pid)
        self._control = ours
        socket.send_fds(ours, *request)

    def _end_template(self, within_s: float = END_LIMIT_S) -> None:
        """End the template and its descendants: through its control socket, or after `END_LIMIT_S` by a signal."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._template is not None:
            try:
                self._template.wait(within_s)
            except subprocess.TimeoutExpired:
                kill(*descendants(self._template.pid), self._template.pid)
                self._template.wait()
            self._template = None


async def _ask(grader: _Grader, packed: bytes) -> Answer:
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(grader.channel, LENGTH.pack(len(packed)) + packed)
        size = LENGTH.unpack(await _received(grader.channel, LENGTH.size))[0]
        if size > MESSAGE_LIMIT_BYTES:
            raise _Died
        return msgspec.msgpack.decode(await _received(grader.channel, size), type=Answer)
    except (ConnectionError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _Died from error


async def _received(channel: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    parts = bytearray()
    while len(parts) < count:
        part = await loop.sock_recv(channel, count - len(parts))
        if not part:
            raise _Died
        parts += part
    return bytes(parts)


def _name_of(function: Callable[..., Any]) -> tuple[str, str]:
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or not name or "<" in name:
        raise TypeError(f"{function!r} is not a function of a module that a grader process could import")
    return module, name


def _checked(value: Any, returns: Any, name: str, printed: str) -> Any:
    if returns is float and isinstance(value, bool):
        return float(value)
    try:
        checked = msgspec.convert(value, returns)
    except msgspec.ValidationError as error:
        message = f"{name} returned {_shown(value)}: {error}"
        raise GraderFailed(message, reason="result", output=printed) from None
    if not _is_finite(value):
        raise GraderFailed(
            f"{name} returned {_shown(value)}, which is not a finite number", reason="result", output=printed
        )
    return checked


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, list) or all(map(_is_finite, value))
