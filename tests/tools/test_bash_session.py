from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from typing import TYPE_CHECKING

import psutil
import pytest
import uvloop
from live_bash import LIMIT_S, LiveContainer, use
from rootfs import tiny_root_filesystem
from support.sandboxes import main_and_proofs

from prorl_zmq.errors import SandboxFailed, ToolSessionLost
from prorl_zmq.tools.containers.kinds import container_class
from prorl_zmq.tools.containers.specification import SandboxSpec
from prorl_zmq.tools.sessions.bash_session import COMMAND_LIMIT_BYTES, BashResult, BashSession

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from prorl_zmq.wire.messages.jobs import SandboxKind

# Python 3.12 warns of every fork of a process with threads; ptyprocess forks.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
on_both_loops = pytest.mark.parametrize("runner", [uvloop.run, pytest.param(asyncio.run, marks=pytest.mark.proof)])


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which nothing but the end of bash can come of an interrupt: no machine is too busy for these."""
    monkeypatch.setattr("prorl_zmq.tools.sessions.bash_session.INTERRUPT_LIMIT_S", 0.1)
    monkeypatch.setattr("prorl_zmq.tools.sessions.bash_session.KILL_LIMIT_S", 0.1)


Cases = list[tuple[str, str, int]]

CASES: dict[str, Cases] = {
    "output is exact": [
        ("echo hi", "hi\n", 0),
        ("printf abc", "abc", 0),
        ("true", "", 0),
        (r"printf 'a\tb\r\n  c  \n\n'", "a\tb\r\n  c  \n\n", 0),
        ("echo out; echo err >&2", "out\nerr\n", 0),
        (r"printf '\xff\xc3\xa9\n'", "\ufffdé\n", 0),
        ("echo 'ünï ☃' \"$HOME\" | wc -c", None, 0),  # type: ignore[list-item]
        (r"printf '0 0 /tmp\0'; printf '\033[31m$ # >\n'", "0 0 /tmp\0\033[31m$ # >\n", 0),
        ("yes | head -2", "y\ny\n", 0),
    ],
    "exit codes are true": [
        ("false", "", 1),
        ("(exit 42)", "", 42),
        ("no-such-program", "bash: no-such-program: command not found\n", 127),
        ("bash -c 'kill -9 $$'", "Killed\n", 137),
        ("false | true", "", 0),
        ("set -o pipefail; false | true", "", 1),
        ("echo ${nope?not there}", "bash: nope: not there\n", 1),
        ("echo on", "on\n", 0),
    ],
    "the state is kept": [
        ("cd /usr/bin; X=1; export Y=2; f() { echo f $1; }; alias g='f 2'; shopt -s extglob", "", 0),
        ("pwd; echo $X; bash -c 'echo $Y'; f 1; g", "/usr/bin\n1\n2\nf 1\nf 2\n", 0),
        ("(exit 9)", "", 9),
        ("echo $?", "9\n", 0),
        ("exec 7>/dev/null; echo lost >&7", "", 0),
        ("echo lost >&7 && echo kept", "kept\n", 0),
    ],
    "commands may have several lines": [
        ("cat <<'E'\n$x 'y\n\"z\nE", "$x 'y\n\"z\n", 0),
        ("for i in 1 2; do\n  echo $i\ndone", "1\n2\n", 0),
        ("echo a\n\n# nothing\necho b\n", "a\nb\n", 0),
        ("echo a \\\n  b", "a b\n", 0),
        ("echo $(cat <<E\nx\nE\n)", "x\n", 0),
    ],
    "the terminal is as it was": [
        ("stty echo onlcr; echo r", "r\r\n", 0),
        ("echo a; stty -a | grep -o -e '-onlcr' -e '-echo ' -e ' icanon'", None, 0),  # type: ignore[list-item]
        ("echo b", "b\n", 0),
        ("PS1='> '; PS2='+ '", "", 0),
        ("echo c", "c\n", 0),
        ("test -t 0 && test -t 1 && test -t 2 && echo tty", "tty\n", 0),
        ("ls /proc/self/fd | tr '\\n' ' '", "0 1 2 3 ", 0),
    ],
}


@pytest.mark.few(3)
@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("name", CASES)
def test_results(live_container: LiveContainer, name: str, runner: Callable[..., object]) -> None:
    async def body(session: BashSession) -> None:
        for command, output, code in CASES[name]:
            result = await session.run(command, LIMIT_S)
            expected = BashResult(result.output if output is None else output, code)
            assert result == expected, command

    use(live_container, body, runner)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "command", ["echo 'a", 'echo "a', "echo `a", "echo a |", "if true; then", "f() {", "(", "for i in", "case x in"]
)
def test_an_incomplete_command_is_an_error_and_spoils_nothing(live_container: LiveContainer, command: str) -> None:
    """After an open quote bash 5.2's parser took no reserved word at the next line, and the session was lost."""

    async def body(session: BashSession) -> None:
        result = await session.run(command, LIMIT_S)
        assert result.exit_code == 2
        assert not result.timed_out
        assert "unexpected" in result.output
        assert await session.run("{ echo on; }", LIMIT_S) == BashResult("on\n", 0)

    use(live_container, body)


