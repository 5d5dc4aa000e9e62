"""A persistent bash in a sandbox, for an agent's tool calls.

Directory, variables, functions, aliases and `$?` stay from one call to the next, as at a terminal. The session owns one
`ShellProcess` at a time. Where bash itself ends (`exit`, a kill, a command that nothing else stops), the result says so
and the next call starts another in the same directory. No call lasts much longer than its limit, and a cancelled one
has ended its command before the cancellation goes on.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ProrlError, ToolSessionLost
from .output import OUTPUT_LIMIT_BYTES, HeadTail
from .processes import to_the_end
from .shell_process import END_LIMIT_S, ShellProcess

if TYPE_CHECKING:
    from .sandbox.base import Sandbox

COMMAND_LIMIT_BYTES = 4 * 2**20
"""Longest command."""
INTERRUPT_LIMIT_S = 1.0
"""How long a command may take to end after ^C."""
KILL_LIMIT_S = 0.5
"""How long bash may take to its prompt after its new children were killed."""
KILL_ROUNDS = 2
SETTLE_LIMIT_S = 0.5
SETTLE_ROUNDS = 4
_KEEP_STATUS = b'(\\builtin exit "$__prorl_status")'


@dataclass(frozen=True, slots=True)
class BashResult:
    """What became of one command."""

    output: str
    """What the terminal showed, stdout and stderr as they came; the head and tail of it if it was longer than the
    limit, with a note between them; bytes that are not UTF-8 are replaced."""
    exit_code: int
    """0 to 255; 128 + the signal's number if one ended it."""
    timed_out: bool = False
    """It was interrupted, or killed, at the time limit."""
    restarted: bool = False
    """Bash ended, with this command or while the one before was cancelled: only the directory and files were kept."""
    dropped_bytes: int = 0
    """Bytes of output that were left out."""


class BashSession:
    """A live bash: `start` it, `run` commands one at a time, `close` it.

    Args:
        sandbox: where it runs; must outlive the session.
        output_limit_bytes: how much of each command's output is kept.
    """

    def __init__(self, sandbox: Sandbox, output_limit_bytes: int = OUTPUT_LIMIT_BYTES) -> None:
        self._sandbox = sandbox
        self._output = HeadTail(output_limit_bytes)
        self._shell: ShellProcess | None = None
        self._directory = sandbox.directory
        self._restarted = False
        """Bash ended in a cancelled call; the next result says it."""
        self._closed = False
        self._one_at_a_time = asyncio.Lock()

    async def start(self) -> None:
        """Start bash. Without it, the first `run` does.

        Raises:
            SandboxFailed: it did not come to its prompt.
        """
        async with self._one_at_a_time:
            await self._living()

    async def run(self, command: str, timeout_s: float) -> BashResult:
        """Run one command, of any number of lines, and wait for its end; jobs in the background may go on.

        Args:
            command: bash; an incomplete one is an error of bash's.
            timeout_s: then it is interrupted; what does not end is killed.

        Raises:
            ValueError: the command has a NUL or is longer than `COMMAND_LIMIT_BYTES`; nothing was run.
            ToolSessionLost: the session is closed, or bash could not be started again.
        """
        data = command.encode("utf-8", "replace")
        if b"\0" in data:
            raise ValueError("a command cannot hold a NUL character")
        if len(data) > COMMAND_LIMIT_BYTES:
            raise ValueError(f"the command has {len(data)} bytes; at most {COMMAND_LIMIT_BYTES} are taken")
        async with self._one_at_a_time:
            try:
                shell = await self._living()
            except ProrlError as error:
                raise ToolSessionLost(f"the bash session is lost: {error.message}") from error
            shell.begin(data)
            try:
                timed_out = not await shell.wait(timeout_s)
                if timed_out:
                    await self._stop(shell)
            except asyncio.CancelledError:
                await to_the_end(self._abandon(shell))
                raise
            return await to_the_end(self._result(shell, timed_out=timed_out))

    async def close(self) -> None:
        """End bash and all that it started; a running call gets `ToolSessionLost`. May be called again.

        Raises:
            SandboxFailed: it did not end when killed.
        """
        self._closed = True
        if self._shell is not None:
            self._shell.kill()
        async with self._one_at_a_time:
            if self._shell is not None:
                await to_the_end(self._end(self._shell))

    async def _living(self) -> ShellProcess:
        if self._closed:
            raise ToolSessionLost("the bash session is closed")
        if self._shell is None:
            self._output.clear()
            self._shell = await ShellProcess.start(self._sandbox, self._output, self._directory)
        return self._shell

    async def _stop(self, shell: ShellProcess) -> None:
        """End the running command: by ^C, else by killing what it started, else by killing bash."""
        stopped = await shell.wait(0)
        if not stopped:
            shell.interrupt()
            stopped = await shell.wait(INTERRUPT_LIMIT_S)
        for _ in range(KILL_ROUNDS):
            if not stopped:
                shell.kill_new()
                stopped = await shell.wait(KILL_LIMIT_S)
        status = shell.status() if stopped else None
        if status is not None:
            # An interrupt may reach bash when the command has just ended; then it shows at the prompt, and takes what
            # is typed there with it. One empty action more, and nothing of it is left for the next call.
            self._directory = status.directory
            for _ in range(SETTLE_ROUNDS):
                shell.begin(_KEEP_STATUS)
                if stopped := await shell.wait(SETTLE_LIMIT_S):
                    break
                # The interrupt came before bash had read the command's line, so the command runs only now.
                shell.interrupt()
        if not stopped:
            shell.kill()
            await shell.wait(END_LIMIT_S)

    async def _abandon(self, shell: ShellProcess) -> None:
        """End the running command of a cancelled call, with its result."""
        await self._stop(shell)
        with suppress(ToolSessionLost):
            result = await self._result(shell, timed_out=False)
            self._restarted = result.restarted

    async def _result(self, shell: ShellProcess, *, timed_out: bool) -> BashResult:
        status = shell.status()
        if status is None:
            code = await self._end(shell)
        else:
            code = status.code
            self._directory = status.directory
        if self._closed:
            raise ToolSessionLost("the bash session was closed while a command ran")
        content = self._output.content()
        if status is None and not 128 < code <= 192:
            content = content.removesuffix(b"exit\n")  # an interactive bash's own word at `exit`
        result = BashResult(
            content.decode("utf-8", "replace"),
            code,
            timed_out,
            restarted=status is None or self._restarted,
            dropped_bytes=self._output.dropped_bytes,
        )
        self._output.clear()
        self._restarted = False
        return result

    async def _end(self, shell: ShellProcess) -> int:
        self._shell = None
        return await shell.close()
