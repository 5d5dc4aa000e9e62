"""`Program`: a program in the sandbox with which another process talks over two pipes, such as an MCP server.

The stage process has the other ends of its standard input and output, so what they say does not pass through the
execution server, which reads standard error and keeps its head and tail.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ...errors import SandboxFailed
from .command import Reader, open_pipe
from .messages import ExecResult
from .passed_socket import pass_descriptors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..containers.container import Container
    from ..processes.child import Child

WORDS_LIMIT_BYTES = 8 * 1024
"""How much of its standard error is kept."""


class Program:
    """`start` it once, `end` it."""

    name = "program"

    def __init__(
        self,
        container: Container,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: str,
        receiver: str,
    ) -> None:
        self._container = container
        self._command, self._environment, self._directory = command, environment, directory
        self._receiver = receiver
        self._child: Child | None = None
        self._words: Reader | None = None

    async def start(self) -> None:
        """Start it, and pass our ends of its pipes to the process that waits for them.

        Raises:
            SandboxFailed: the program does not exist (`reason` is `image`) or cannot be started.
        """
        await self._container.begin(self._start)

    async def _start(self) -> None:
        stdin_end, stdin = open_pipe("w")
        stdout_end, stdout = open_pipe("r")
        stderr_end, stderr = open_pipe("r")
        try:
            self._child = self._container.spawn(
                self._command,
                stdin=stdin_end,
                stdout=stdout_end,
                stderr=stderr_end,
                environment=self._environment,
                directory=self._directory,
            )
            self._words = Reader(stderr, WORDS_LIMIT_BYTES)
            pass_descriptors((stdin.fileno(), stdout.fileno()), self._container.path, self._receiver)
        except BlockingIOError:
            raise  # too many processes: `Container.begin` tries once more
        except OSError as error:
            problem = "no such program" if isinstance(error, FileNotFoundError) else error.strerror
            raise SandboxFailed(f"{self._command[0]}: {problem}", reason="image") from error
        finally:
            for ours in (stdin, stdout, *(() if self._words is not None else (stderr,))):
                ours.close()
            for theirs in (stdin_end, stdout_end, stderr_end):
                os.close(theirs)

    async def end(self, wait_s: float) -> ExecResult:
        """Wait up to `wait_s` for its end, and kill what is left of it; may be called again.

        Raises:
            SandboxFailed: it did not end when killed.
        """
        child, words = self._child, self._words
        if child is None or words is None:
            return ExecResult(0, b"", b"", timed_out=False)
        timed_out = not (child.reaped or await child.wait(wait_s))
        try:
            code = await self._container.end(child)
            words.drain()
        finally:
            words.close()
        return ExecResult(code, b"", words.output.content(), timed_out)

    async def close(self) -> None:
        """Kill it."""
        await self.end(0)
