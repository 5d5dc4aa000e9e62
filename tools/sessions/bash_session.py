"""A persistent bash in a sandbox, for an agent's tool calls.

Directory, variables, functions, aliases and `$?` are kept from one call to the next, as at a terminal. The session owns
one `ShellProcess` at a time (see `tool_session` for its end). One command runs at a time, and no call lasts much longer
than its limit.

An interactive command is `run` with a `wait_s`: the call returns the output so far, and the command continues; `send`
types on its terminal, or waits. No output is returned twice. What background jobs write between two commands is
returned apart from the next one's output; what they write during a command is part of its output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ...errors import ToolSessionLost
from ..processes.output import OUTPUT_LIMIT_BYTES, HeadTail
from .shell_process import END_LIMIT_S, ShellProcess
from .tool_session import ToolSession

if TYPE_CHECKING:
    from ..containers.container import Container

COMMAND_LIMIT_BYTES = 4 * 2**20
"""Longest command."""
INPUT_LIMIT_BYTES = 64 * 1024
"""Longest input of one `send`."""
BACKGROUND_LIMIT_BYTES = 4 * 1024
"""How much of the output between two commands is kept."""
INTERRUPT_LIMIT_S = 1.0
"""How long a command may take to end after ^C."""
INTERRUPTS = 8
"""How often in that time the foreground is interrupted, for programs that came to it since."""
KILL_LIMIT_S = 0.5
"""How long bash may take to its prompt after its new children were killed."""
SETTLE_LIMIT_S = 0.5
SETTLE_ROUNDS = 4


class BashResult(msgspec.Struct, frozen=True):
    """The result of one command, or of a running one so far."""

    output: str
    """What the terminal showed since the last call, stdout and stderr interleaved; of more than the limit the head and
    tail, with a note between them. Invalid UTF-8 is replaced."""
    exit_code: int
    """0 to 255; 128 + the signal's number if one ended it; 0 while it runs."""
    timed_out: bool = False
    """It was interrupted, or killed, at the time limit."""
    restarted: bool = False
    """Bash ended, with this command, before it, or while the one before was cancelled: only the directory and files
    were kept."""
    dropped_bytes: int = 0
    """Bytes of output that were left out."""
    running: bool = False
    """It has not ended; continue it with `BashSession.send`."""
    not_sent: bool = False
    """It had ended before the input could be sent."""
    background: str = ""
    """What background jobs wrote between the command before and this one; cut as `output` is."""


