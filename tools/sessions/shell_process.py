r"""One interactive bash on a terminal of its own, with two private descriptors.

    terminal        what the commands read and write; ECHO and ONLCR are off, so their output comes as they wrote it
    control socket  lines that bash reads at its prompt, from us; `[TRAP] \0 NUMBER STATUS FLAGS DIRECTORY \0` at each
                    prompt, to us: the ERR trap, if there is one, `$?`, `$-`
    command file    a memory file: `\n COMMAND \0 NUMBER \0`, written by us, read by bash

At its prompt bash's standard input is the control socket, and during a command it is the terminal. So no command is
typed or quoted, none can end the line early, no output can be taken for a prompt, input that a command left unread is
never run, and no other reader of the terminal can take bash's line. The one line per action, fixed but for the action's
number, reads the command file, restores `$?`, and evals the command. The terminal, the socket and the process's end are
events; nothing polls.

An interrupt may take the line with it, or come before bash has read it. So it withdraws the command as well, by
emptying the file, and a line runs only the whole command of its own action. A status with a minus before the number
says that nothing of the action was run. An action without a command, `settle`, ends when nothing of those before it is
left.

Both private descriptors are closed when bash executes a program. A socket cannot be opened through /proc, and the
kernel stamps each write to it with the writer's number: only bash itself is heard, and only with its action's number.
After a status the terminal is read until it is empty, which is exact: a read of a Linux terminal first flushes what its
other side has written.

`shell_text` has what bash is given. Where bash is beyond repair no status comes, and the time limit ends the action.

Limits: `exec bash` loses the session until the next restart; standard input is the terminal again at each command; `set
-x` and a DEBUG trap also show the `eval`; and a command that calls the plumbing itself can report any status: never
take a reward from the agent's own shell. Of background jobs bash still prints `[1] PID`, and `[1]+ Done` if one ends
while a foreground program runs: each known way to silence it (`source`, PROMPT_COMMAND, `bash -i FILE`, a SIGCHLD trap,
bash without `-i`) changes something else. `pexpect` is not used: it finds the end of a command by a prompt in the
output.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import struct
import termios
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ...errors import SandboxFailed
from ..processes.process_tree import PROC, kill
from .new_processes import NewProcesses
from .shell_text import PrivateFiles, action_line, command_file, evaluated, opening_line
from .tool_session import SessionProcess

if TYPE_CHECKING:
    from ..containers.container import Container
    from ..processes.output import HeadTail

BASH = ("/bin/sh", "-c", 'exec "$@"', "sh", "bash", "--norc", "--noprofile", "--noediting", "-i")
"""Found along the PATH: not every image has bash in /bin."""
NOT_FOUND = 127
INTERRUPTED = 128 + signal.SIGINT
DIMENSIONS = (50, 120)
"""Rows and columns of the terminal."""
START_LIMIT_S = 20.0
END_LIMIT_S = 10.0
"""Longest time that a killed shell may take to end."""
READ_BYTES = 64 * 1024
READS = 16
"""Most reads of the terminal before the loop's other callbacks; each returns up to 4 KiB."""
DRAIN_READS = 64
"""More than a terminal holds: a background job that writes without end must not keep the reader busy."""
KILLED_AT_ONCE = 4096
STATUS_LIMIT_BYTES = 64 * 1024
"""A status is a number, a code and a path; longer data without an end is not bash's."""
PRIVATE_FROM = 900
"""Bash's private descriptors have numbers from here, which no script picks; at most half the limit on them."""
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Status:
    code: int
    directory: str


