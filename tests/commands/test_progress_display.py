from __future__ import annotations

import io
import re
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from support.waiting import until

from prorl_zmq.commands.progress_display import Progress, ProgressLines, pause_after
from prorl_zmq.commands.tables import console

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTILE = "\x1b[2J\x1b]0;owned\x07[red]step 3\u202e"


class Log:
    """Standard error as a file."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._text = ""

    def getvalue(self) -> str:
        self._text += self._capsys.readouterr().err
        return self._text


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Log]:
    """What a command writes to standard error while the environment asks for colours."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    written = Log(capsys)
    yield written
    assert all(line.isprintable() for line in written.getvalue().split("\n"))


def lines(log: Log) -> list[str]:
    return re.sub(r"after \d+ s", "after N s", log.getvalue()).splitlines()


def fail(progress: Progress) -> None:
    progress.update("pass@1 0.5", advance=2)
    raise RuntimeError


@pytest.mark.parametrize(("spent_s", "pause_s"), [(0, 10), (99, 10), (300, 30), (600, 60), (86_400, 60)])
def test_lines_come_less_often_in_a_long_run(spent_s: float, pause_s: float) -> None:
    assert pause_after(spent_s) == pause_s


def test_lines_come_while_the_work_goes_on_and_end_with_it(log: Log) -> None:
    words = ["first"]
    with ProgressLines("prorl eval", lambda: words[0], lambda _: 0.001):
        until(lambda: lines(log).count("prorl eval: first, after N s") > 1, "two lines")
        words[0] = HOSTILE
        until(lambda: "step 3" in log.getvalue(), "the new text")
    assert "progress" not in {thread.name for thread in threading.enumerate()}
    assert "\\x1b[2J\\x1b]0;owned\\x07[red]step 3\\u202e, after" in log.getvalue()


def test_a_closed_log_ends_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    with ProgressLines("prorl eval", lambda: "at work", lambda _: 0.001) as printed:
        until(lambda: not printed.running, "the end of the lines")


def test_an_error_of_the_work_ends_its_lines(log: Log) -> None:
    progress = Progress("prorl eval", "", counted="rollouts", total=4)
    with pytest.raises(RuntimeError), progress:
        fail(progress)
    assert lines(log) == ["prorl eval: 2 of 4 rollouts, pass@1 0.5, after N s"]
    assert "progress" not in {thread.name for thread in threading.enumerate()}


def test_rollouts_are_counted_from_those_that_were_there(log: Log) -> None:
    with Progress("prorl eval", "", counted="rollouts", total=4, completed=1) as progress:
        progress.update("waiting for the engine")
        progress.update(HOSTILE, advance=1)
    assert log.getvalue().startswith("prorl eval: 2 of 4 rollouts, \\x1b[2J")
    with Progress("prorl submit", "", counted="rollouts") as progress:
        progress.update("", advance=3)
    assert lines(log)[-1] == "prorl submit: 3 rollouts, after N s"


def test_short_work_prints_nothing_into_a_log(log: Log) -> None:
    with Progress("prorl image") as work:
        work.update(HOSTILE)
    assert log.getvalue() == ""


def test_a_table_in_a_log_has_no_escape_codes(log: Log) -> None:
    console(stderr=True).print("text", style="bold red")
    assert log.getvalue() == "text\n"
