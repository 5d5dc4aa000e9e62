"""An interrupt may come at any moment in the life of a shell: whatever it meets, the session goes on."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from live_bash import LIMIT_S, LiveContainer, use

from prorl_zmq.tools.sessions.bash_session import BashResult, BashSession
from prorl_zmq.tools.sessions.shell_process import ShellProcess

if TYPE_CHECKING:
    import socket

# Python 3.12 warns of every fork of a process with threads; ptyprocess forks.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def test_an_interrupt_at_any_moment_neither_loses_the_session_nor_runs_a_command_twice(
    live_container: LiveContainer,
) -> None:
    """An interrupt before bash had read its command made it run the one before again, or each later one too early."""

    async def body(session: BashSession) -> None:
        for i in range(160):
            assert (await session.run(f"X={i}; echo $X", LIMIT_S)).output == f"{i}\n"
            result = await session.run("echo begun $X; sleep 3600", 0.0002 * (i % 16))
            assert result.timed_out
            assert not result.restarted
            assert result.output.count("begun") <= 1
            assert (await session.run("echo $X", LIMIT_S)).output == f"{i}\n"

    use(live_container, body)


class LateLine:
    """Bash's control socket, on which the next line comes only with the one behind it."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._held: bytes | None = None

    def send(self, line: bytes) -> None:
        if self._held is None:
            self._held = line
        else:
            self._control.send(self._held + line)
            self._held = b""

    def __getattr__(self, name: str) -> object:
        return getattr(self._control, name)


@pytest.mark.proof(quick=True)
def test_a_line_that_outlives_its_interrupt_runs_nothing_and_no_later_command_too_early(
    live_container: LiveContainer,
) -> None:
    """It ran what came next, so each later line had its command taken; the shell was killed at the next time limit."""

    async def body(session: BashSession) -> None:
        await session.run("X=1", LIMIT_S)
        shell = session._process
        assert shell is not None
        for _ in range(4):
            control, shell._control = shell._control, LateLine(shell._control)  # type: ignore[assignment]
            result = await session.run("echo begun; sleep 3600", 0)
            assert (result.timed_out, result.restarted, result.exit_code) == (True, False, 130)
            assert "begun" not in result.output
            shell._control = control
            for i in range(8):
                assert await session.run(f"echo $X {i} $?; (exit 3)", 3) == BashResult(f"1 {i} {3 if i else 130}\n", 3)

    use(live_container, body)


@pytest.mark.proof(quick=True)
def test_a_program_that_comes_after_the_interrupt_is_interrupted_and_one_that_handles_it_only_once(
    live_container: LiveContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that has not yet executed its program forgets an interrupt: it was killed only 1 s later."""
    monkeypatch.setattr("prorl_zmq.tools.sessions.bash_session.INTERRUPT_LIMIT_S", 8)
    wait = "while :; do sleep 0.01; done"

    async def body(session: BashSession) -> None:
        result = await session.run(f"bash -c 'trap \"exec sleep 3600\" INT; {wait}'", 0.3)
        assert (result.timed_out, result.restarted, result.exit_code) == (True, False, 130)
        result = await session.run(f"bash -c 'trap \"echo once; sleep 2.5; exit 7\" INT; {wait}'", 0.3)
        assert (result.output, result.exit_code, result.restarted) == ("once\n", 7, False)

    use(live_container, body)


@pytest.mark.proof(quick=True)
def test_what_an_interrupted_read_had_in_hand_is_not_taken_for_the_next_command(live_container: LiveContainer) -> None:
    """Bash keeps it, and the next `read`, of whatever, got it: no status came any more."""

    async def body(session: BashSession) -> None:
        await session.run("head -c 100000000 /dev/zero | tr '\\0' y > ~/long", LIMIT_S)
        assert (await session.run("read -r -d '' x < ~/long", LIMIT_S, 0.2)).running
        assert (await session.send(b"\x03", LIMIT_S)).exit_code == 130
        assert await session.run("echo on", 3) == BashResult("on\n", 0)

    use(live_container, body)


def test_an_interrupt_before_bash_read_the_line_does_not_cost_the_shell(
    live_container: LiveContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The late line started a command that nobody interrupted any more, and the shell was killed for it."""
    type_line = ShellProcess.begin

    def interrupt_first(shell: ShellProcess, command: bytes) -> None:
        if command.startswith(b"echo begun"):
            os.kill(shell._child.pid, signal.SIGINT)
        type_line(shell, command)

    monkeypatch.setattr(ShellProcess, "begin", interrupt_first)

    async def body(session: BashSession) -> None:
        await session.run("X=1", LIMIT_S)
        for _ in range(4):
            result = await session.run("echo begun; sleep 3600", 0)
            assert (result.timed_out, result.restarted) == (True, False)
        assert (await session.run("echo $X", LIMIT_S)).output == "1\n"

    use(live_container, body)
