"""Runs one command to its end over pipes: bounded output, a time limit, and nothing left behind.

`execute` ends when the command's own process ends, not when its pipes close: a job in the background cannot delay it.
What was written before the end is in the pipes by then, so reading them empty is exact. asyncio's own subprocesses are
not used: the command must be forked into its container.
"""

from __future__ import annotations

import asyncio
import os
from typing import IO, TYPE_CHECKING

from ...errors import SandboxFailed
from ..processes.child import to_the_end
from ..processes.output import HeadTail
from .messages import ExecResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..containers.container import Container
    from ..processes.child import Child

READ_BYTES = 64 * 1024
DRAIN_BYTES = 2 * 2**20
"""More than a pipe holds: a background job that writes without end must not keep the reader busy."""


async def execute(
    container: Container,
    command: Sequence[str],
    timeout_s: float,
    stdin: bytes,
    output_limit_bytes: int,
    environment: Mapping[str, str],
    directory: str,
    user: str = "",
) -> ExecResult:
    """Run a command inside, in a process session of its own; see `Sandbox.exec`.

    Raises:
        SandboxFailed: it could not be started, or did not end when killed.
        ValueError: the command has no words.
    """
    if not command:
        raise ValueError("the command is empty; give a program and its arguments")
    stdin_end, writer = open_pipe("w") if stdin else (os.open(os.devnull, os.O_RDONLY), None)
    stdout_end, stdout = open_pipe("r")
    stderr_end, stderr = open_pipe("r")
    try:
        child = container.spawn(
            command,
            stdin=stdin_end,
            stdout=stdout_end,
            stderr=stderr_end,
            environment=environment,
            directory=directory,
            user=user,
        )
    except (OSError, SandboxFailed) as error:
        for pipe in (writer, stdout, stderr):
            if pipe is not None:
                pipe.close()
        if isinstance(error, SandboxFailed):
            raise
        missing = isinstance(error, FileNotFoundError)
        problem = f"{command[0]}: {'no such program' if missing else error.strerror}\n"
        return ExecResult(127 if missing else 126, b"", problem.encode(), timed_out=False)
    finally:
        for descriptor in (stdin_end, stdout_end, stderr_end):
            os.close(descriptor)
    readers = tuple(Reader(pipe, output_limit_bytes) for pipe in (stdout, stderr))
    pipes = [*readers, *([_Writer(writer, stdin)] if writer is not None else [])]
    try:
        timed_out, code = await _run(container, child, timeout_s)
        for reader in readers:
            reader.drain()
    finally:
        for end in pipes:
            end.close()
    outputs = [reader.output for reader in readers]
    dropped = sum(output.dropped_bytes for output in outputs)
    return ExecResult(code, outputs[0].content(), outputs[1].content(), timed_out, dropped)


async def _run(container: Container, child: Child, timeout_s: float) -> tuple[bool, int]:
    try:
        timed_out = not await child.wait(timeout_s)
    except BaseException:
        await to_the_end(container.end(child))
        raise
    return timed_out, await to_the_end(container.end(child))


def open_pipe(ours: str) -> tuple[int, IO[bytes]]:
    """Return the other side's end of a new pipe, and ours (`r` or `w`), which does not block."""
    read, write = os.pipe()
    mine, theirs = (read, write) if ours == "r" else (write, read)
    os.set_blocking(mine, False)
    return theirs, os.fdopen(mine, f"{ours}b", buffering=0)


class _Pipe:
    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._descriptor = pipe.fileno()
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        if not self._pipe.closed:
            self._loop.remove_reader(self._descriptor)
            self._loop.remove_writer(self._descriptor)
            self._pipe.close()


class Reader(_Pipe):
    """Reads a pipe from now on; keeps the head and the tail of what comes."""

    def __init__(self, pipe: IO[bytes], limit_bytes: int) -> None:
        super().__init__(pipe)
        self.output = HeadTail(limit_bytes)
        self._loop.add_reader(self._descriptor, self._read)

    def drain(self) -> None:
        left = DRAIN_BYTES
        while left > 0 and not self._pipe.closed and (count := self._read()):
            left -= count

    def _read(self) -> int:
        try:
            data = os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self.close()
        self.output.append(data)
        return len(data)


class _Writer(_Pipe):
    """Writes the command's input as fast as the command reads it, then closes the pipe."""

    def __init__(self, pipe: IO[bytes], data: bytes) -> None:
        super().__init__(pipe)
        self._data = memoryview(data)
        self._loop.add_writer(self._descriptor, self._write)

    def _write(self) -> None:
        try:
            self._data = self._data[os.write(self._descriptor, self._data) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._data = self._data[:0]
        if not self._data:
            self.close()
