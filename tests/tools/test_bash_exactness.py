"""What an agent may do to a shell, by accident or on purpose, and what must come of it."""

from __future__ import annotations

import os
import re
import time
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from live_bash import LIMIT_S, LiveContainer, use
from support.sandboxes import main_and_proofs

from prorl_zmq.tools.sessions.bash_session import BashResult, BashSession

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_zmq.wire.messages.jobs import SandboxKind

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

Steps = list[tuple[str, str, int]]


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which nothing but the end of bash can come of an interrupt: no machine is too busy for these."""
    monkeypatch.setattr("prorl_zmq.tools.sessions.bash_session.INTERRUPT_LIMIT_S", 0.1)
    monkeypatch.setattr("prorl_zmq.tools.sessions.bash_session.KILL_LIMIT_S", 0.1)


ACTIVATE = """cat > ~/v/bin/activate <<'E'
deactivate() { PATH=$OLD; PS1=$OLDPS; unset -f deactivate; }
OLD=$PATH OLDPS=${PS1:-}
export VIRTUAL_ENV=~/v PATH=~/v/bin:$PATH PS1="(v) ${PS1:-}"
hash -r 2>/dev/null
E"""

STEPS: dict[str, Steps] = {
    "nothing to do": [
        ("", "", 0),
        ("  \n\t\n", "", 0),
        ("# a comment", "", 0),
        ("false", "", 1),
        ("#", "", 0),
        (";", "?", 2),
    ],
    "errors end a command, not the shell": [
        ("X=1; echo a; ${nope?}; echo no", "?", 1),
        ("echo b; )", "?", 2),
        ("return 3", "?", 2),
        ("break; continue; echo on $X", "?", 0),
        ("echo $((1/0)); echo no", "?", 1),
        ("readonly R=1", "", 0),
        ("R=2; echo no", "?", 1),
        ("echo $R $X", "1 1\n", 0),
    ],
    "errexit ends the shell where bash says so and not elsewhere": [
        ("set -e; false && true", "", 1),
        ("echo on", "on\n", 0),
        ("! true", "", 1),
        ("if false; then :; fi; [ 1 = 2 ] && echo no", "", 1),
        ("cat <<E\nx\nE\nfalse && true", "x\n", 1),
        ("set +e; false", "", 1),
        ("echo $?", "1\n", 0),
    ],
    "traps run once, and when they should": [
        ("trap 'echo ERR $?' ERR; (exit 3)", "ERR 3\n", 3),
        ("(exit 4)", "ERR 4\n", 4),
        ("echo a; false && true; ! true", "a\n", 1),
        ("trap - ERR; trap 'echo INT' INT; kill -INT $$; echo b", "INT\nb\n", 0),
        ("trap 'echo BYE' EXIT; echo c", "c\n", 0),
        ("trap - INT EXIT; trap 'N=$((N+1))' DEBUG; true", "", 0),
        ("trap - DEBUG; (( N >= 1 )) && echo d", "d\n", 0),
    ],
    "an incomplete command under errexit and traps": [
        ("trap 'echo ERR' ERR; f() { echo f; }", "", 0),
        *(
            (command, "?", 2)
            for command in ("echo 'a", "echo a |", "for i in 1 2", "f()", "function f", "(", "echo a &&")
        ),
        ("f", "f\n", 0),
        ("cat <<E\nx", "?", 0),
        ("echo a \\", "?", 0),
    ],
    "prompts are the agent's to change": [
        ("PS1='$(echo prompt)> ' PS2=more PS4=four PROMPT_COMMAND='echo command'; echo a", "a\n", 0),
        ("echo b", "b\n", 0),
        ("PROMPT_COMMAND=(x y); PS0=zero", "", 0),
        ("unset PROMPT_COMMAND PS1; echo c", "c\n", 0),
        ("set -u; echo d; set +u", "d\n", 0),
        ("IFS=0123456789; set -f; (exit 17)", "", 17),
        ('echo "$?"; unset IFS; set +f', "17\n", 0),
        ("shopt -s nullglob extglob failglob; set -o posix; echo e; set +o posix", "e\n", 0),
        ("set -o noclobber; echo f > ~/f; echo g", "g\n", 0),
        ("LANG=xx LC_ALL=xx_YY.latin1; export LANG LC_ALL; printf '\\xe9\\n'", "?", 0),
        ("unset LC_ALL; LANG=C; export LANG; printf '\\xe2\\x98\\x83\\n'", "?", 0),
    ],
    "descriptors are the agent's to use": [
        ("exec 9> ~/nine 10> ~/ten 11>&1 200> ~/lock 255>&1; echo a >&10", "", 0),
        ("echo b >&9; echo c >&10; echo d >&11; echo e >&200", "d\n", 0),
        ("cat ~/nine ~/ten ~/lock", "b\na\nc\ne\n", 0),
        ("exec 9>&- 10>&- 11>&- 200>&-; ls /proc/self/fd | tr '\\n' ' '", "?", 0),
        ("exec > ~/out; echo hidden", "", 0),
        ("echo hidden too >&1; exec > /dev/tty; cat ~/out", "hidden\nhidden too\n", 0),
        ("ulimit -n 32; echo f", "f\n", 0),
        ("echo g; ulimit -n", "g\n32\n", 0),
    ],
    "a closed terminal comes back": [
        ("exec 0<&- 1>&- 2>&-; echo lost", "", 1),
        ("echo a; echo b >&2; test -t 0 && test -t 1 && test -t 2", "a\nb\n", 0),
        ("exec 2>&-; echo c", "c\n", 0),
        ("echo d >&2", "d\n", 0),
        ("exec 0< /dev/null; read x", "", 1),
        ("test -t 0 && echo e", "e\n", 0),
    ],
    "places go away": [
        ("mkdir -p ~/a/b; cd ~/a/b; rm -r ~/a; echo a", "a\n", 0),
        ("echo b; cd ~ 2>/dev/null; pwd | wc -l", "b\n1\n", 0),
        ("chmod 000 ~; echo c; chmod 700 ~", "c\n", 0),
        ("unset HOME PATH PWD; echo d", "d\n", 0),
        ("PATH=/usr/bin:/bin; cd /; echo e", "e\n", 0),
        ('D=$(printf \'/tmp/a\\nb c%%s\'); mkdir -p "$D"; cd "$D"; echo f', "f\n", 0),
        ("[[ $PWD == $'/tmp/a\\nb c%s' ]]; echo $?; cd /; rm -r \"$D\"", "0\n", 0),
    ],
    "jobs": [
        ("sleep 3600 & disown; sleep 3600 & true", "?", 0),
        ("jobs | wc -l; kill %1; wait %1", "?", 143),
        ("coproc { cat; }; echo hi >&${COPROC[1]}; read -u ${COPROC[0]} x; echo $x", "?", 0),
        ("kill $COPROC_PID; wait 2>/dev/null; echo a", "?", 0),
        ("f() { (( $1 )) && { f $(($1 - 1)) & wait; }; }; f 10 2>/dev/null; echo b", "?", 0),
        ("bash -c 'kill -TERM $$'", "Terminated\n", 143),
        ("bash -c 'kill -SEGV $$'", "Segmentation fault\n", 139),
        ("set +m; sleep 0.01 & wait; set -m; echo c", "?", 0),
    ],
    "a virtual environment": [
        ("mkdir -p ~/v/bin; printf '#!/bin/sh\\necho mine\\n' > ~/v/bin/tool; chmod +x ~/v/bin/tool", "", 0),
        (ACTIVATE, "", 0),
        (". ~/v/bin/activate", "", 0),
        ("tool; basename $VIRTUAL_ENV", "mine\nv\n", 0),
        ("deactivate; tool", "bash: tool: command not found\n", 127),
    ],
    "the terminal's modes are mended": [
        ("stty -a > ~/before; stty raw -echo -isig -icanon -opost onlcr intr q cols 3 2>/dev/null", "", 0),
        ("stty -a | tail -n +2 | diff - <(tail -n +2 ~/before) && echo same", "same\n", 0),
        ("stty -icrnl icanon; echo a", "a\n", 0),
        ("read -t 0.01; tput -T xterm clear | wc -c; echo b", "?", 0),
    ],
    "output of all kinds": [
        (
            r"printf '\0\1\2\3\4\5\6\7\10\11\12\13\14\15\16\17\20\21\22\23\24\25\26\27\30\31\32\33\34\35\36\37\177'",
            bytes(range(32)).decode() + "\x7f",
            0,
        ),
        (r"printf '\xff\xfe\x80\xc0\xed\xa0\x80'", b"\xff\xfe\x80\xc0\xed\xa0\x80".decode("utf-8", "replace"), 0),
        (r"printf '\033]0;t\007\033[2J\033[31mred\033[0m\033c'", "\x1b]0;t\x07\x1b[2J\x1b[31mred\x1b[0m\x1bc", 0),
        ("echo exit", "exit\n", 0),
        ("printf 'bash-5.2$ '; printf 'a\\r\\nb\\r'", "bash-5.2$ a\r\nb\r", 0),
        (
            r"printf '\0001 0 himBHs /\0\0002 0 himBHs /\0trap -- x ERR\0'",
            "\0001 0 himBHs /\0\0002 0 himBHs /\0trap -- x ERR\0",
            0,
        ),
    ],
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", STEPS)
def test_steps(live_container: LiveContainer, name: str) -> None:
    async def body(session: BashSession) -> None:
        for command, output, code in STEPS[name]:
            result = await session.run(command, LIMIT_S)
            assert result == BashResult(result.output if output == "?" else output, code), command

    use(live_container, body)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("command", "output", "code"),
    [
        ("trap 'echo BYE' EXIT; exit 5", "exit\nBYE\n", 5),
        ("echo exit; exec sh -c 'echo exit; exit 6'", "exit\nexit\n", 6),
        ("exit", "", 0),
        ("exit 300", "", 44),
        ("false; exit", "", 1),
        ("kill -9 $$", "", 137),
        ("kill -HUP $$; sleep 1", "", 129),
        ("set -e; (exit 9)", "", 9),
        ("set -euo pipefail; false | true", "", 1),
        ("exec no-such-program", "bash: exec: no-such-program: not found\n", 127),
    ],
)
def test_the_end_of_the_shell(live_container: LiveContainer, command: str, output: str, code: int) -> None:
    async def body(session: BashSession) -> None:
        await session.run("cd /usr; X=1", LIMIT_S)
        result = await session.run(command, LIMIT_S)
        kept = command.startswith("exec no")  # an interactive shell goes on
        assert result == BashResult(output, code, restarted=not kept)
        assert await session.run("pwd; echo $X", LIMIT_S) == BashResult("/usr\n1\n" if kept else "/usr\n\n", 0)

    use(live_container, body)


async def sleeping(session: BashSession) -> list[str]:
    lines = await session.run("for c in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $c; echo; done 2>/dev/null", LIMIT_S)
    return re.findall(r"^sleep 3600", lines.output, re.MULTILINE)


@pytest.mark.few(3)
@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize(
    ("command", "restarted"),
    [
        ("read x", False),
        ("cat", False),
        ("kill -STOP $$", False),
        ("suspend", False),
        ("bash --norc", False),
        ("trap '' INT QUIT TERM; sleep 3600", False),
        ("bash -c 'trap \"\" INT QUIT TERM HUP TSTP; while :; do read -t 1; done'", False),
        ("setsid --wait sleep 3600", False),
        ("setsid sh -c 'trap \"\" INT QUIT; sleep 3600' & wait", False),
        ("sh -c 'sh -c \"sleep 3600 & sleep 3600\" & wait'", False),
        ("while :; do sleep 0.01; done", False),
        ("stty raw -isig -echo; sleep 3600", False),
        ("(set -m; sleep 3600)", False),
        ("exec 0<&- 1>&- 2>&-; sleep 3600", False),
        ("PROMPT_COMMAND='sleep 3600' ; sleep 3600", True),
        ("exec sleep 3600", True),
        ("exec bash --norc", True),
        ("trap '' INT; while :; do :; done", True),
        ("trap 'while :; do :; done' INT; while :; do :; done", True),
        ('for fd in /proc/$$/fd/*; do n=${fd##*/}; ((n > 2 && n != 255)) && eval "exec $n>&-"; done', True),
    ],
)
def test_the_time_limit_ends_everything_new(live_container: LiveContainer, command: str, restarted: bool) -> None:
    async def body(session: BashSession) -> None:
        await session.run("cd /usr; X=1; sleep 3600 & true", LIMIT_S)
        result = await session.run(f"echo begun\n{command}", 1)
        assert (result.timed_out, result.restarted) == (True, restarted)
        assert result.output.startswith("begun\n")
        assert (await session.run("pwd; echo $X; jobs -p | wc -l; echo on", LIMIT_S)) == (
            BashResult("/usr\n\n0\non\n", 0) if restarted else BashResult("/usr\n1\n1\non\n", 0)
        )
        if session._container.isolated:  # else one sees all of the host
            until = time.monotonic() + LIMIT_S
            while len(alive := await sleeping(session)) > (0 if restarted else 1) and time.monotonic() < until:
                pass  # what was killed dies when it has a core
            assert len(alive) == (0 if restarted else 1)

    use(live_container, body)


FORGERIES = {
    "through /proc": "for f in /proc/$$/fd/*; do printf '\\0%s 0 x /\\0' $__prorl_action > $f; done 2>/dev/null",
    "from a child": """
        (for n in {3..254} {256..2000}; do printf '\\0%s 0 x /\\0' $__prorl_action >&$n; done) 2>/dev/null""",
    "from a later child": """
        (sleep 0.2; for n in {900..920}; do [ -S /proc/$BASHPID/fd/$n ] && printf '\\0%s 0 x /\\0' {1..9} >&$n; done) \
        >/dev/null 2>&1 & disown""",
    "for other actions": """
        for n in {900..920}; do [ -S /proc/$$/fd/$n ] && for i in 1 3 4 5; do printf "\\0$i 0 x /\\0" >&$n; done; done \
        2>/dev/null""",
    "a flood": """
        (while printf 'xxxxxxxxxxxxxxxx'; do :; done >&902) 2>/dev/null & disown
        (while printf 'x\\0'; do :; done >&902) 2>/dev/null & disown""",
    "the next command": """
        (while :; do printf '\\necho no\\0%d\\0' 3 >&903; : > /proc/$$/fd/903; done) 2>/dev/null & disown""",
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FORGERIES)
def test_what_others_write_to_the_private_descriptors_forges_nothing(
    live_container: LiveContainer, name: str, kind: SandboxKind
) -> None:
    async def body(session: BashSession) -> None:
        await session.run("cd /usr; true", LIMIT_S)
        result = await session.run(f"{FORGERIES[name]}\necho true; sleep 0.1; (exit 5)", LIMIT_S)
        assert (result.exit_code, result.timed_out, result.restarted) == (5, False, False)
        assert result.output.endswith("true\n")
        result = await session.run("sleep 0.3; pwd; (exit 6)", LIMIT_S)
        if result.restarted and name == "the next command" and kind == "process" and os.geteuid() == 0:
            return  # root may truncate the command file, without isolation: a loss that is said
        assert (result.output, result.exit_code, result.restarted) == ("/usr\n", 6, False)

    use(live_container, body)


def test_a_false_status_of_bash_itself_cannot_reach_the_next_command(live_container: LiveContainer) -> None:
    """Bash can say that it is done, by its own plumbing; what it goes on to do is then in nobody's way for long."""

    async def body(session: BashSession) -> None:
        await session.run("X=1", LIMIT_S)
        assert (await session.run("__prorl_prompt; sleep 0.3; echo late; (exit 5)", LIMIT_S)).exit_code == 0
        result = await session.run("echo $X; (exit 6)", LIMIT_S)
        assert (result.output.removeprefix("late\n"), result.exit_code) == ("1\n", 6)

    use(live_container, body)


