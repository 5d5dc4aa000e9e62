"""Forked children of the execution server: what they do before they execute a program, and how they report errors.

Such a child has the server's memory. Before it joins a container it closes the server's descriptors and disables
imports, since from then on the files of `sys.path` are the agent's. It writes to one pipe, the report: the number of
the process that it became in the container, then nothing, or an error. A command inside may stop it before it executes
its program, so the server waits for the report only for a time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import sys
import termios
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from ...system.readable import readable

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
"""Python ignores SIGPIPE, and a background service SIGINT; children inherit what is ignored at exec."""


class Report(NamedTuple):
    inner: int
    """The process that it became, if it had to fork again to join; else 0."""
    errno: int
    """Of the program's execution, if that failed; else 0."""
    problem: str
    """What went wrong; empty if nothing did."""


class ExecFailed(OSError): ...


def child(run: Callable[[], None], report: int, kept: Iterable[int]) -> NoReturn:
    try:
        for number in RESET_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        sys.meta_path.clear()
        _close_all_but({report, *kept})
        run()
    except ExecFailed as error:
        _write(report, f"{error.errno} {error.strerror}")
    except BaseException as error:  # noqa: BLE001 - nothing may get out of a forked child
        _write(report, f"0 {type(error).__name__}: {error}")
    finally:
        os._exit(127)


def be_killed_first() -> None:
    """Let the kernel kill this process and its children first if the node runs out of memory."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:  # noqa: PTH123 - between fork and exec
        score.write("500")


def give_up_terminal() -> None:
    """In the session's leader: give up the terminal on standard input, without the hang-up that this means."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGCONT, signal.SIG_IGN)
    fcntl.ioctl(0, termios.TIOCNOTTY)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGCONT, signal.SIG_DFL)


def take_terminal() -> None:
    """Lead a new session on the terminal on standard input; output is not changed, input is not echoed."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    modes = termios.tcgetattr(0)
    modes[1] &= ~termios.ONLCR
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(0, termios.TCSANOW, modes)


def execute(argv: Sequence[str], environment: Mapping[str, str], inherited: Iterable[int]) -> NoReturn:
    for descriptor in inherited:
        os.set_inheritable(descriptor, True)
    try:
        os.execvpe(argv[0], list(argv), dict(environment))  # noqa: S606
    except OSError as error:
        raise ExecFailed(error.errno, error.strerror) from None
    except ValueError as error:  # a NUL, an empty program, a variable whose name has "="
        raise ExecFailed(errno.EINVAL, str(error)) from None


def read_report(pipe: int) -> Report:
    """Read a report until the child has executed its program, or closed it; close the pipe.

    A TimeoutError has the report so far as `args[0]`.
    """
    received = b""
    deadline = time.monotonic() + JOIN_LIMIT_S
    with os.fdopen(pipe, "rb", buffering=0) as reports:
        while readable([reports], max(0.0, deadline - time.monotonic())):
            data = reports.read(REPORT_BYTES)
            if not data:
                return _parsed(received)
            received += data
    raise TimeoutError(_parsed(received))


def tell_inner(report: int, pid: int) -> None:
    """Report the process that continues for this one; that one may have written something already."""
    os.write(report, b"P%d\n" % pid)


def _parsed(received: bytes) -> Report:
    inner, number, problem = 0, 0, ""
    for line in received.decode("utf-8", "replace").splitlines():
        if line.startswith("P"):
            inner = int(line[1:])
        else:
            code, _, problem = line.partition(" ")
            number = int(code)
    return Report(inner, number, problem)


def _write(report: int, words: str) -> None:
    with suppress(OSError):
        os.write(report, " ".join(words.split())[: REPORT_BYTES // 8].encode("utf-8", "replace") + b"\n")


def _close_all_but(kept: set[int]) -> None:
    before = 2
    for descriptor in sorted(kept):
        os.closerange(before + 1, descriptor)
        before = descriptor
    os.closerange(before + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
