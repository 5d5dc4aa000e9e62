"""What tests share, where a fault of it would hide others: commands in the test's process, waits, programs."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import commands
from support.commands import complaint, prorl, run, script
from support.services import started
from support.waiting import until

from prorl_zmq.commands import app

if TYPE_CHECKING:
    from collections.abc import Callable


def acting(monkeypatch: pytest.MonkeyPatch, act: Callable[[], int | None]) -> None:
    """Have every command do this."""
    monkeypatch.setattr(app, "run", lambda _program, _arguments: act())


def test_a_command_changes_nothing_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "1")
    (tmp_path / "place").mkdir()

    def state() -> list[object]:
        root = logging.getLogger()
        return [
            *(Path.cwd(), dict(os.environ), sys.stdout, sys.stderr, sys.excepthook, signal.getsignal(signal.SIGTERM)),
            *(root.handlers[:], root.level, logging.getLogger("prorl").level, os.fstat(1).st_ino, os.fstat(2).st_ino),
        ]

    def act() -> int:
        app.start_logging("changed", "json", "debug")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.environ["NEW"] = os.environ.pop("KEPT")
        assert Path.cwd() == tmp_path / "place"
        assert os.environ["GIVEN"] == "2"
        assert "HOME" not in os.environ
        return 3

    before = state()
    acting(monkeypatch, act)
    assert prorl(cwd=tmp_path / "place", environment={"KEPT": "1", "GIVEN": "2"}).returncode == 3
    assert state() == before


def test_all_that_a_command_prints_is_its_own_and_nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    running, printed = threading.Event(), threading.Event()

    def beside() -> None:
        running.wait(20)
        print("from elsewhere", file=sys.stderr)
        printed.set()

    def act() -> int:
        running.set()
        assert printed.wait(20)
        print("out")
        print("err", file=sys.stderr)
        os.system("echo child; echo complains >&2")
        return 0

    other = threading.Thread(target=beside)
    other.start()
    acting(monkeypatch, act)
    done = prorl()
    other.join()
    assert sorted(done.stdout.splitlines()) == ["child", "out"]
    assert sorted(done.stderr.splitlines()) == ["complains", "err"]


def test_what_a_command_raises_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise ValueError("a fault of ours")

    acting(monkeypatch, fail)
    done = prorl()
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: a fault of ours"
    for code, expected, said in ((None, 0, ""), (5, 5, ""), ("why", 1, "why\n")):
        acting(monkeypatch, lambda code=code: sys.exit(code))  # type: ignore[misc]
        done = prorl()
        assert (done.returncode, done.stderr) == (expected, said)


def test_a_complaint_is_one_line_with_its_exit_code() -> None:
    assert "No such command" in complaint(run("prorl", "train"))
    for done in (run("prorl", "--version"), commands.CompletedProcess([], 2, "", "one\ntwo\n")):
        with pytest.raises((AssertionError, ValueError)):
            complaint(done)


def test_a_script_runs_as_main_and_must_end_well(tmp_path: Path) -> None:
    assert script("import os; print(__name__, os.getcwd())", cwd=tmp_path) == f"__main__ {tmp_path}\n"
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        script("1 / 0", cwd=tmp_path)


def test_a_wait_in_vain_says_for_what() -> None:
    with pytest.raises(AssertionError, match=r"waited 0\.01 s for the moon"):
        until(lambda: False, "the moon", 0.01)


@pytest.mark.parametrize("interpreter", [True, False])
def test_a_program_that_ends_is_no_wait(tmp_path: Path, *, interpreter: bool) -> None:
    flags = ("--run-dir", tmp_path / "run", "--config", "nowhere.toml")
    with started("prorl", "serve", *flags, interpreter=interpreter) as program:
        with pytest.raises(AssertionError, match=r"it ended without .ready at.:\n.*nowhere\.toml: No such file"):
            program.wait_line("ready at")
        assert program.wait() == 2