def test_bash_that_ends_between_two_calls_is_replaced_before_the_second(live_container: LiveContainer) -> None:
    """The second was said to have ended as bash had, and was never run."""

    async def body(session: BashSession) -> None:
        await session.run("cd /usr; X=1; (sleep 0.1; kill -9 $$) & disown", LIMIT_S)
        shell = session._process
        assert shell is not None
        assert await shell._child.wait(LIMIT_S)
        assert await session.run("pwd; echo $X; (exit 3)", LIMIT_S) == BashResult("/usr\n\n", 3, restarted=True)
        assert await session.run("echo on", LIMIT_S) == BashResult("on\n", 0)

    use(live_container, body)


@pytest.mark.parametrize("setting", ["set -e", "trap 'echo ERR' ERR", "set -u", "declare -i __prorl_command"])
def test_settings_outlive_the_time_limit(live_container: LiveContainer, setting: str) -> None:
    async def body(session: BashSession) -> None:
        await session.run(f"X=1; {setting}", LIMIT_S)
        result = await session.run("sleep 3600", 0.3)
        assert (result.timed_out, result.restarted, result.exit_code) == (True, False, 130)
        assert await session.run("echo $X", LIMIT_S) == BashResult("1\n", 0)

    use(live_container, body)


def test_a_thief_of_the_terminals_input_does_not_get_the_next_command(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        await session.run("setsid cat > ~/stolen & disown; until [ -e ~/stolen ]; do sleep 0.01; done", LIMIT_S)
        for i in range(5):
            assert await session.run(f"echo {i}", LIMIT_S) == BashResult(f"{i}\n", 0)
        assert (await session.run("cat ~/stolen", LIMIT_S)).output == ""

    use(live_container, body)


def test_late_output_of_a_job_is_not_the_next_commands(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        await session.run("mkfifo ~/go ~/gone; { read < ~/go; echo late; echo > ~/gone; } & disown", LIMIT_S)
        home = session._container.workspace
        (home / "go").write_text("\n")
        (home / "gone").read_text()
        assert await session.run("echo mine", LIMIT_S) == BashResult("mine\n", 0, background="late\n")
        assert await session.run("echo mine", LIMIT_S) == BashResult("mine\n", 0)
        await session.run("{ read < ~/go; yes | head -c 100000; echo last; echo > ~/gone; } & disown", LIMIT_S)
        (home / "go").write_text("\n")

        result = await session.run("read < ~/gone; echo mine", LIMIT_S)
        assert (result.output + result.background).count("last\n") == 1
        assert result.output.endswith("mine\n")

    use(live_container, body)


@pytest.mark.proof
def test_much_output_takes_little_memory_and_is_counted(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        await session.run("true", LIMIT_S)
        tracemalloc.start()
        result = await session.run("echo first; head -c 100000000 /dev/zero | tr '\\0' x; echo; echo last", 60)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2**20
        assert result.dropped_bytes == 100_000_012 - 65_536
        assert result.output.startswith("first\nxxx")
        assert result.output.endswith("xxx\nlast\n")

    use(live_container, body)


def test_output_up_to_the_limit_is_byte_for_byte(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        for size in (1, 4095, 4096, 4097, 65_535, 65_536):
            script = f"import sys; sys.stdout.buffer.write(bytes(i * 7 % 94 + 32 for i in range({size})))"
            expected = bytes(i * 7 % 94 + 32 for i in range(size)).decode()
            assert await session.run(f'python3 -c "{script}"', LIMIT_S) == BashResult(expected, 0)

    use(live_container, body)


def test_a_thousand_jobs(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        result = await session.run("for i in {1..400}; do sleep 3600 & done 2>/dev/null; jobs -p | wc -l", 60)
        assert result.output.endswith("400\n")
        assert await session.run("echo on", LIMIT_S) == BashResult("on\n", 0)
        timed_out = await session.run("sleep 3600.5", 0.2)
        assert (timed_out.timed_out, timed_out.restarted) == (True, False)
        assert (await session.run("jobs -p | wc -l", LIMIT_S)).output == "400\n"

    use(live_container, body)


@pytest.mark.parametrize("kind", main_and_proofs("apptainer", "bubblewrap"), indirect=True)
def test_a_command_that_kills_everything_gets_another_container(
    live_container: LiveContainer, kind: SandboxKind
) -> None:
    assert kind != "process", "there it would kill all that the user has on this machine"

    async def body(session: BashSession) -> None:
        await session.run("echo kept > ~/file; cd /usr", LIMIT_S)
        result = await session.run("kill -9 -1; kill -9 $$", LIMIT_S)
        assert (result.restarted, result.exit_code) == (True, 137)
        assert await session.run("pwd; cat ~/file", LIMIT_S) == BashResult("/usr\nkept\n", 0)

    use(live_container, body)


def test_other_terminals_inside_this_one(live_container: LiveContainer, survivors: Callable[[str], list[str]]) -> None:
    async def body(session: BashSession) -> None:
        if (await session.run("command -v script", LIMIT_S)).exit_code == 0:
            result = await session.run("script -qec 'echo inner; exit 3' /dev/null", LIMIT_S)
            assert (result.output, result.exit_code) == ("inner\n", 3)
        assert await session.run("echo on", LIMIT_S) == BashResult("on\n", 0)

    use(live_container, body)
    assert survivors("script -qec") == []
