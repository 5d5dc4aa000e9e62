"""One command run to its end over pipes: input, output in bounded memory, a time limit, and nothing left behind.

`execute` ends when the command's own process ends, not when its pipes close: a job that it left in the background
cannot hold the caller. What was written before the end is in the pipes by then, so reading them empty is exact.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from ...errors import SandboxFailed
from ..output import HeadTail
from ..processes import Child, to_the_end

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

KILL_LIMIT_S = 10.0
"""Longest time that killed processes may take to end."""
READ_BYTES = 64 * 1024
DRAIN_BYTES = 2 * 2**20
"""More than a pipe ever holds: a background job that writes for ever must not keep us reading for ever."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What became of one command."""

    exit_code: int
    """0 to 255; 128 + the signal's number if one ended it; 127 if there is no such program."""
    stdout: bytes
    """Its head and tail, with a note between them if it was longer than the limit."""
    stderr: bytes
    timed_out: bool
    """It was killed at the time limit."""
    dropped_bytes: int = 0
    """Bytes of both outputs that were left out."""


async def execute(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: Path,
    stdin: bytes,
    timeout_s: float,
    output_limit_bytes: int,
    kill: Callable[[int], None],
    pass_fds: Sequence[int] = (),
) -> ExecResult:
    """Run a host command in a process session of its own.

    Args:
        argv: the program and its arguments.
        environment: its whole environment.
        folder: its working directory.
        stdin: its whole input, written as it reads.
        timeout_s: after that, and on cancellation, it is killed.
        output_limit_bytes: how much is kept of each of its two outputs.
        kill: kills the process of that number and all that it started; called in every case, before it is reaped.
        pass_fds: descriptors that the command inherits.

    Raises:
        SandboxFailed: it could not be started, or did not end when killed.
    """
    try:
        process = subprocess.Popen(  # noqa: ASYNC220 - only the start blocks, about a millisecond
            argv,
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environment,
            cwd=folder,
            start_new_session=True,
            pass_fds=pass_fds,
        )
    except FileNotFoundError as error:
        if error.filename == argv[0]:
            return ExecResult(127, b"", f"{argv[0]}: no such program\n".encode(), timed_out=False)
        raise SandboxFailed(f"a sandbox's folder is gone: {error}") from error
    except (OSError, ValueError) as error:
        raise SandboxFailed(f"{argv[0]} cannot be started: {error}") from error
    assert process.stdout is not None
    assert process.stderr is not None
    child = Child(process.pid)
    stdout = _Reader(process.stdout, output_limit_bytes)
    stderr = _Reader(process.stderr, output_limit_bytes)
    writer = _Writer(process.stdin, stdin) if process.stdin else None
    try:
        try:
            timed_out = not await child.wait(timeout_s)
        finally:
            kill(process.pid)
            await to_the_end(child.wait(KILL_LIMIT_S))
        if not child.ended:
            raise SandboxFailed(f"process {process.pid} did not end within {KILL_LIMIT_S:g} s of being killed")
        for reader in (stdout, stderr):
            reader.drain()
    finally:
        if writer is not None:
            writer.close()
        stdout.close()
        stderr.close()
        child.close()
        if child.ended:
            process.returncode = child.reap()
    return ExecResult(
        process.returncode,
        stdout.output.content(),
        stderr.output.content(),
        timed_out,
        stdout.output.dropped_bytes + stderr.output.dropped_bytes,
    )


class _Pipe:
    """One pipe to the command: owns it, and is called when it is ready."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._descriptor = pipe.fileno()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(self._descriptor, False)


class _Reader(_Pipe):
    """Reads one output of the command as it comes."""

    def __init__(self, pipe: IO[bytes], limit_bytes: int) -> None:
        super().__init__(pipe)
        self.output = HeadTail(limit_bytes)
        self._loop.add_reader(self._descriptor, self._read)

    def drain(self) -> None:
        """Read what is in the pipe now."""
        left = DRAIN_BYTES
        while left > 0 and not self._pipe.closed and (count := self._read()):
            left -= count

    def close(self) -> None:
        if not self._pipe.closed:
            self._loop.remove_reader(self._descriptor)
            self._pipe.close()

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
    """Writes the command's input as it is read, then closes the pipe."""

    def __init__(self, pipe: IO[bytes], data: bytes) -> None:
        super().__init__(pipe)
        self._data = memoryview(data)
        self._loop.add_writer(self._descriptor, self._write)

    def close(self) -> None:
        if not self._pipe.closed:
            self._loop.remove_writer(self._descriptor)
            self._pipe.close()

    def _write(self) -> None:
        try:
            self._data = self._data[os.write(self._descriptor, self._data) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._data = self._data[:0]
        if not self._data:
            self.close()
