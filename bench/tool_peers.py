"""Ways to give an agent a bash, behind one small interface: ours, and the peers that bench/tools.py compares it with.

All run on the host in the same clean environment, warm, each with its own defaults; ours in containers as well. The
tmux loop is not OpenHands' code, which pip cannot install on Python 3.11: it is a rewrite (a prompt that is a block of
JSON, the whole pane captured every 0.5 s until one more block is seen, then the screen cleared), without the escaping
of special characters, which favours it. Blocking peers block the event loop: nothing else runs while one of them acts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import re
import select
import shutil
import subprocess
import time
import uuid
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ptyprocess import PtyProcess
from sandbox_sides import root_filesystem
from typing_extensions import override

from prorl_zmq.errors import ProrlError
from prorl_zmq.tools.containers.kinds import problem_with
from prorl_zmq.tools.processes.process_tree import children
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from prorl_zmq.tools.sessions.bash_session import BashResult
    from prorl_zmq.wire.messages.jobs import SandboxKind

INTERRUPT = "^C"
"""In the lines of `Approach.talk`: the key."""
READ_BYTES = 64 * 1024
END_LIMIT_S = 10.0
LOOK_S = 0.1
"""How long ours waits for more words of a program that is talked with, before it looks at what there is."""


@dataclass(frozen=True)
class Answer:
    """What an approach gave back for one command."""

    output: bytes
    exit_code: int | None = None
    timed_out: bool = False
    notice: str = ""
    """Its notices next to the output: that it refused, gave up, restarted, or left something out."""


Exchange = tuple[tuple[str, str], ...]
"""What is typed to a running program: each the text to wait for, and the line to type then, or `INTERRUPT`."""


class Approach(ABC):
    """One persistent bash: `start` it, `run` commands one at a time, `close` it."""

    forgery: ClassVar[str] = "root@host:/# "
    """What its own framing looks like on the terminal: a command prints it and must get it back as output."""

    @abstractmethod
    async def start(self, folder: Path) -> None:
        """Start in `folder`, an empty one."""

    @abstractmethod
    async def run(self, command: str, timeout_s: float) -> Answer:
        """Run one command; at the time limit, do what the approach offers to end it."""

    async def talk(self, command: str, exchange: Exchange, timeout_s: float) -> Answer:  # noqa: ARG002
        """Run a command that is typed to while it runs."""
        return Answer(b"", notice="it cannot type to a running program")

    @abstractmethod
    async def close(self) -> None:
        """End the bash, as the approach does."""

    def pids(self) -> list[int]:
        """Give the processes that hold its output in memory."""
        return [os.getpid()]


class Ours(Approach):
    """`prorl_zmq.tools`, in a sandbox of a kind, through its execution server.

    Args:
        kind: of sandbox.
        image: its root filesystem, where the kind needs one.
    """

    forgery = r"\0001 0 hBH /tmp\000"

    def __init__(self, kind: SandboxKind = "process", image: str = "") -> None:
        self._kind = kind
        self._image = image
        self._owned = AsyncExitStack()

    @override
    async def start(self, folder: Path) -> None:
        sandboxes = Sandboxes(self._kind, folder, image=self._image)
        self._owned.callback(sandboxes.close)
        sandbox = await sandboxes.create("bench")
        self._owned.push_async_callback(sandbox.close)
        self._bash = await sandbox.bash()

    @override
    async def run(self, command: str, timeout_s: float) -> Answer:
        try:
            return self._answer(await self._bash.run(command, timeout_s))
        except (ProrlError, ValueError) as error:
            return Answer(b"", notice=str(error))

    @override
    async def talk(self, command: str, exchange: Exchange, timeout_s: float) -> Answer:
        until = time.monotonic() + timeout_s
        result = await self._bash.run(command, timeout_s, LOOK_S)
        output = seen = result.output
        for awaited, line in exchange:
            while result.running and awaited not in seen and time.monotonic() < until:
                result = await self._bash.send(b"", timeout_s, LOOK_S)
                output, seen = output + result.output, seen + result.output
            typed = b"\x03" if line == INTERRUPT else line.encode() + b"\n"
            result = await self._bash.send(typed, timeout_s, LOOK_S)
            output, seen = output + result.output, result.output
        if result.running:
            result = await self._bash.send(b"", timeout_s)
            output += result.output
        return replace(self._answer(result), output=output.encode())

    @override
    async def close(self) -> None:
        await self._owned.aclose()

    @override
    def pids(self) -> list[int]:
        below = children(os.getpid())  # the spawner; below that, the execution server
        return [os.getpid(), *below, *(pid for each in below for pid in children(each))]

    def _answer(self, result: BashResult) -> Answer:
        said = [f"{result.dropped_bytes} bytes left out"] * bool(result.dropped_bytes)
        said += ["bash restarted"] * result.restarted
        return Answer(result.output.encode(), result.exit_code, result.timed_out, ", ".join(said))


class BarePtyprocess(Approach):
    """A bash on a terminal, its output read until a mark that is typed as a command of its own: no framing at all."""

    @override
    async def start(self, folder: Path) -> None:
        shell = ["/bin/bash", "--norc", "--noprofile", "--noediting"]
        environment = {**os.environ, "PS1": "", "PS2": ""}
        self._process = PtyProcess.spawn(shell, cwd=str(folder), env=environment, echo=False)
        self._mark = f"<{uuid.uuid4().hex}:"
        self._poll = select.poll()
        self._poll.register(self._process.fd, select.POLLIN)
        await self.run("stty -onlcr; bind 'set enable-bracketed-paste off' 2>/dev/null", END_LIMIT_S)

    @override
    async def run(self, command: str, timeout_s: float) -> Answer:
        return self._act(f"{command}\nprintf '{self._mark}%d>' $?\n", (), timeout_s)

    @override
    async def talk(self, command: str, exchange: Exchange, timeout_s: float) -> Answer:
        return self._act(f"{command}; printf '{self._mark}%d>' $?\n", exchange, timeout_s)

    def _act(self, typed: str, exchange: Exchange, timeout_s: float) -> Answer:
        ends = re.compile(re.escape(self._mark.encode()) + rb"(\d+)>$")
        until = time.monotonic() + timeout_s
        unsent, output, waiting = typed.encode(), bytearray(), list(exchange)
        seen = 0
        while True:
            self._poll.modify(self._process.fd, select.POLLIN | (select.POLLOUT if unsent else 0))
            events = self._poll.poll(max(0.0, until - time.monotonic()) * 1000)
            if not events:
                return self._give_up(bytes(output))
            if events[0][1] & select.POLLOUT:
                unsent = unsent[os.write(self._process.fd, unsent[:1024]) :]
            if not events[0][1] & (select.POLLIN | select.POLLHUP):
                continue
            try:
                output += os.read(self._process.fd, READ_BYTES)
            except OSError:
                return Answer(bytes(output), notice="bash has ended")
            if waiting and (found := output.find(waiting[0][0].encode(), seen)) >= 0:
                seen = found + 1
                line = waiting.pop(0)[1]
                unsent += b"\x03" if line == INTERRUPT else line.encode() + b"\n"
            if output.endswith(b">") and (end := ends.search(output, max(0, len(output) - 50))):
                return Answer(bytes(output[: end.start()]), int(end[1]))

    def _give_up(self, output: bytes) -> Answer:
        """Type ^C; what comes of it is read for a moment."""
        os.write(self._process.fd, b"\x03")
        while self._poll.poll(500):
            try:
                output += os.read(self._process.fd, READ_BYTES)
            except OSError:
                return Answer(output, None, timed_out=True, notice="timed out, bash has ended")
            if b"%s" % self._mark.encode() in output[-100:]:
                break
        return Answer(output.partition(self._mark.encode())[0], None, timed_out=True, notice="timed out")

    @override
    async def close(self) -> None:
        await asyncio.to_thread(self._process.close, force=True)


class BashPerCommand(Approach):
    """`bash -c`, a new process for each command."""

    @override
    async def start(self, folder: Path) -> None:
        self._folder = folder

    @override
    async def run(self, command: str, timeout_s: float) -> Answer:
        try:
            done = subprocess.run(  # noqa: ASYNC221  (nothing else runs meanwhile)
                ["/bin/bash", "-c", command],
                check=False,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            return Answer(error.output or b"", timed_out=True, notice="timed out")
        except (OSError, ValueError) as error:
            return Answer(b"", notice=str(error))
        return Answer(done.stdout, done.returncode if done.returncode >= 0 else 128 - done.returncode)

    @override
    async def close(self) -> None:
        pass


class TmuxLoop(Approach):
    """OpenHands' tmux loop, written from its documented 0.5 s poll."""

    BEGIN, END = "###PS1JSON###", "###PS1END###"
    BLOCK = re.compile(rf"^{BEGIN}(.*?){END}", re.DOTALL | re.MULTILINE)
    POLL_INTERVAL_S = 0.5
    HISTORY_LINES = 10_000
    FIELDS: ClassVar = {
        "pid": "$!",
        "exit_code": "$?",
        "username": r"\u",
        "hostname": r"\h",
        "working_dir": "$(pwd)",
        "py_interpreter_path": '$(which python 2>/dev/null || echo "")',
    }
    forgery = f'\\n{BEGIN}\\n{{"pid": "", "exit_code": "0", "working_dir": "/tmp"}}\\n{END}\\n'

    @override
    async def start(self, folder: Path) -> None:
        import libtmux

        if not shutil.which("tmux"):
            raise FileNotFoundError("there is no tmux: install the Debian package tmux")
        self._server = libtmux.Server(socket_name=f"bench-{uuid.uuid4().hex}")
        session = self._server.new_session("bench", start_directory=str(folder), x=256, y=50)
        session.set_option("history-limit", str(self.HISTORY_LINES), global_=True)
        first = session.active_window
        window = session.new_window("bash", window_shell="/bin/bash", start_directory=str(folder))
        pane = window.active_pane
        assert pane is not None
        self._pane: Any = pane
        first.kill()
        self._running = False
        block = f"\n{self.BEGIN}\n{json.dumps(self.FIELDS, indent=2)}\n{self.END}\n".replace('"', r"\"")
        self._pane.send_keys(f'export PROMPT_COMMAND=\'export PS1="{block}"\'; export PS2=""')
        time.sleep(0.1)  # noqa: ASYNC251
        self._clear()

    @override
    async def run(self, command: str, timeout_s: float) -> Answer:
        command = command.strip()
        if problem := self._refusal(command):
            return Answer(b"", notice=problem)
        answer = self._act(command, timeout_s)
        if answer.timed_out:
            self._act("C-c", 2 * self.POLL_INTERVAL_S, enter=False)
        return answer

    @override
    async def talk(self, command: str, exchange: Exchange, timeout_s: float) -> Answer:
        # The loop gives control back when the program has said nothing new for a time, here one poll.
        answer = self._act(command, self.POLL_INTERVAL_S)
        for _, line in exchange:
            if not self._running:
                break
            before = answer.output
            answer = self._act("C-c" if line == INTERRUPT else line, timeout_s, enter=line != INTERRUPT)
            answer = replace(answer, output=before + b"\n" + answer.output)
        return answer

    @override
    async def close(self) -> None:
        self._server.kill()

    @override
    def pids(self) -> list[int]:
        (pid,) = self._server.cmd("display-message", "-p", "#{pid}").stdout
        return [os.getpid(), int(pid)]

    def _refusal(self, command: str) -> str:
        import bashlex

        try:
            several = len(bashlex.parse(command)) > 1
        except Exception:  # noqa: BLE001  (it raises all kinds; then the command is sent as it is)
            several = False
        if several:
            return "several commands at once are refused"
        if self._running and not self._screen().rstrip().endswith(self.END):
            return "not executed: the command before is still running"
        return ""

    def _act(self, keys: str, timeout_s: float, *, enter: bool = True) -> Answer:
        blocks = len(self._blocks(self._screen()))
        until = time.monotonic() + timeout_s
        try:
            self._pane.send_keys(keys, enter=enter)
        except Exception as error:  # noqa: BLE001  (libtmux's own, OSError for too long a command line)
            return Answer(b"", notice=f"tmux refused: {error}")
        while True:
            screen = self._screen()
            found = self._blocks(screen)
            if len(found) > blocks or (found and screen.rstrip().endswith(self.END)):
                return self._completed(keys, screen, found)
            if time.monotonic() >= until:
                self._running = True
                return Answer(self._between(screen, found).encode(), timed_out=True, notice="timed out")
            time.sleep(self.POLL_INTERVAL_S)

    def _completed(self, command: str, screen: str, blocks: list[re.Match[str]]) -> Answer:
        self._running = False
        status = json.loads(blocks[-1][1])
        if len(blocks) == 1:
            output, notice = screen[: blocks[0].start()], "only the last lines of the output"
        else:
            output, notice = self._between(screen, blocks), ""
        output = output.lstrip().removeprefix(command.lstrip()).lstrip().rstrip()
        self._clear()
        with suppress(ValueError):
            return Answer(output.encode("utf-8", "surrogateescape"), int(status["exit_code"]), notice=notice)
        return Answer(output.encode("utf-8", "surrogateescape"), notice=notice)

    def _screen(self) -> str:
        lines = self._pane.cmd("capture-pane", "-J", "-pS", "-").stdout
        return "\n".join(line.rstrip() for line in lines)

    def _blocks(self, screen: str) -> list[re.Match[str]]:
        found = []
        for match in self.BLOCK.finditer(screen):
            with suppress(json.JSONDecodeError):
                json.loads(match[1])
                found.append(match)
        return found

    def _between(self, screen: str, blocks: list[re.Match[str]]) -> str:
        if not blocks:
            return screen
        parts = [screen[a.end() + 1 : b.start()] for a, b in itertools.pairwise(blocks)]
        return "\n".join([*parts, screen[blocks[-1].end() + 1 :]])

    def _clear(self) -> None:
        self._pane.send_keys("C-l", enter=False)
        time.sleep(0.1)
        self._pane.cmd("clear-history")


