from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from live_bash import LIMIT_S, LiveContainer, use

from prorl_zmq.tools.sessions.bash_session import INPUT_LIMIT_BYTES, BashResult, BashSession

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


async def until(session: BashSession, word: str, result: BashResult) -> str:
    """Wait on until a word was shown; give all that was shown."""
    shown = result.output
    for _ in range(100):
        if word in shown:
            return shown
        assert result.running, shown
        result = await session.send(b"", LIMIT_S, 0.1)
        shown += result.output
    raise AssertionError(shown)


def test_a_command_that_asks_is_answered(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        ask = "read -p 'name? ' name; echo \"hello $name\"; read -s -p 'word? ' word; echo; echo \"$word\"; (exit 4)"
        first = await session.run(ask, LIMIT_S, 0)
        assert first.running
        assert await until(session, "name? ", first) == "name? "
        assert await until(session, "word? ", await session.send(b"Ada\n", LIMIT_S, 0)) == "hello Ada\nword? "
        assert await session.send(b"secret\n", LIMIT_S) == BashResult("\nsecret\n", 4)
        assert await session.run("echo $name $?", LIMIT_S) == BashResult("Ada 4\n", 0)

    use(live_container, body)


@pytest.mark.proof(quick=True)
def test_an_interpreter_is_talked_with(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        first = await session.run("python3 -q", LIMIT_S, 0)
        assert (await until(session, ">>> ", first)).endswith(">>> ")
        assert await until(session, ">>> ", await session.send(b"print(6 * 7)\n", LIMIT_S, 0)) == "42\n>>> "
        await until(
            session, "in\n", await session.send(b"import time; print('i' + 'n'); time.sleep(3600)\n", LIMIT_S, 0)
        )
        assert "KeyboardInterrupt" in await until(session, ">>> ", await session.send(b"\x03", LIMIT_S, 0))
        last = await session.send(b"\x04", LIMIT_S)
        assert (last.exit_code in (0, 130), last.running, last.restarted) == (True, False, False)

    use(live_container, body)


@pytest.mark.proof(quick=True)
def test_a_nested_shell_is_talked_with_and_left(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        await session.run("X=1", LIMIT_S)
        first = await session.run("PS1='<$((1+1))> ' bash --norc", LIMIT_S, 0)
        await until(session, "<2> ", first)
        assert "x1x" not in await until(session, "<2> ", await session.send(b"echo x${X}x\n", LIMIT_S, 0))
        assert (await session.send(b"exit 7\n", LIMIT_S)).exit_code == 7
        assert await session.run("echo $X", LIMIT_S) == BashResult("1\n", 0)

    use(live_container, body)


def test_nothing_is_given_twice_and_a_character_is_not_split(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        first = await session.run(r"printf 'a\xe2\x98'; read; printf '\x83b'; read; printf '\xe2'", LIMIT_S, 0)
        assert await until(session, "a", first) == "a"
        assert await until(session, "b", await session.send(b"\n", LIMIT_S, 0)) == "☃b"
        assert await session.send(b"\n", LIMIT_S) == BashResult("\ufffd", 0)

    use(live_container, body)


def test_a_second_command_and_input_for_none_are_errors_that_lose_nothing(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        with pytest.raises(ValueError, match="no command is running"):
            await session.send(b"a\n", LIMIT_S)
        first = await session.run("read a; read b; echo $a $b", LIMIT_S, 0)
        assert first == BashResult("", 0, running=True)
        await session.send(b"1\n", LIMIT_S, 0)
        with pytest.raises(ValueError, match="still runs"):
            await session.run("echo no", LIMIT_S)
        with pytest.raises(ValueError, match="the input has"):
            await session.send(bytes(INPUT_LIMIT_BYTES + 1), LIMIT_S)
        assert await session.send(b"2\n", LIMIT_S) == BashResult("1 2\n", 0)
        with pytest.raises(ValueError, match="no command is running"):
            await session.send(b"", LIMIT_S)

    use(live_container, body)


def test_what_a_command_did_not_read_is_never_run(live_container: LiveContainer) -> None:
    """At a terminal the rest of what was typed goes to the shell, which runs it."""

    async def body(session: BashSession) -> None:
        await session.run("read a; read go < ~/go || mkfifo ~/go; read go < ~/go; echo $a", LIMIT_S, 0)
        await session.send(b"1\necho no\nexit 9\n\x04\x04partial", LIMIT_S, 0.05)
        for _ in range(2):  # the FIFO was there, or is made only now
            await session.send(b"", LIMIT_S, 0.05)
        result = await session.send(b"\x03", LIMIT_S)
        assert not result.restarted
        assert "no" not in result.output
        assert await session.run("read -t 0.05 x; echo ${x:-nothing}", LIMIT_S) == BashResult("nothing\n", 0)

    use(live_container, body)


def test_input_that_came_too_late_is_told(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        first = await session.run("echo a; mkfifo ~/f; read < ~/f; echo b", LIMIT_S, 0)
        await until(session, "a\n", first)
        shell = session._process
        assert shell is not None
        while not (session._container.workspace / "f").exists():
            await session.send(b"", LIMIT_S, 0.01)
        (session._container.workspace / "f").write_text("\n")
        assert await shell.wait(LIMIT_S)
        assert await session.send(b"x\n", LIMIT_S) == BashResult("b\n", 0, not_sent=True)
        assert await session.run("read -t 0.05 x; echo ${x:-nothing}", LIMIT_S) == BashResult("nothing\n", 0)

    use(live_container, body)


@pytest.mark.proof(quick=True)
def test_more_input_than_a_terminal_holds_arrives_whole(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        await session.run("sleep 0.2; wc -c", LIMIT_S, 0)
        line = b"x" * 1000 + b"\n"
        await session.send(line * 60, LIMIT_S, 0)
        assert await session.send(b"\x04", LIMIT_S) == BashResult("60060\n", 0)

    use(live_container, body)


@pytest.mark.few(1)
@pytest.mark.parametrize("command", ["cat", "stty raw; cat", "python3 -c 'input()'", "sleep 3600"])
def test_the_time_limit_of_a_later_call_ends_it(live_container: LiveContainer, command: str) -> None:
    async def body(session: BashSession) -> None:
        assert (await session.run(f"X=1; echo on; {command}", LIMIT_S, 0.05)).running
        last = await session.send(b"", 0.2)
        assert (last.timed_out, last.running, last.restarted) == (True, False, False)
        assert await session.run("echo $X", LIMIT_S) == BashResult("1\n", 0)

    use(live_container, body)


@pytest.mark.proof(quick=True)
def test_a_stopped_job_gives_the_session_back_and_goes_on(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        assert (await session.run("cat", LIMIT_S, 0.2)).running
        stopped = await session.send(b"\x1a", LIMIT_S)
        assert (stopped.exit_code, stopped.running) == (148, False)
        assert "Stopped" in stopped.output
        assert (await session.run("fg", LIMIT_S, 0.1)).running
        assert await until(session, "again\n", await session.send(b"again\n", LIMIT_S, 0)) in (
            "cat\nagain\n",
            "again\n",
        )
        assert (await session.send(b"\x04", LIMIT_S)).exit_code == 0

    use(live_container, body)


@pytest.mark.proof(quick=True)
def test_an_editor_and_a_pager(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        editor = '#!/bin/bash\nread -rsn 1 key\nprintf \'%s\' "$key" >> "$1"\n'
        await session.run(f"cat > ~/ed <<'E'\n{editor}E\nchmod +x ~/ed", LIMIT_S)
        await session.run("~/ed ~/note; cat ~/note", LIMIT_S, 0.1)
        assert await session.send(b"k", LIMIT_S) == BashResult("k", 0)
        pager = "stty -icanon; for i in 1 2; do echo page $i; dd bs=1 count=1 status=none > ~/key < /dev/tty; done"
        assert await until(session, "page 1\n", await session.run(pager, LIMIT_S, 0)) == "page 1\n"
        assert await until(session, "page 2\n", await session.send(b" ", LIMIT_S, 0)) == "page 2\n"
        assert await session.send(b"q", LIMIT_S) == BashResult("", 0)
        assert (await session.run("stty -a | grep -o -e '[-]*icanon'", LIMIT_S)).output == "icanon\n"

    use(live_container, body)


def test_cancelling_a_call_ends_the_running_command(
    live_container: LiveContainer, survivors: Callable[[str], list[str]]
) -> None:
    async def body(session: BashSession) -> None:
        assert (await session.run("sleep 3600.77001; echo no", LIMIT_S, 0.2)).running
        call = asyncio.ensure_future(session.send(b"", 3600))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert survivors("3600.77001") == []
        assert await session.run("echo on", LIMIT_S) == BashResult("on\n", 0)

    use(live_container, body)


def test_closing_ends_a_running_command(live_container: LiveContainer, survivors: Callable[[str], list[str]]) -> None:
    async def body(session: BashSession) -> None:
        assert (await session.run("sleep 3600.77002", LIMIT_S, 0.2)).running

    use(live_container, body)
    assert survivors("3600.77002") == []
