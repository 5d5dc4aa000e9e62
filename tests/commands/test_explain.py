"""`prorl explain` of folders, and how an explanation looks in a terminal. Services: `tests/service/test_explain.py`."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest
from rich.console import Console

from prorl_zmq.client.trace_log import TRACES, TraceLine
from prorl_zmq.commands.app import run
from prorl_zmq.commands.explain import job_layout, layout, unfinished
from prorl_zmq.explain.diagnosis import diagnose
from prorl_zmq.explain.one_job import explain_job
from prorl_zmq.explain.recording import Recording
from prorl_zmq.wire.messages.front_door import JobTrace, ServiceStatus, Span, StageStatus
from prorl_zmq.wire.messages.jobs import Outcome, Phase, Result

from ..explain.recordings import USUAL, passing, recording

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = "\x1b[31m\u202e[bold]bad[/bold]\n"
STATUS = ServiceStatus("r", stages=tuple(StageStatus(phase, phase, "n", 2, 0) for phase in Phase))


def trace(number: int, task: str = "t") -> JobTrace:
    """A job whose EVAL takes a second, at one of two slots."""
    at = number // 2
    spans = []
    for phase, queued_s, began_s, ended_s in (
        (Phase.INIT, 0.0, 0.0, 0.1),
        (Phase.RUN, 0.1, 0.1, 0.3),
        (Phase.EVAL, 0.3, 0.3 + at, 1.3 + at),
    ):
        spans.append(Span(phase=phase, place="queued", attempt=1, start_s=queued_s, end_s=began_s))
        spans.append(Span(phase=phase, place="held", attempt=1, start_s=began_s, end_s=ended_s, node="n"))
    return JobTrace(
        "r",
        job_id=f"job-{number}",
        accepted_at=1000.0,
        age_s=60.0,
        spans=tuple(spans),
        outcome=Outcome.COMPLETED,
        ended_s=1.3 + at,
        task=task,
    )


def folder(path: Path, lines: bytes) -> Path:
    results = [
        Result(job_id=f"job-{n}", task="t", outcome=Outcome.COMPLETED, timings={"engine": 0.1, "run": 0.2})
        for n in range(20)
    ]
    (path / "results.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in results))
    (path / TRACES).write_bytes(lines)
    return path


def written(*lines: TraceLine) -> bytes:
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


WHOLE = written(TraceLine(began=1.0), TraceLine(status=STATUS), *(TraceLine(trace=trace(n)) for n in range(20)))


def test_a_folder_of_prorl_submit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("prorl", ["explain", str(folder(tmp_path, WHOLE)), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["finding"]["kind"], found["finding"]["name"], found["rollouts"]) == ("slots", "EVAL", 20)
    assert found["took_s"] == pytest.approx(10.3)
    assert found["stages"][2]["slots"] == 2


def test_torn_lines_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torn = WHOLE + WHOLE[-100:-30] + b"\n" + WHOLE[-100:-50]
    assert run("prorl", ["explain", str(folder(tmp_path, torn))]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 lines of traces.jsonl are damaged and left out." in shown
    assert shown.startswith("EVAL has too few slots, which bounded this run: it is")


def test_some_rollouts_without_traces_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some = b"".join(WHOLE.splitlines(keepends=True)[:14])
    assert run("prorl", ["explain", str(folder(tmp_path, some)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == [
        "of 20 rollouts, 12 are explained: of the others there are no traces"
    ]


def test_without_traces_it_says_what_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("prorl", ["explain", str(folder(tmp_path, b""))]) == 0
    shown = capsys.readouterr().out
    assert "what waited for what is not known" in " ".join(shown.split())
    assert "engine" in shown
    assert run("prorl", ["explain", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean_s"] == pytest.approx({"engine": 0.1, "run": 0.2})


def test_damage_is_said_where_nothing_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("prorl", ["explain", str(folder(tmp_path, b"[]\nnull\n")), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sentences"][1] == "2 lines of traces.jsonl are damaged and left out."


@pytest.mark.parametrize("lines", [b"", WHOLE])
def test_a_folder_of_no_rollouts_yet(lines: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder(tmp_path, lines) / "results.jsonl").write_bytes(b"")
    assert run("prorl", ["explain", str(tmp_path)]) == 2
    assert "has no rollouts yet" in capsys.readouterr().err


def test_a_folder_that_is_none_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("prorl", ["explain", str(tmp_path)]) == 2
    assert "is not a folder of `prorl eval` or `prorl submit --out`" in capsys.readouterr().err


def lines_of(shown: object) -> list[str]:
    screen = io.StringIO()
    Console(file=screen, width=80).print(shown)
    return screen.getvalue().splitlines()


def test_it_fits_80_columns_and_text_of_tasks_is_only_text() -> None:
    good = passing([(0.0, USUAL)] * 10, node=f"n{HOSTILE}")
    bad = passing([(0.0, {**USUAL, f"tool.{HOSTILE}": 2.0})] * 10, task=f"task-{HOSTILE}", node=f"m{HOSTILE}")
    explanation = diagnose(recording(good, bad), "this run")
    assert explanation.finding.name == f"task-{HOSTILE}"
    job = explain_job(replace(bad[0], task="t"), good)
    for lines in (lines_of(layout(explanation)), lines_of(job_layout(job))):
        assert max(map(len, lines)) <= 80
        assert not any(character in "\n".join(lines) for character in "\x1b\u202e")
        assert any("[bold]" in line for line in lines)


def test_what_goes_on_is_said_of_the_oldest() -> None:
    made = passing([(0.0, {"INIT": 0.1, "engine": 5.0})] * 3)
    going_on = [replace(one, ended=None, works=one.works[:2], outcome=None, seen=5.1) for one in made]
    waits = replace(going_on[0], job_id="w", accepted=1.0, works=(), waits=(Phase.INIT, 1.0))
    assert unfinished(Recording((*going_on[:2], waits), {}, 5.1)) == [
        "job t-n-b-0 is in RUN on node n, backend b for 5.000 s",
        "job t-n-b-1 is in RUN on node n, backend b for 5.000 s",
        "job w has waited for INIT for 4.100 s",
    ]
