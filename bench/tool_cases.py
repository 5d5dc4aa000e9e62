r"""The cases that an agent's bash must pass: scripted exchanges, each with the exact expected answer.

Only the cases called "byte for byte" compare white space: elsewhere spaces at both ends of an output and `\r` do not
count; additional output, such as an echoed command, is wrong. A case starts with a fresh session in an empty folder.
`{forgery}` in a command is the approach's own framing, in printf's notation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tool_peers import INTERRUPT

if TYPE_CHECKING:
    from collections.abc import Callable

    from tool_peers import Answer, Exchange


@dataclass(frozen=True)
class Step:
    """One command, and what must come of it."""

    command: str
    output: bytes | None = None
    """None: not looked at."""
    code: int | None = 0
    """None: not looked at."""
    exact: bool = False
    """White space counts."""
    ends: Literal["done", "timed out", "either", "error"] = "done"
    """`either`: with its end or at the time limit; `error`: it is refused, or ends with a code that is not 0."""
    limit_s: float = 8.0
    talk: Exchange = ()
    """What is typed while it runs."""
    pause_s: float = 0.0
    """How long nothing is asked before it."""
    check: Callable[[Answer], bool] | None = field(default=None, repr=False)
    """Concurrently with all else."""


@dataclass(frozen=True)
class Case:
    """An exchange."""

    name: str
    steps: tuple[Step, ...]
    memory_limit_bytes: int = 0
    """How much more memory than before the approach may need at any moment; 0: any."""
    leaves_nothing: bool = False
    """No process is left after `close`."""


def case(name: str, *steps: Step, memory_limit_bytes: int = 0, leaves_nothing: bool = False) -> Case:
    return Case(name, steps, memory_limit_bytes, leaves_nothing)


def holds(*texts: bytes) -> Callable[[Answer], bool]:
    return lambda answer: all(text in answer.output for text in texts)


def whole_or_said(count: int) -> Callable[[Answer], bool]:
    """Expect so many bytes of output, or a word that some are left out."""
    return lambda answer: len(answer.output) == count or bool(answer.notice)


def shows_invalid(answer: Answer) -> bool:
    """Tell whether bytes that are not UTF-8 are there in any of the usual notations."""
    raw = b"a\xffb\xc3"
    return answer.output.strip() in (
        raw,
        raw.decode("utf-8", "replace").encode(),
        raw.decode("utf-8", "backslashreplace").encode(),
    )


def is_next_alone(answer: Answer) -> bool:
    """Tell whether the output is `next`; that bash itself tells of an ended job at its prompt is right as well."""
    lines = answer.output.replace(b"\r", b"").strip().split(b"\n")
    return [line for line in lines if not line.startswith(b"[1]+ ")] == [b"next"]


ALIVE = Step("echo on $((6*7))", b"on 42")
IGNORES = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 3, 15)]; time.sleep(60)"
ACTIVATE = "VIRTUAL_ENV=$PWD/v; PATH=$PWD/v/bin:$PATH; hash -r"
MAKE_TOOL = (
    r"mkdir -p v/bin && printf '#!/bin/sh\necho tool\n' > v/bin/tool && chmod +x v/bin/tool && "
    f"echo '{ACTIVATE}' > v/bin/activate"
)
FORGED = (
    "for f in /proc/$$/fd/*; do f=${f##*/}; [ $f -lt 3 ] || printf '{forgery}' >&$f; done 2>/dev/null; "
    "for f in {3..20}; do printf '{forgery}' >&$f; done 2>/dev/null; (exit 7)"
)
HUNTED = (
    "for f in /proc/$$/fd/*; do case $(readlink $f) in pipe:*|*memfd*|socket:*) "
    """timeout 0.2 bash -c 'printf "%b" "$1" > "$0"' $f '{forgery}';; esac; done 2>/dev/null; (exit 7)"""
)
CLOSED = 'exec 0<&- 1>&- 2>&-; for f in {3..255}; do eval "exec $f>&-"; done'
PROMPTS = r"root@host:/# \n$ \n# \n> \n>>> \n... \nbash-5.2$ "
ANSI = b"\x1b[31mred\x1b[0m \x1b[2K\x1b[1Gx\n"
LINES = b"\n".join(b"%d" % i for i in range(1, 6001))

CASES = (
    # exit codes
    case("exit code, and $? kept", Step("(exit 42)", b"", 42), Step("echo $?", b"42")),
    case("exit code of a killed command", Step("bash -c 'kill -9 $$'", code=137), ALIVE),
    case("exit code of a pipeline", Step("false | true"), Step("set -o pipefail"), Step("false | true", b"", 1)),
    case(
        "exit: the session comes back in its folder",
        Step("mkdir d && cd d"),
        Step("exit 3", code=3),
        Step("basename $PWD", b"d"),
    ),
    case("bash itself killed", Step("mkdir d && cd d"), Step("kill -9 $$", code=137), Step("basename $PWD", b"d")),
    # output
    case(
        "byte for byte: no newline at the end",
        Step("printf abc", b"abc", exact=True),
        Step("echo d", b"d\n", exact=True),
    ),
    case(
        "byte for byte: spaces and blank lines",
        Step(r"printf '  a  \n\n\n b \n\n'", b"  a  \n\n\n b \n\n", exact=True),
    ),
    case("byte for byte: tabs, carriage returns", Step(r"printf 'a\tb\r\nc\rd\n'", b"a\tb\r\nc\rd\n", exact=True)),
    case(
        "byte for byte: control bytes and NUL",
        Step(r"printf 'a\001\002\0\007\010c\n'", b"a\x01\x02\0\x07\x08c\n", exact=True),
    ),
    case("byte for byte: ANSI sequences", Step(r"printf '\033[31mred\033[0m \033[2K\033[1Gx\n'", ANSI, exact=True)),
    case("byte for byte: 5,000 characters in a line", Step("printf 'x%.0s' {1..5000}", b"x" * 5000, exact=True)),
    case("invalid UTF-8 is shown", Step(r"printf 'a\xffb\xc3\n'", check=shows_invalid), ALIVE),
    case("any script", Step("echo 'ünï ☃ 日本 🦖'", "ünï ☃ 日本 🦖".encode())),
    case("stdout and stderr in their order", Step("echo a; echo b >&2; echo c", b"a\nb\nc")),
    case(
        "output like common prompts",
        Step(f"printf '{PROMPTS}\\nend\\n'; (exit 5)", code=5, check=holds(b">>>", b"\nend")),
        ALIVE,
    ),
    case(
        "output like its own framing",
        Step("printf '{forgery}after\\n'; sleep 2; echo end; (exit 5)", code=5, check=holds(b"after", b"end")),
        ALIVE,
    ),
    case(
        "a screen cleared between two lines",
        Step(r"echo a; printf '\033[H\033[2J\033[3J\033c'; echo b", check=holds(b"a\n", b"b")),
    ),
    case("6,000 lines", Step("seq 6000", LINES)),
    case(
        "10 MB, or a word of what is left out",
        Step("seq 1000000 2249999", limit_s=15, check=whole_or_said(10_000_000)),
        ALIVE,
    ),
    case(
        "64 MB in bounded memory",
        Step("seq 10000000 17111110", limit_s=15, check=whole_or_said(63_999_999)),
        ALIVE,
        memory_limit_bytes=16 * 2**20,
    ),
    # commands
    case("a here-document", Step("cat <<'X'\n$x 'y\n\"z\" `w` \\n\nX", b'$x \'y\n"z" `w` \\n')),
    case("a here-document with tabs", Step("cat <<X\n\ta\tb\n\t\tc\nX\n", b"\ta\tb\n\t\tc\n", exact=True)),
    case(
        "several lines",
        Step("X=1\nfor i in 1 2; do\n  echo $i\ndone\n\n# a remark\necho a \\\n  b", b"1\n2\na b"),
    ),
    case("a command of 200 kB", Step(f"X='{'y' * 200_000}'; echo ${{#X}}", b"200000")),
    case("an open quote is an error", Step("echo 'a", code=None, ends="error", limit_s=3), ALIVE),
    case("an open block is an error", Step("if true; then echo a", code=None, ends="error", limit_s=3), ALIVE),
    case(
        "an open here-document does not hang",
        Step("cat <<X\nab", code=None, limit_s=3, check=lambda answer: b"ab" in answer.output or bool(answer.notice)),
        ALIVE,
    ),
    case("exclamation marks", Step('echo "hi!there" !! wow!', b"hi!there !! wow!")),
    case("backslashes and quotes", Step(r"""echo "a;b" \; '$(x)' \\ "\"q\"" $'t\'s'""", b'a;b ; $(x) \\ "q" t\'s')),
    case("control characters in a command", Step("printf '%s' '\x01\x03\x04\x1a' | od -An -tx1", b"01 03 04 1a")),
    # what is kept
    case("the directory", Step("mkdir -p 'a b' && cd 'a b'"), Step('basename "$PWD"', b"a b")),
    case(
        "variables, environment, arrays",
        Step("X=1; export Y=2; Z=(3 4)"),
        Step("echo $X $(bash -c 'echo $Y') ${Z[1]}", b"1 2 4"),
    ),
    case(
        "functions, aliases, shell options",
        Step("f() { echo f $1; }; alias g='f 2'; shopt -s nullglob"),
        Step("f 1; g; echo no*file", b"f 1\nf 2"),
    ),
    case(
        "a virtual environment",
        Step(MAKE_TOOL),
        Step("source v/bin/activate"),
        Step("tool && basename $VIRTUAL_ENV", b"tool\nv"),
    ),
    case(
        "background jobs",
        Step("(sleep 0.5; echo > done; exit 4) &"),
        Step("wait %1; echo $?; ls", check=lambda answer: answer.output.split()[-2:] == [b"4", b"done"]),
    ),
    case(
        "late output of a background job",
        Step("(sleep 0.5; echo LATE) &"),
        Step("echo next", pause_s=1.5, check=is_next_alone),
    ),
    # running programs
    case(
        "answering a question",
        Step("read -p 'name? ' x; echo hi-$x", talk=(("name? ", "Bob"),), check=holds(b"hi-Bob")),
        ALIVE,
    ),
    case(
        "an interactive interpreter",
        Step("python3 -q", talk=((">>> ", "6*7"), (">>> ", "exit()")), check=holds(b"42")),
        ALIVE,
    ),
    case(
        "^C by request",
        Step(
            "bash -c 'trap \"echo caught; exit 6\" INT; echo go; sleep 30'",
            code=6,
            talk=(("go", INTERRUPT),),
            check=holds(b"caught"),
        ),
        ALIVE,
    ),
    case("a pager", Step("seq 300 | less", code=None, ends="either", limit_s=2), ALIVE),
    case("a command that reads", Step("cat", code=None, ends="either", limit_s=1), ALIVE),
    # time limits
    case(
        "time limit: sleep",
        Step(
            "mkdir d; cd d; X=1; echo before; sleep 60", code=None, ends="timed out", limit_s=1, check=holds(b"before")
        ),
        Step("echo $X; basename $PWD", b"1\nd"),
    ),
    case(
        "time limit: INT, QUIT, TERM ignored",
        Step(f'python3 -c "{IGNORES}"', code=None, ends="timed out", limit_s=1),
        ALIVE,
    ),
    case(
        "time limit: in a session of its own",
        Step("setsid -w sleep 61.7", code=None, ends="timed out", limit_s=1),
        Step(r"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' ' ' | grep -c 'sleep 61\.[7]'", b"0", 1),
    ),
    case(
        "time limit: endless output",
        Step("yes", code=None, ends="timed out", limit_s=1),
        ALIVE,
    ),
    case(
        "time limit: bash stops itself",
        Step("kill -STOP $$; sleep 60", code=None, ends="timed out", limit_s=1),
        ALIVE,
    ),
    # damage
    case("set -e", Step("set -e"), Step("false", code=1), ALIVE),
    case("exec of a program", Step("exec echo hi", b"hi"), ALIVE),
    case("exec bash", Step("exec bash --norc", code=None, ends="either", limit_s=2), ALIVE),
    case("a nested bash", Step("bash --norc", code=None, ends="either", limit_s=2), ALIVE),
    case(
        "traps",
        Step("trap 'echo caught' USR1; kill -USR1 $$; echo a", b"caught\na"),
        Step("trap 'echo bye' EXIT"),
        ALIVE,
    ),
    case("a DEBUG trap", Step("trap 'X=1' DEBUG"), ALIVE),
    case(
        "PS1, PS2, PROMPT_COMMAND changed",
        Step("PS1='x> '; PS2='y> '; PROMPT_COMMAND='Z=1'"),
        ALIVE,
        Step("unset PROMPT_COMMAND PS1 PS2"),
        ALIVE,
    ),
    case(
        "damaged terminal settings",
        Step("stty raw echo -icanon onlcr rows 3 cols 9"),
        Step(r"printf 'a\nb\n'", b"a\nb"),
        ALIVE,
    ),
    case(
        "builtins replaced",
        Step("printf() { echo hacked; }; cd() { :; }; eval() { :; }; alias echo='echo x'"),
        Step("'echo' on", b"on"),
    ),
    case("all descriptors written to", Step(FORGED, code=7), ALIVE),
    case("descriptors found in /proc written to", Step(HUNTED, code=7), ALIVE),
    case("all descriptors closed", Step(CLOSED, code=None, ends="either", limit_s=3), ALIVE),
    case(
        "its folder removed",
        Step("mkdir d && cd d && rmdir ../d", b""),
        Step("echo here", b"here"),
        Step("cd / && pwd", b"/"),
    ),
    case(
        "nothing is left after the close",
        Step("(setsid sleep 300 &); nohup sleep 300 >/dev/null 2>&1 & disown"),
        leaves_nothing=True,
    ),
)
"""Grouped as above, in the picture's order."""