class BashSession(ToolSession[ShellProcess, BashResult]):
    """A live bash: `start` it, `run` commands one at a time, `close` it."""

    name = "bash session"

    def __init__(self, container: Container, output_limit_bytes: int = OUTPUT_LIMIT_BYTES) -> None:
        super().__init__(container, output_limit_bytes, container.directory)
        self._background = HeadTail(BACKGROUND_LIMIT_BYTES)
        self._running = False
        """A command has begun, and its end has not been returned."""

    async def run(self, command: str, timeout_s: float, wait_s: float | None = None) -> BashResult:
        """Run one command, of any number of lines, and wait for its end; background jobs may continue.

        Args:
            command: bash; an incomplete one is an error of bash's.
            timeout_s: then it is interrupted; what does not end, of all that it started, is killed.
            wait_s: if it still runs then, return the output so far and leave it running. None: wait for its end.

        Raises:
            ValueError: the command has a NUL or is longer than `COMMAND_LIMIT_BYTES`, or the one before still runs;
                nothing was run.
            ToolSessionLost: the session is closed, or bash could not be started again.
        """
        data = command.encode("utf-8", "replace")
        if b"\0" in data:
            raise ValueError("a command cannot hold a NUL character")
        if len(data) > COMMAND_LIMIT_BYTES:
            raise ValueError(f"the command has {len(data)} bytes; at most {COMMAND_LIMIT_BYTES} are taken")
        async with self._one_at_a_time:
            if self._running:
                raise ValueError("the command before still runs; send it input, wait for its end, or interrupt it")
            shell = await self._process_for_call()
            shell.read()
            self._background.append(self._output.content())
            self._output.clear()
            shell.begin(data)
            self._running = True
            return await self._wait(shell, timeout_s, wait_s)

    async def send(self, data: bytes, timeout_s: float, wait_s: float | None = None) -> BashResult:
        r"""Type on the running command's terminal, and wait for its end.

        Args:
            data: text and keys as a terminal sends them: `b"\x03"` is ^C. Empty: only wait.
            timeout_s: as for `run`.
            wait_s: as for `run`.

        Raises:
            ValueError: no command is running, or there are more than `INPUT_LIMIT_BYTES`; nothing was sent.
            ToolSessionLost: the session is closed.
        """
        if len(data) > INPUT_LIMIT_BYTES:
            raise ValueError(f"the input has {len(data)} bytes; at most {INPUT_LIMIT_BYTES} are taken")
        async with self._one_at_a_time:
            if self._closed:
                raise ToolSessionLost("the bash session is closed")
            shell = self._process
            if not self._running or shell is None:
                raise ValueError("no command is running; there is nothing to send this to")
            not_sent = bool(data) and shell.done
            if not shell.done:
                shell.type(data)
            result = await self._wait(shell, timeout_s, wait_s)
            return msgspec.structs.replace(result, not_sent=True) if not_sent else result

    def _new_process(self) -> ShellProcess:
        return ShellProcess(self._container, self._output, self._directory)

    async def _wait(self, shell: ShellProcess, timeout_s: float, wait_s: float | None) -> BashResult:
        if wait_s is not None and wait_s < timeout_s:
            result = await self._finish(shell, wait_s, stop=False)
        else:
            result = await self._finish(shell, timeout_s)
        if result is None:
            shell.read()
            output, dropped = self._output.take(more=True)
            result = BashResult(output, 0, dropped_bytes=dropped, running=True)
        background, _ = self._background.take(more=False)
        return msgspec.structs.replace(result, background=background) if background else result

    async def _stop(self, process: ShellProcess) -> None:
        """End the command and all that it started: by ^C, else by killing, else by killing bash as well."""
        stopped = await process.wait(0)
        for _ in range(INTERRUPTS):
            if not stopped:
                process.interrupt()
                stopped = await process.wait(INTERRUPT_LIMIT_S / INTERRUPTS)
        for interrupt in (False, True, True):
            if not stopped:
                process.kill_new(interrupt=interrupt)
                stopped = await process.wait(KILL_LIMIT_S)
        status = process.outcome() if stopped else None
        if status is not None:
            # What ignored the interrupt, or was in the background or a session of its own, may run on.
            process.kill_new(interrupt=False)
            # An interrupt may reach bash when the command has just ended, or before bash has read its line; then it
            # shows at the prompt, and may take what is sent there with it.
            self._directory = status.directory
            for _ in range(SETTLE_ROUNDS):
                process.settle(status.code)
                if stopped := await process.wait(SETTLE_LIMIT_S):
                    break
                process.interrupt()
        if not stopped:
            process.kill()
            await process.wait(END_LIMIT_S)

    async def _result(self, process: ShellProcess, *, timed_out: bool) -> BashResult:
        status = process.outcome()
        exit_word = False
        if status is None:
            exit_word = process.is_bash
            code = await self._end(process)
            exit_word = exit_word and not 128 < code <= 192
        else:
            code = status.code
            self._directory = status.directory
        self._running = False
        if self._closed:
            raise ToolSessionLost("the bash session was closed while a command ran")
        output, dropped = self._output.take(more=False)
        if exit_word:
            output = output.removesuffix("exit\n")  # an interactive bash's own word at `exit`
        restarted = status is None or self._restarted
        self._restarted = False
        return BashResult(output, code, timed_out, restarted, dropped_bytes=dropped)
