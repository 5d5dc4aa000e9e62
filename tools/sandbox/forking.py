"""Forked children of the execution server: what they do before they execute a program, and how they say what failed.

Such a child has the server's memory and no rights of its own yet. Before it joins a container it forgets the server's
descriptors and how to import, since from then on the files of `sys.path` are the agent's. All that it has to say goes
through one pipe, the report: the number of the process that it became in the container, then nothing, or an error. A
command inside may stop it before it executes its program, so the server waits for the report only for a time.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

JOIN_LIMIT_S = 5.0
"""Longest time from the fork to the program's start."""
REPORT_BYTES = 4096
RESET_SIGNALS = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGPIPE,
    signal.SIGALRM,
    signal.SIGTERM,
    signal.SIGCHLD,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGXFSZ,
)
"""Python ignores SIGPIPE, and a service in the background SIGINT; what is ignored at exec stays so in all children."""


class Report(NamedTuple):
    """What a forked child said."""

    inner: int
    """The process that it became, if it had to fork again to join; else 0."""
    errno: int
    """Of the program's execution, if that failed; else 0."""
    problem: str
    """What went wrong; empty if nothing did."""


class ExecFailed(OSError):
    """The program could not be executed."""


def child(run: Callable[[], None], report: int, kept: Iterable[int]) -> NoReturn:
    """Be a forked child: do `run`, which does not return if all goes well, and say what it raises.

    Args:
        run: the child's work.
        report: the pipe that is told.
        kept: descriptors that `run` needs, beside the three standard ones.
    """
    try:
        for number in RESET_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        sys.meta_path.clear()
        _close_all_but({report, *kept})
        run()
    except ExecFailed as error:
        _say(report, f"{error.errno} {error.strerror}")
    except BaseException as error:  # noqa: BLE001 - nothing may get out of a forked child
        _say(report, f"0 {type(error).__name__}: {error}")
    finally:
        os._exit(127)


def be_the_first_to_go() -> None:
    """If the node runs out of memory, have the kernel take this process and its children before others."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:  # noqa: PTH123 - between fork and exec
        score.write("500")


def execute(argv: Sequence[str], environment: Mapping[str, str], inherited: Iterable[int]) -> NoReturn:
    """Become a program.

    Raises:
        ExecFailed: there is no such program, or it cannot be executed.
    """
    for descriptor in inherited:
        os.set_inheritable(descriptor, True)
    try:
        os.execvpe(argv[0], list(argv), dict(environment))  # noqa: S606
    except OSError as error:
        raise ExecFailed(error.errno, error.strerror) from None


def hear(pipe: int) -> Report:
    """Read what a forked child says until it has executed its program, or closed the report; close the pipe.

    Raises:
        TimeoutError: it did neither in time; `args[0]` is the report so far.
    """
    said = b""
    deadline = time.monotonic() + JOIN_LIMIT_S
    with os.fdopen(pipe, "rb", buffering=0) as reports:
        while select.select([reports], [], [], max(0.0, deadline - time.monotonic()))[0]:
            data = reports.read(REPORT_BYTES)
            if not data:
                return _parsed(said)
            said += data
    raise TimeoutError(_parsed(said))


def tell_inner(report: int, pid: int) -> None:
    """Tell the number of the process that goes on for this one; that one may have said something already."""
    os.write(report, b"P%d\n" % pid)


def _parsed(said: bytes) -> Report:
    inner, number, problem = 0, 0, ""
    for line in said.decode("utf-8", "replace").splitlines():
        if line.startswith("P"):
            inner = int(line[1:])
        else:
            code, _, problem = line.partition(" ")
            number = int(code)
    return Report(inner, number, problem)


def _say(report: int, words: str) -> None:
    with suppress(OSError):
        os.write(report, " ".join(words.split())[: REPORT_BYTES // 8].encode("utf-8", "replace") + b"\n")


def _close_all_but(kept: set[int]) -> None:
    before = 2
    for descriptor in sorted(kept):
        os.closerange(before + 1, descriptor)
        before = descriptor
    os.closerange(before + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