class ShellProcess(SessionProcess[Status]):
    """One bash: owns its process, terminal, control socket and command file."""

    def __init__(self, container: Container, output: HeadTail, directory: str) -> None:
        super().__init__(container, output)
        self._directory = directory
        self._action = 0
        self._interrupted: set[tuple[int, bytes]] = set()
        """The foreground groups that were interrupted in this action, and what their leaders ran."""
        self._withdrawn = False
        """The action has no command, or none any more."""
        self._traps_errors = self._minds_status = False
        """What a failing command triggers, as of the last prompt."""
        self._pending = b""
        self._input = bytearray()
        """Waits for room in the terminal."""
        self._typed = False
        """The terminal may hold unread input."""
        with ExitStack() as resources:
            self._open(resources)
            self._resources = resources.pop_all()

    def _open(self, resources: ExitStack) -> None:
        self._control, theirs = socket.socketpair()
        resources.callback(self._control.close)
        self._control.setblocking(False)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._command_file = os.memfd_create("command")
        resources.callback(os.close, self._command_file)
        # For reading only: what bash starts without `exec` has it as well.
        os.fchmod(self._command_file, 0o400)
        self._command_end = os.open(f"/proc/self/fd/{self._command_file}", os.O_RDONLY | os.O_CLOEXEC)
        resources.callback(os.close, self._command_end)
        with theirs, ExitStack() as passed:
            lowest = min(PRIVATE_FROM, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
            ends = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, lowest) for each in (theirs.fileno(), self._command_end)]
            for end in ends:
                passed.callback(os.close, end)
            self._child, self._terminal = self._container.terminal(BASH, "", ends, DIMENSIONS)
            self._prompt_input = f"socket:[{os.fstat(ends[0]).st_ino}]"
        resources.callback(os.close, self._terminal)
        self._new_processes = NewProcesses(self._child.pid)
        resources.callback(self._new_processes.close)
        files = PrivateFiles(*ends, *range(max(ends) + 1, max(ends) + 4))
        self._opening = opening_line(files)
        self._line = partial(action_line, files)
        self._terminal_open = True
        self._modes = termios.tcgetattr(self._terminal)
        self._modes[0] &= ~termios.IXON  # ^S is a key of editors; as a stop of the output it would only hang a command
        os.set_blocking(self._terminal, False)
        self._child.when_ended(self._on_end)
        self._loop.add_reader(self._control, self._on_status)
        resources.callback(self._loop.remove_reader, self._control)
        self._loop.add_reader(self._terminal, self._on_terminal)
        resources.callback(self._close_terminal)

    async def _get_ready(self) -> None:
        """Start bash in its directory, or in the workspace if that is gone; drop its output before the prompt."""
        self._write_command_file(self._directory.encode("utf-8", "surrogateescape") + b"\0")
        with suppress(OSError):  # it has ended already: that is an event of its own
            os.write(self._terminal, self._opening)
        if not await self.wait(START_LIMIT_S):
            raise SandboxFailed(f"bash did not come to its prompt within {START_LIMIT_S:g} s", reason="time")
        if self.outcome() is None:
            words = self._output.content().decode("utf-8", "replace").strip()
            if self._child.reap() == NOT_FOUND:
                raise SandboxFailed(f"the image has no bash: {words}", reason="image")
            raise SandboxFailed(f"bash ended before its first prompt: {words or 'it said nothing'}", reason="start")
        self._output.clear()

    @property
    def done(self) -> bool:
        return self._done.done()

    def begin(self, command: bytes) -> None:
        """Start one action; `wait` for it. The one before must be done, and settled if it was interrupted."""
        text = evaluated(command, minds_status=self._minds_status)
        self._begin(command_file(text, self._action + 1), INTERRUPTED)

    def settle(self, code: int) -> None:
        """Start an action that only sets `$?`; at its end nothing of those before is left."""
        self._begin(b"", code)

    def _begin(self, content: bytes, code: int) -> None:
        """Start an action, with an exit code for it if there is nothing to run."""
        self._action += 1
        self._interrupted.clear()
        self._withdrawn = not content
        self._done = self._loop.create_future()
        if self._child.ended:
            self._done.set_result(None)
            return
        self._new_processes.mark()
        self._write_command_file(content)
        with suppress(OSError):  # it ends just now: the process's end is an event of its own
            self._forget_input()
            termios.tcsetattr(self._terminal, termios.TCSANOW, self._modes)
            self._control.send(self._line(self._action, code, content))

    def type(self, data: bytes) -> None:
        """Type on the terminal, for the running command; data that does not fit waits for room."""
        self._typed = True
        if data and not self._input:
            self._loop.add_writer(self._terminal, self._on_room)
        self._input += data

    def read(self) -> None:
        self._on_terminal(DRAIN_READS)

    @property
    def is_bash(self) -> bool:
        """Whether the ended process, not yet reaped, was still bash and had not executed another program."""
        with suppress(OSError):
            return (PROC / str(self._child.pid) / "comm").read_bytes() == b"bash\n"
        return False

    def interrupt(self) -> None:
        """Do what ^C does, in any mode of the terminal; a command of the action that has not begun never will.

        Called again, it interrupts only programs that came to the foreground since: a child of bash's that has not yet
        executed its program loses an interrupt, and so does bash while it starts one.
        """
        self._withdrawn = True
        self._write_command_file(b"")
        if not self._child.ended:
            kill(self._child.pid, number=signal.SIGCONT)  # it may have stopped itself
        with suppress(OSError):
            group = os.tcgetpgrp(self._terminal)
            program = group, _words(group)
            known = program in self._interrupted
            self._interrupted.add(program)
            if group > 1 and not known:  # 0: no process is in the foreground, and to killpg our own processes
                os.killpg(group, signal.SIGINT)

    def kill_new(self, *, interrupt: bool) -> None:
        """Kill what was started inside since the action began, except by older jobs."""
        if self._child.ended:
            return
        killed: set[int] = set()
        while new := set(self._new_processes.find()) - killed:  # one may have started another before it was killed
            kill(*new)
            killed |= new
            if len(killed) > KILLED_AT_ONCE:
                break  # they start others faster than that: the caller comes again
        if interrupt:
            kill(self._child.pid, number=signal.SIGCONT)
            kill(self._child.pid, number=signal.SIGINT)

    def _write_command_file(self, content: bytes) -> None:
        os.ftruncate(self._command_file, 0)
        view = memoryview(content)
        while view:
            view = view[os.pwrite(self._command_file, view, len(content) - len(view)) :]
        os.lseek(self._command_end, 0, os.SEEK_SET)

    def _forget_input(self) -> None:
        """Drop what was typed for the command before and not read."""
        if self._input:
            self._loop.remove_writer(self._terminal)
            self._input.clear()
        if self._typed:
            self._typed = False
            termios.tcflush(self._terminal, termios.TCOFLUSH)

    def _on_room(self) -> None:
        try:
            del self._input[: os.write(self._terminal, self._input)]
        except BlockingIOError:
            return
        except OSError:  # EIO: no process holds its other side any more
            self._input.clear()
        if not self._input:
            self._loop.remove_writer(self._terminal)

    def _on_terminal(self, reads: int = READS) -> None:
        for _ in range(reads):
            if not self._terminal_open:
                return
            try:
                data = os.read(self._terminal, READ_BYTES)
            except BlockingIOError:
                return
            except OSError:  # EIO: no process holds its other side any more
                data = b""
            if not data:
                self._close_terminal()
            self._output.append(data)

    def _on_status(self) -> None:
        try:
            data, stamps, _, _ = self._control.recvmsg(READ_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        except BlockingIOError:
            return
        except ConnectionResetError:  # bash ended, or closed it, with a line unread
            data = b""
        if not data:
            self._loop.remove_reader(self._control)
            return
        if not any(_CREDENTIALS.unpack(stamp)[0] == self._child.pid for _, _, stamp in stamps):
            return
        *frames, self._pending = (self._pending + data).split(b"\0")
        for frame in frames:
            self._take_status(frame)
        if len(self._pending) > STATUS_LIMIT_BYTES:
            self._pending = b""
            self.kill()

    def _take_status(self, frame: bytes) -> None:
        if not frame or frame.startswith(b"trap "):
            self._traps_errors = bool(frame)
            return
        number, code, flags, directory = (frame.decode("utf-8", "surrogateescape").split(" ", 3) + [""] * 3)[:4]
        # An interrupt that comes late makes a second prompt, and so a second status of an action that is done; one that
        # comes early takes the line with it, and all that is seen of the action is that second status.
        expected = {str(self._action), str(self._action - 1)} if self._interrupted else {str(self._action)}
        if number.removeprefix("-") in expected and code.isdecimal() and not self._done.done() and self._at_prompt():
            if number.startswith("-") and not self._withdrawn:  # bash cannot read the file, or others wrote to it
                self.kill()
                return
            self._on_terminal(DRAIN_READS)
            self._minds_status = self._traps_errors or "e" in flags
            self._done.set_result(Status(int(code) & 0xFF, directory))

    def _at_prompt(self) -> bool:
        """Return whether bash's standard input is the control socket: a running command may write a status too."""
        with suppress(OSError):
            return os.readlink(f"/proc/{self._child.pid}/fd/0") == self._prompt_input  # noqa: PTH115 - for each action
        return False

    def _on_end(self) -> None:
        self._on_terminal(DRAIN_READS)
        if not self._done.done():
            self._done.set_result(None)

    def _close_terminal(self) -> None:
        if self._terminal_open:
            self._terminal_open = False
            self._loop.remove_reader(self._terminal)
            self._loop.remove_writer(self._terminal)


def _words(pid: int) -> bytes:
    """Return the command line of a process; empty once it has ended."""
    with suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_bytes()
    return b""