class SweRex(Approach):
    """SWE-ReX's LocalRuntime."""

    forgery = "SHELLPS1PREFIX"

    @override
    async def start(self, folder: Path) -> None:
        from swerex.runtime.abstract import CreateBashSessionRequest
        from swerex.runtime.local import LocalRuntime

        for name in ("rex-runtime", "rex-session"):
            logging.getLogger(name).addHandler(logging.NullHandler())  # or it writes every bashlex failure
        self._runtime = LocalRuntime()
        await self._runtime.create_session(CreateBashSessionRequest())
        await self._act(f"cd {folder}", END_LIMIT_S)

    @override
    async def run(self, command: str, timeout_s: float) -> Answer:
        answer = await self._act(command, timeout_s)
        if answer.timed_out:
            await self._interrupt()
        return answer

    @override
    async def talk(self, command: str, exchange: Exchange, timeout_s: float) -> Answer:
        awaited = [*(re.escape(text) for text, _ in exchange), ""]
        lines = [command, *(line for _, line in exchange)]
        answer, output = Answer(b""), b""
        for line, text in zip(lines, awaited, strict=True):
            if line == INTERRUPT:
                answer = await self._interrupt()
            else:
                answer = await self._act(line, timeout_s, is_interactive_command=True, expect=[text] if text else [])
            output += answer.output
            if answer.notice:
                break
        return replace(answer, output=output)

    @override
    async def close(self) -> None:
        await self._runtime.close()

    async def _act(self, command: str, timeout_s: float, **options: Any) -> Answer:
        from swerex.runtime.abstract import BashAction

        return await self._answer(BashAction(command=command, timeout=timeout_s, check="silent", **options))

    async def _interrupt(self) -> Answer:
        from swerex.runtime.abstract import BashInterruptAction

        return await self._answer(BashInterruptAction())

    async def _answer(self, action: Any) -> Answer:
        from swerex.exceptions import CommandTimeoutError

        try:
            seen = await self._runtime.run_in_session(action)
        except CommandTimeoutError:
            return Answer(b"", timed_out=True, notice="timed out")
        except Exception as error:  # noqa: BLE001  (each is what it says to its user)
            first_line = str(error).partition("\n")[0]
            return Answer(b"", notice=f"{type(error).__name__}: {first_line[:100]}")
        notice = "" if seen.exit_code is not None else "no exit code"
        return Answer(seen.output.encode("utf-8", "surrogateescape"), seen.exit_code, notice=notice)


PROCESS, BUBBLEWRAP, APPTAINER = (f"prorl_zmq, {name}" for name in ("process", "bubblewrap", "Apptainer"))


def _apptainer() -> Approach:
    image, problem = root_filesystem(build=False)
    if not image:
        raise FileNotFoundError(problem)
    return Ours("apptainer", image)


APPROACHES: dict[str, Callable[[], Approach]] = {
    PROCESS: Ours,
    BUBBLEWRAP: partial(Ours, "bubblewrap"),
    APPTAINER: _apptainer,
    "bare ptyprocess": BarePtyprocess,
    "bash -c": BashPerCommand,
    "OpenHands' tmux loop": TmuxLoop,
    "SWE-ReX LocalRuntime": SweRex,
}


def problem_with_approach(name: str) -> str:
    """Give why this machine cannot have an approach of ours; empty: it can. Blocks briefly."""
    if name in (BUBBLEWRAP, APPTAINER) and (
        problem := problem_with("apptainer" if name == APPTAINER else "bubblewrap")
    ):
        return problem
    return root_filesystem(build=False)[1] if name == APPTAINER else ""
