"""Commands of `prorl`, `prorl-stage` and `prorl-engine`, run in the test's own process: a tenth of a process's cost.

A command that ends by itself runs here: it gets its own standard streams, environment and working folder, and all that
it changes in the process is put back. One that serves, waits for a signal or asks a terminal needs a process.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
import traceback
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, TextIO

from prorl_zmq.commands import app
from prorl_zmq.system import logs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_one_at_a_time = threading.Lock()
"""A process has one working folder, one environment and one standard output."""


def run(
    program: str,
    *arguments: object,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> CompletedProcess[str]:
    """Run a command; return its exit code and what it and its child processes printed.

    Args:
        program: `prorl`, `prorl-stage` or `prorl-engine`.
        arguments: as in a shell; paths and numbers as well as texts.
        cwd: its working folder; None: the test's.
        environment: all of its variables; None: the test's.
    """
    words = [str(argument) for argument in arguments]
    with _process_of_its_own(cwd, environment) as (out, err):
        code = _exit_code(lambda: app.run(program, words))
        return CompletedProcess([program, *words], code, _text(out), _text(err))


def prorl(
    *arguments: object, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Run a command of `prorl`."""
    return run("prorl", *arguments, cwd=cwd, environment=environment)


def script(code: str, *, cwd: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run a user's Python program, which must end well; return what it printed."""
    with _process_of_its_own(cwd, environment) as (out, err):
        ended = _exit_code(lambda: exec(code, {"__name__": "__main__"}))
        assert ended == 0, _text(err)
        return _text(out)


def complaint(done: CompletedProcess[str], code: int = 2) -> str:
    """Return the one line that a command printed before it ended with this exit code."""
    assert done.returncode == code, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    return line


def _exit_code(act: Callable[[], int | None]) -> int:
    try:
        return act() or 0
    except SystemExit as ending:
        if ending.code is None or isinstance(ending.code, int):
            return ending.code or 0
        print(ending.code, file=sys.stderr)
        return 1
    except Exception:  # noqa: BLE001 - as an interpreter ends
        traceback.print_exc()
        return 1


@contextmanager
def _process_of_its_own(cwd: Path | None, environment: Mapping[str, str] | None) -> Iterator[tuple[TextIO, TextIO]]:
    """Set what a process has one of; yield its standard output and error."""
    with _one_at_a_time, ExitStack() as stack:
        stack.enter_context(_settings_kept())
        if cwd is not None:
            stack.enter_context(_folder(cwd))
        if environment is not None:
            stack.enter_context(_variables(environment))
        yield stack.enter_context(_captured(1)), stack.enter_context(_captured(2))


class _Stream:
    """A standard stream during a command: the command's for its threads, and the old one for those before it."""

    def __init__(self, ours: TextIO, before: TextIO) -> None:
        self._ours, self._before = ours, before
        self._others = set(threading.enumerate()) - {threading.current_thread()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._before if threading.current_thread() in self._others else self._ours, name)


@contextmanager
def _captured(descriptor: int) -> Iterator[TextIO]:
    """Have all that is written to a descriptor, and to Python's stream of it, in a file."""
    name = {1: "stdout", 2: "stderr"}[descriptor]
    before = getattr(sys, name)
    with TemporaryFile("w+", encoding="utf-8") as file, ExitStack() as stack:
        kept = os.dup(descriptor)
        stack.callback(os.close, kept)
        before.flush()
        os.dup2(file.fileno(), descriptor)
        stack.callback(os.dup2, kept, descriptor)
        setattr(sys, name, _Stream(file, before))
        stack.callback(setattr, sys, name, before)
        yield file


def _text(file: TextIO) -> str:
    file.flush()
    file.seek(0, io.SEEK_SET)
    return file.read()


@contextmanager
def _folder(path: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _variables(wanted: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    _become(wanted)
    try:
        yield
    finally:
        _become(before)


def _become(wanted: Mapping[str, str]) -> None:
    """Change only what differs: other threads may read the environment."""
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@contextmanager
def _settings_kept() -> Iterator[None]:
    """Put back what a program sets for its process: logging, signals, variables."""
    root, package = logging.getLogger(), logging.getLogger("prorl")
    handlers, levels, hook, settings = root.handlers[:], (root.level, package.level), sys.excepthook, logs._settings
    ends = signal.getsignal(signal.SIGTERM)
    with _variables(os.environ.copy()):
        try:
            yield
        finally:
            logging.captureWarnings(capture=False)
            root.handlers[:] = handlers
            root.setLevel(levels[0])
            package.setLevel(levels[1])
            sys.excepthook, logs._settings = hook, settings
            if signal.getsignal(signal.SIGTERM) is not ends:
                signal.signal(signal.SIGTERM, ends)
