r"""One interactive bash on a terminal of its own, with two private descriptors beside it.

    terminal      what the commands read and write; ECHO and ONLCR are off, so their output comes as they wrote it
    command file  a memory file: `NUMBER \0 COMMAND \0`, written by us, read by bash
    status pipe   `NUMBER STATUS DIRECTORY \0`, written by bash's PROMPT_COMMAND, read by us

For each action one fixed line is typed: it reads the command file, restores `$?`, and evals the command with both
descriptors closed. So no command is ever typed or quoted, none can end the line early, and no output can be taken for a
prompt. The number ties a status to its action. Nobody polls: the terminal, the pipe and the process's end are events.

A status says that bash is done, not that the terminal was read; reading it until it is empty is exact, because a read
of a Linux terminal first flushes what its other side has written.

The plumbing lives in readonly functions, whose bodies no later alias can change, and is called by quoted words, which
are no aliases; what it uses of bash it calls through `builtin`, past functions. The prompt undoes a function called
`builtin` and what `enable -n` took away, and it says the status by the very `builtin eval` that the next action
needs: where that is beyond repair no status comes, so that the time limit replaces the shell.

Its limits: `exec bash` and the like lose the session until the next restart; `set -x` also shows this plumbing; under
`set -e` a last status other than 0 always ends bash, even that of `! true`; a DEBUG trap also runs between the words of
the typed line; and a command that hunts through /proc can write a false status: never take a reward from the agent's
own shell.
"""

from __future__ import annotations

import asyncio
import os
import signal
import termios
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ptyprocess import PtyProcess

from ..errors import SandboxFailed
from .processes import Child, descendants, kill, to_the_end

if TYPE_CHECKING:
    from .output import HeadTail
    from .sandbox.base import Sandbox

BASH = ("/bin/bash", "--norc", "--noprofile", "--noediting", "-i")
DIMENSIONS = (50, 120)
"""Rows and columns of the terminal."""
START_LIMIT_S = 20.0
END_LIMIT_S = 10.0
"""Longest time that a killed shell may take to end."""
READ_BYTES = 64 * 1024
READS = 16
"""Most reads of the terminal before the loop's other callbacks get their turn; each gives up to 4 KiB."""
DRAIN_READS = 64
"""More than a terminal holds: a background job that writes for ever must not keep us reading for ever."""
STATUS_LIMIT_BYTES = 64 * 1024
"""A status is a number, a code and a path; a pipe that holds more without an end is not bash's."""
RESET_SIGNALS = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGPIPE,
    signal.SIGTERM,
    signal.SIGCHLD,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGXFSZ,
)
"""Python ignores SIGPIPE, and a service in the background SIGINT; what is ignored at exec stays so in all children."""

_OPENING = (
    "{{ unset HISTFILE; set +o history; __prorl_action=0; "
    "__prorl_next() {{ IFS= builtin read -r -d '' __prorl_action && IFS= builtin read -r -d '' __prorl_command "
    '|| __prorl_command=; builtin return "$__prorl_status"; }}; '
    "__prorl_prompt() {{ {{ __prorl_status=$? __prorl_command= PS0= PS1= PS2=; unset -f builtin; "
    "builtin enable {needed} || enable builtin {needed} || __prorl_command=; }} >/dev/null && "
    'builtin eval \'\\builtin printf "%s %s %s\\0" "$__prorl_action" "$__prorl_status" "$PWD" >&{status}\'; '
    "}} 2>/dev/null; "
    "readonly -f __prorl_next __prorl_prompt; PROMPT_COMMAND='\\__prorl_prompt'; readonly PROMPT_COMMAND; "
    "IFS= read -r -d '' __prorl_command <&{command}; "
    'cd -- "$__prorl_command"; }} 2>/dev/null\n'
)
_NEEDED = "enable eval printf read return unset"
"""What the plumbing uses of bash."""
_ACTION = (
    "\\__prorl_next <&{command} 2>/dev/null && __prorl_status=0; "
    '\\builtin eval "$__prorl_command" {command}<&- {status}>&-\n'
)
"""An interrupt may end `__prorl_next` alone, so no command is left in its variable from one prompt to the next.
It starts with a plain word: after a command with an open quote bash's parser takes no reserved word there (5.2).
Under `set -e` only what is left of `&&` may fail, as the restored `$?` may; right of it stands what needs no name."""