def test_output_beyond_the_limit_is_cut_in_the_middle(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        result = await session.run("echo first; yes 123456789 | head -c 5000000; echo last", LIMIT_S)
        assert result.output.startswith("first\n123456789\n")
        assert result.output.endswith("\nlast\n")
        assert result.dropped_bytes == 5_000_011 - 65_536
        assert f"[... {result.dropped_bytes} bytes left out ...]" in result.output
        assert len(result.output) < 66_000
        exact = "x" * 65_000
        assert (await session.run("printf 'x%.0s' {1..65000}", LIMIT_S)).output == exact

    use(live_container, body)


def test_a_command_larger_than_a_pipe(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        text = "0123456789" * 30_000
        result = await session.run(f"X={text}; echo ${{#X}}", LIMIT_S)
        assert result == BashResult("300000\n", 0)
        for command in ("echo a\0b", "#" * (COMMAND_LIMIT_BYTES + 1)):
            with pytest.raises(ValueError, match="command"):
                await session.run(command, LIMIT_S)
        assert (await session.run("echo on", LIMIT_S)).output == "on\n"

    use(live_container, body)


def test_a_job_in_the_background_goes_on(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        result = await session.run("mkfifo ~/go; { read < ~/go; echo late; } & echo now", LIMIT_S)
        assert result.output.endswith("\nnow\n")  # before it is bash's `[1] 123`
        assert not result.timed_out
        result = await session.run("echo > ~/go; wait", LIMIT_S)
        assert result.output.startswith("late\n")
        result = await session.run("yes & sleep 0.1; kill $!; wait $!", LIMIT_S)
        assert result.exit_code == 143
        assert result.dropped_bytes > 0

    use(live_container, body)


@pytest.mark.parametrize(
    ("job", "said"), [("(exit 3)", ""), ("true", ""), ("kill -TERM $BASHPID", ""), ("kill -STOP $BASHPID", "Stopped")]
)
def test_the_prompt_tells_of_jobs_that_stopped_and_not_of_those_that_ended(
    live_container: LiveContainer, job: str, said: str
) -> None:
    async def body(session: BashSession) -> None:
        began = "{ { " + job + "; } & } 2>/dev/null; "
        known = "while read -r _ _ state _ < /proc/$!/stat && [[ $state != T ]]; do :; done 2>/dev/null"
        result = await session.run(began + known, LIMIT_S)
        assert (said in result.output, bool(result.output)) == (True, bool(said))
        assert await session.run("echo '[1]+  Done'", LIMIT_S) == BashResult("[1]+  Done\n", 0)

    use(live_container, body)


ENDED_LATER = "mkfifo ~/go; { { read < ~/go; exit 3; } & } 2>/dev/null"


async def end_between_calls(session: BashSession) -> None:
    """Start a job, and let it end while no command runs."""
    shell = session._process
    assert shell is not None
    assert (await session.run(ENDED_LATER, LIMIT_S)).output == ""
    bash = psutil.Process(shell._child.pid)
    looks = 0  # bash looks for ended jobs once more before it waits for the next command
    while looks < 20:
        looks = looks + 1 if bash.status() == psutil.STATUS_SLEEPING else 0
        await asyncio.sleep(0.01)
    (session._container.workspace / "go").write_text("\n")
    while bash.children():  # noqa: ASYNC110 - bash reaps the job at its prompt
        await asyncio.sleep(0.01)


def test_a_job_that_ended_between_two_calls_is_not_told_of_in_the_second(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        await end_between_calls(session)
        assert await session.run("sleep 0.01; echo on", LIMIT_S) == BashResult("on\n", 0)
        assert await session.run("wait $!", LIMIT_S) == BashResult("", 3)

    use(live_container, body)


@pytest.mark.parametrize(
    ("command", "shown", "code"), [("jobs", "[1]+  Exit 3 ", 0), ("wait %1", "", 3), ("wait -n", "", 3)]
)
def test_a_command_that_asks_of_jobs_hears_of_one_that_ended_between_two_calls(
    live_container: LiveContainer, command: str, shown: str, code: int
) -> None:
    async def body(session: BashSession) -> None:
        await end_between_calls(session)
        result = await session.run(command, LIMIT_S)
        assert (result.output.startswith(shown), result.exit_code) == (True, code)

    use(live_container, body)


BACKGROUND: dict[str, Cases] = {
    "a job is waited for, listed and killed": [
        ("{ sleep 3600 & } 2>/dev/null; jobs", "[1]+  Running                 sleep 3600 &\n", 0),
        ("kill -0 $!; kill -0 %1; jobs -p | grep -cx $!", "1\n", 0),
        ("kill %1; wait $!", None, 143),  # type: ignore[list-item]
        ("jobs", "", 0),
        ("{ (exit 7) & } 2>/dev/null; wait $!", None, 7),  # type: ignore[list-item]
        ("{ sleep 0.1 & } 2>/dev/null; fg", "sleep 0.1\n", 0),
    ],
    "a job that ended in the same command is not told of later": [
        ("{ sleep 0.01 & } 2>/dev/null; true", "", 0),
        ("{ sleep 0.01 & } 2>/dev/null; sleep 0.1; true", None, 0),  # type: ignore[list-item]
        ("/bin/echo on", "on\n", 0),
    ],
    "job control is the agent's to switch": [
        ("set +m; sleep 0.01 & sleep 0.1", None, 0),  # type: ignore[list-item]
        ("/bin/echo on; jobs", "on\n", 0),
        ("set -m; { sleep 3600 & } 2>/dev/null; kill %1; wait %1", None, 143),  # type: ignore[list-item]
        ("/bin/echo on; jobs", "on\n", 0),
    ],
    "what a command prints is not touched": [
        ("printf '[1] 4242\\n[1]+  Done  x\\n'", "[1] 4242\n[1]+  Done  x\n", 0),
        ("bash --norc -ic 'sleep 0.1 & wait; echo on' 2>/dev/null", "on\n", 0),
        ("bash -c 'kill -9 $$'; /bin/echo on", "Killed\non\n", 0),
        ("bash -c 'kill -SEGV $$'; /bin/echo on", "Segmentation fault\non\n", 0),
    ],
}


@pytest.mark.parametrize("name", BACKGROUND)
def test_jobs_in_the_background(live_container: LiveContainer, name: str) -> None:
    async def body(session: BashSession) -> None:
        for command, output, code in BACKGROUND[name]:
            result = await session.run(command, LIMIT_S)
            assert result == BashResult(result.output if output is None else output, code), command

    use(live_container, body)


@on_both_loops
def test_the_time_limit_interrupts_and_the_session_goes_on(
    live_container: LiveContainer, runner: Callable[..., object]
) -> None:
    async def body(session: BashSession) -> None:
        await session.run("cd /usr; X=1", LIMIT_S)
        for command in ("echo begun; sleep 3600; echo no", "while :; do :; done", "stty raw -isig; sleep 3600", "cat"):
            result = await session.run(command, 0.3)
            assert (result.timed_out, result.restarted, result.exit_code) == (True, False, 130), command
            assert "no" not in result.output
            assert await session.run("pwd; echo $X", LIMIT_S) == BashResult("/usr\n1\n", 0), command

    use(live_container, body, runner)


def test_what_ignores_the_interrupt_is_killed_and_older_jobs_are_not(
    live_container: LiveContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prorl_zmq.tools.sessions.bash_session.INTERRUPT_LIMIT_S", 0.1)

    async def body(session: BashSession) -> None:
        await session.run("X=1; sleep 3600 &", LIMIT_S)
        result = await session.run("""bash -c 'trap "" INT; echo begun; while :; do sleep 1; done'""", 1)
        assert (result.timed_out, result.restarted, result.exit_code) == (True, False, 137)
        assert result.output.startswith("begun\n")
        result = await session.run("echo $X; jobs", LIMIT_S)
        assert result.output.startswith("1\n[1]+  Running")

    use(live_container, body)


@pytest.mark.usefixtures("short_limits")
def test_a_shell_that_cannot_be_stopped_is_replaced(
    live_container: LiveContainer, survivors: Callable[[str], list[str]]
) -> None:
    mark = f"3600.{uuid.uuid4().int}"

    async def body(session: BashSession) -> None:
        await session.run(f"cd /usr; X=1; sleep {mark} &", LIMIT_S)
        result = await session.run("trap '' INT; while :; do :; done", 0.2)
        assert (result.timed_out, result.restarted, result.exit_code) == (True, True, 137)
        assert survivors(mark) == []
        assert await session.run("pwd; echo $X", LIMIT_S) == BashResult("/usr\n\n", 0)

    use(live_container, body)


def test_the_end_of_bash_itself_is_told_and_the_directory_kept(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        await session.run("cd /usr", LIMIT_S)
        assert await session.run("echo bye; exit 3", LIMIT_S) == BashResult("bye\n", 3, restarted=True)
        assert await session.run("pwd", LIMIT_S) == BashResult("/usr\n", 0)
        assert await session.run("kill -9 $$", LIMIT_S) == BashResult("", 137, restarted=True)
        assert await session.run("exec true", LIMIT_S) == BashResult("", 0, restarted=True)
        assert await session.run("set -e; false", LIMIT_S) == BashResult("", 1, restarted=True)
        result = await session.run("mkdir -p ~/gone; cd ~/gone; pwd", LIMIT_S)
        await session.run("rm -r ~/gone; exit", LIMIT_S)
        assert await session.run("cd; pwd", LIMIT_S) == BashResult(result.output.replace("/gone", ""), 0)

    use(live_container, body)


@on_both_loops
@pytest.mark.parametrize("trap", ["", "trap '' INT; "])
def test_cancellation_ends_the_command_first(
    live_container: LiveContainer, survivors: Callable[[str], list[str]], runner: Callable[..., object], trap: str
) -> None:
    mark = f"3600.{uuid.uuid4().int}"

    async def body(session: BashSession) -> None:
        await session.run("cd /usr; X=1", LIMIT_S)
        call = asyncio.ensure_future(session.run(f"bash -c '{trap}sleep {mark}; true'; echo no", 3600))
        await asyncio.sleep(0.3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert survivors(mark) == []
        assert await session.run("pwd; echo $X", LIMIT_S) == BashResult("/usr\n1\n", 0)

    use(live_container, body, runner)


@pytest.mark.usefixtures("short_limits")
def test_a_shell_lost_in_a_cancelled_call_is_told_by_the_next(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.run("trap '' INT; while :; do :; done", 3600), 0.3)
        assert await session.run("echo on", LIMIT_S) == BashResult("on\n", 0, restarted=True)
        assert await session.run("echo on", LIMIT_S) == BashResult("on\n", 0)

    use(live_container, body)


def test_closing_leaves_nothing(live_container: LiveContainer, survivors: Callable[[str], list[str]]) -> None:
    mark = f"3600.{uuid.uuid4().int}"

    async def body(session: BashSession) -> None:
        await session.run(f"trap '' HUP; (trap '' HUP TERM INT; sleep {mark}) & setsid sleep {mark} &", LIMIT_S)
        call = asyncio.ensure_future(session.run(f"trap '' HUP; sleep {mark}", 3600))
        await asyncio.sleep(0.3)
        started = time.monotonic()
        await session.close()
        assert time.monotonic() - started < 5
        with pytest.raises(ToolSessionLost, match="closed"):
            await call
        with pytest.raises(ToolSessionLost, match="closed"):
            await session.run("true", LIMIT_S)

    use(live_container, body)
    # Where nothing is isolated, what left its session is found only when the sandbox is closed.
    assert survivors(mark) == []


def test_a_shell_that_cannot_take_its_command_is_replaced_at_once(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        await session.run("cd /usr; enable -n mapfile enable", LIMIT_S)
        result = await session.run("echo no", LIMIT_S)
        assert (result.output, result.restarted, result.timed_out) == ("", True, False)
        assert await session.run("pwd", LIMIT_S) == BashResult("/usr\n", 0)

    use(live_container, body)


def test_calls_at_one_time_run_one_after_the_other(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        results = await asyncio.gather(*(session.run(f"echo {i}; sleep 0.01; echo {i}", LIMIT_S) for i in range(20)))
        assert [result.output for result in results] == [f"{i}\n{i}\n" for i in range(20)]

    use(live_container, body)


def test_a_forged_status_of_another_action_is_not_taken(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        forge = "for f in /proc/$$/fd/*; do [ -p $f ] && printf '%s' '999 0 /\\0' > $f; printf '1 0 /\\0' > $f; done"
        await session.run(forge + " 2>/dev/null", LIMIT_S)
        assert (await session.run("sleep 0.05; echo true; (exit 5)", LIMIT_S)).exit_code == 5

    use(live_container, body)


PLUMBING = ("eval", "builtin", "read", "printf", "return", "trap", "enable", "exit", "command", ":")


@pytest.mark.few(6)
@pytest.mark.parametrize(
    "vandal",
    [
        "; ".join(f"alias {name}='echo A'" for name in (*PLUMBING, "unset", "__prorl_next", "__prorl_prompt")),
        "alias {='echo A' if='echo A' '[[=echo A'",
        *(f"function {name} {{ echo A; }}" for name in (*PLUMBING, "unset", "[")),
        *(f"enable -n {name}" for name in (*PLUMBING, "unset")),
        "function builtin { echo A; }; enable -n eval printf read",
        "set -e; function : { false; }; function builtin { false; }",
        "__prorl_next() { echo A; }; __prorl_prompt() { echo A; }; unset -f __prorl_next __prorl_prompt",
    ],
)
def test_no_alias_or_function_of_the_agents_takes_the_place_of_the_plumbing(
    live_container: LiveContainer, vandal: str
) -> None:
    """After `alias eval='echo A'` every later call printed A and ran nothing, for good."""

    async def body(session: BashSession) -> None:
        assert not (await session.run(f"X=1\n{vandal}", LIMIT_S)).restarted
        for _ in range(2):
            result = await session.run('/bin/echo "on $X $?"', LIMIT_S)
            assert result == BashResult("on 1 0\n" if result.output != "on 1 1\n" else result.output, 0)

    use(live_container, body)


@pytest.mark.few(2)
@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize(
    "vandal",
    [
        "function unset { :; }; function builtin { echo A; }",
        "function enable { :; }; enable -n builtin 2>/dev/null; command enable -n builtin eval",
        "enable -n eval read enable",
        "readonly __prorl_command=x",
        "readonly __prorl_action=x",
        "readonly PS1",
    ],
)
def test_a_shell_that_was_spoilt_beyond_repair_is_replaced(live_container: LiveContainer, vandal: str) -> None:
    async def body(session: BashSession) -> None:
        await session.run("cd /usr", LIMIT_S)
        assert (await session.run(vandal, 0.3)).restarted
        assert await session.run("pwd", LIMIT_S) == BashResult("/usr\n", 0)

    use(live_container, body)


def test_a_workspace_without_permissions_is_entered_again(live_container: LiveContainer) -> None:
    """After `chmod 000 ~` a service that is not root could start no shell there."""

    async def body(session: BashSession) -> None:
        assert (await session.run("chmod 000 ~; exit", LIMIT_S)).restarted
        assert (await session.run("cd ~ && stat -c %a .", LIMIT_S)).output == "700\n"

    use(live_container, body)


def test_a_session_that_cannot_start_says_why(live_container: LiveContainer) -> None:
    async def main() -> None:
        async with live_container() as container:
            shutil.rmtree(container.workspace)
            session = BashSession(container)
            with pytest.raises(SandboxFailed, match="the workspace"):
                await session.start()
            with pytest.raises(ToolSessionLost, match="is lost: the workspace"):
                await session.run("true", LIMIT_S)
            await session.close()
            container.workspace.mkdir()

    asyncio.run(main())


@pytest.mark.parametrize("kind", main_and_proofs("apptainer", "bubblewrap"), indirect=True)
def test_an_image_without_bash_is_told(kind: SandboxKind, tmp_path: Path) -> None:
    image = tiny_root_filesystem(tmp_path / "image")
    dash = shutil.which("dash")
    assert dash is not None
    for name in ("bash", "sh"):
        (image / "bin" / name).unlink()
    shutil.copy(dash, image / "bin" / "sh")
    for name in ("workspace", "tmp", "shm"):
        (tmp_path / name).mkdir()

    async def main() -> None:
        container = container_class(kind)(tmp_path, SandboxSpec(image=str(image)))
        await container.start()
        session = BashSession(container)
        with pytest.raises(SandboxFailed, match="the image has no bash") as caught:
            await session.start()
        assert caught.value.fields["reason"] == "image"
        await session.close()
        await container.close()
        container.reap_orphans()

    asyncio.run(main())