@dataclass(frozen=True, slots=True)
class Status:
    """What bash said at its prompt."""

    code: int
    directory: str


class ShellProcess:
    """One bash: owns its process, terminal, command file and status pipe. Made by `start`, ended by `close`.

    Args:
        sandbox: where it runs.
        output: takes all that the terminal shows, also between actions.
    """

    def __init__(self, sandbox: Sandbox, output: HeadTail) -> None:
        self._sandbox = sandbox
        self._output = output
        self._loop = asyncio.get_running_loop()
        self._action = 0
        self._interrupted = False
        self._pending = b""
        self._done: asyncio.Future[Status | None] = self._loop.create_future()
        self._shell_pid = 0
        self._before: frozenset[int] = frozenset()
        with ExitStack() as resources:
            try:
                self._open(resources)
            except Exception as error:
                # ptyprocess passes on what its child met as whatever class has that name.
                raise SandboxFailed(f"bash cannot be started in a sandbox: {error}") from error
            self._resources = resources.pop_all()

    def _open(self, resources: ExitStack) -> None:
        """Open the descriptors, start bash and watch it; what was opened is closed with `resources`."""
        self._command_file = command_end = os.memfd_create("command")
        resources.callback(os.close, command_end)
        self._status_pipe, status_end = os.pipe()
        resources.callback(os.close, self._status_pipe)
        os.set_blocking(self._status_pipe, False)
        folder = self._sandbox.workspace
        self._sandbox.unlock()

        def prepare() -> None:
            """Run in the child before bash: signals as at a login, two descriptors to keep, and a plain terminal."""
            # Not by spawn's own cwd: where that fails, ptyprocess 0.7 leaves a second copy of this program running.
            os.chdir(folder)
            for number in RESET_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            os.set_inheritable(command_end, True)
            os.set_inheritable(status_end, True)
            modes = termios.tcgetattr(0)
            modes[1] &= ~termios.ONLCR
            modes[3] &= ~termios.ECHO
            termios.tcsetattr(0, termios.TCSANOW, modes)

        try:
            process = PtyProcess.spawn(
                self._sandbox.argv(BASH),
                env=self._sandbox.environment(),
                preexec_fn=prepare,
                dimensions=DIMENSIONS,
                pass_fds=(command_end, status_end),
            )
        finally:
            os.close(status_end)
        resources.callback(_let_go, process)
        self._opening = _OPENING.format(command=command_end, status=status_end, needed=_NEEDED).encode()
        self._line = _ACTION.format(command=command_end, status=status_end).encode()
        self._terminal: int = process.fd
        self._terminal_open = True
        self._modes = termios.tcgetattr(self._terminal)
        os.set_blocking(self._terminal, False)
        self._child = Child(process.pid)
        resources.callback(self._child.close)
        self._child.when_ended(self._on_end)
        self._loop.add_reader(self._status_pipe, self._on_status)
        resources.callback(self._loop.remove_reader, self._status_pipe)
        self._loop.add_reader(self._terminal, self._on_terminal)
        resources.callback(self._close_terminal)

    @classmethod
    async def start(cls, sandbox: Sandbox, output: HeadTail, directory: str) -> ShellProcess:
        """Start bash in `directory`, or in the workspace if that is gone; what it says before is forgotten.

        Raises:
            SandboxFailed: it did not come to its prompt; the message has its words.
        """
        shell = cls(sandbox, output)
        try:
            shell._write_command_file(directory.encode("utf-8", "surrogateescape") + b"\0")
            os.write(shell._terminal, shell._opening)
            if not await shell.wait(START_LIMIT_S):
                raise SandboxFailed(f"bash did not come to its prompt within {START_LIMIT_S:g} s")
            if shell._done.result() is None:
                words = output.content().decode("utf-8", "replace").strip()
                raise SandboxFailed(f"bash ended before its first prompt: {words or 'it said nothing'}")
            shell._shell_pid = sandbox.inner_pid(shell._child.pid)
        except BaseException:
            await to_the_end(shell.close())
            raise
        output.clear()
        return shell

    def begin(self, command: bytes) -> None:
        """Start one action; `wait` for it. The one before must be done."""
        self._action += 1
        self._interrupted = False
        self._done = self._loop.create_future()
        if self._child.ended:
            self._done.set_result(None)
            return
        self._before = frozenset(descendants(self._shell_pid))
        self._write_command_file(b"%d\0%b\0" % (self._action, command))
        with suppress(OSError):  # it ends just now: the process's end is an event of its own
            termios.tcsetattr(self._terminal, termios.TCSANOW, self._modes)
            os.write(self._terminal, self._line)

    async def wait(self, timeout_s: float) -> bool:
        """Wait at most so long for the action's end; give whether it came."""
        await asyncio.wait((self._done,), timeout=timeout_s)
        return self._done.done()

    def status(self) -> Status | None:
        """Give the ended action's status; None if the shell itself ended."""
        return self._done.result()

    def interrupt(self) -> None:
        """Do what ^C does: interrupt the terminal's foreground processes, whatever modes the terminal is in."""
        self._interrupted = True
        with suppress(OSError):
            group = os.tcgetpgrp(self._terminal)
            if group > 1:  # 0: nobody is in the foreground, and to killpg our own processes
                os.killpg(group, signal.SIGINT)

    def kill_new(self) -> None:
        """Kill what was started below bash since the action began, and interrupt bash, so that it starts no more."""
        if self._child.ended:
            return
        kill(*(pid for pid in descendants(self._shell_pid) if pid not in self._before))
        kill(self._shell_pid, number=signal.SIGINT)

    def kill(self) -> None:
        """Kill bash and all that it started, at once; `close` waits for their end."""
        if not self._child.reaped:
            self._sandbox.kill(self._child.pid)

    async def close(self) -> int:
        """Kill what still runs, wait for its end, free the descriptors; give bash's exit code.

        Raises:
            SandboxFailed: it did not end within `END_LIMIT_S`.
        """
        self.kill()
        ended = await self._child.wait(END_LIMIT_S)
        self._resources.close()
        if not ended:
            raise SandboxFailed(f"a shell did not end within {END_LIMIT_S:g} s of being killed")
        return self._child.reap()

    def _write_command_file(self, content: bytes) -> None:
        os.ftruncate(self._command_file, 0)
        view = memoryview(content)
        while view:
            view = view[os.pwrite(self._command_file, view, len(content) - len(view)) :]
        os.lseek(self._command_file, 0, os.SEEK_SET)

    def _on_terminal(self, reads: int = READS) -> None:
        for _ in range(reads):
            if not self._terminal_open:
                return
            try:
                data = os.read(self._terminal, READ_BYTES)
            except BlockingIOError:
                return
            except OSError:  # EIO: nobody holds its other side any more
                data = b""
            if not data:
                self._close_terminal()
            self._output.append(data)

    def _on_status(self) -> None:
        try:
            data = os.read(self._status_pipe, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._status_pipe)
            return
        *frames, self._pending = (self._pending + data).split(b"\0")
        for frame in frames:
            self._take_status(frame)
        if len(self._pending) > STATUS_LIMIT_BYTES:
            self._pending = b""
            self.kill()

    def _take_status(self, frame: bytes) -> None:
        number, _, rest = frame.decode("utf-8", "surrogateescape").partition(" ")
        code, _, directory = rest.partition(" ")
        # An interrupt that comes late makes a second prompt, and so a second status of an action that is done; one that
        # comes early takes the typed line with it, and all that is seen of the action is that second status.
        expected = {str(self._action), str(self._action - 1)} if self._interrupted else {str(self._action)}
        if number in expected and code.isdecimal() and not self._done.done():
            self._on_terminal(DRAIN_READS)
            self._done.set_result(Status(int(code) & 0xFF, directory))

    def _on_end(self) -> None:
        self._on_terminal(DRAIN_READS)
        if not self._done.done():
            self._done.set_result(None)

    def _close_terminal(self) -> None:
        if self._terminal_open:
            self._terminal_open = False
            self._loop.remove_reader(self._terminal)


def _let_go(process: PtyProcess) -> None:
    process.fileobj.close()
    # PtyProcess.close would sleep for 0.1 s; all that it does is done here.
    process.closed = True
