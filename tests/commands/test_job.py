"""How the trace of a job looks in a terminal, and as JSON."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import msgspec
import pytest
from rich.console import Console
from support.commands import prorl

from prorl_zmq import RolloutClient
from prorl_zmq.commands.job import BAR, bar, duration, json_text, layout
from prorl_zmq.errors import ErrorInfo, UnknownJob
from prorl_zmq.wire.messages.front_door import JobTrace, Span
from prorl_zmq.wire.messages.jobs import Outcome, Phase

if TYPE_CHECKING:
    from pathlib import Path

LOST = ErrorInfo(
    "lease_lost", "run was lost with its stage process run-1, which fell silent: it hangs, or its link is cut"
)
TRACE = JobTrace(
    "request",
    job_id="job-1",
    accepted_at=1_800_000_000.25,
    age_s=300.0,
    spans=(
        Span(phase=Phase.INIT, place="queued", attempt=1, start_s=0.0, end_s=0.5),
        Span(phase=Phase.INIT, place="held", attempt=1, start_s=0.5, end_s=2.0, stage_id="init-1", node="gpu-7"),
        Span(phase=Phase.RUN, place="queued", attempt=1, start_s=2.0, end_s=2.0),
        Span(
            phase=Phase.RUN,
            place="held",
            attempt=1,
            start_s=2.0,
            end_s=100.0,
            stage_id="run-1",
            node="gpu-7",
            backends=("engine-0", "engine-1"),
            error=LOST,
        ),
        Span(phase=Phase.INIT, place="queued", attempt=2, start_s=100.0, end_s=101.0),
        Span(phase=Phase.INIT, place="held", attempt=2, start_s=101.0, stage_id="init-1", node="gpu-7"),
    ),
    restarts=(50.0,),
)


def shown(trace: JobTrace, width: int = 80) -> list[str]:
    screen = io.StringIO()
    Console(file=screen, width=width).print(layout(trace, width))
    return [line.rstrip() for line in screen.getvalue().splitlines()]


def test_a_lost_attempt_is_seen_with_where_and_why() -> None:
    lines = shown(TRACE, 200)
    assert lines[0] == "job job-1"
    assert lines[1].startswith("accepted 2027-01-1")
    assert lines[2] == "has not ended after 5 min 0 s"
    assert lines[4].split() == ["after", "for", "state", "try", "timeline", "where"]
    rows = [" ".join(line.replace("█", "").replace("░", "").split()) for line in lines[5:12]]
    assert rows == [
        "0.000 s 0.500 s INIT queued 1",
        "0.500 s 1.500 s INIT held 1 init-1 on gpu-7",
        "2.000 s 0.000 s RUN queued 1",
        "2.000 s 1 min 38 s RUN held 1 run-1 on gpu-7, backend engine-0, then engine-1",
        "50.0 s the broker was restarted",
        "1 min 40 s 1.000 s INIT queued 2",
        "1 min 41 s 3 min 19 s … INIT held 2 init-1 on gpu-7",
    ]
    assert lines[13:] == [f"RUN of try 1, run-1: lease_lost: {LOST.message}"]


def test_the_model_of_a_job_is_named_unless_it_is_the_policy() -> None:
    assert shown(TRACE)[0] == "job job-1"
    assert shown(msgspec.structs.replace(TRACE, task="game", model="b"))[0] == "job job-1, task game, model b"


def test_it_fits_a_terminal_of_80_columns() -> None:
    long = msgspec.structs.replace(TRACE.spans[3], stage_id="run-0123456789ab", node="n" * 128)
    lines = shown(msgspec.structs.replace(TRACE, spans=(*TRACE.spans[:3], long, *TRACE.spans[4:])))
    assert max(map(len, lines)) <= 80
    assert any("run-0123456789ab on" in line for line in lines)


def test_the_end_of_a_job_is_told() -> None:
    ended = msgspec.structs.replace(
        TRACE, outcome=Outcome.COMPLETED, ended_s=200.0, reward=0.5, tokens=70, turns=3, task="math", group_id="g"
    )
    lines = shown(ended)
    assert lines[0] == "job job-1, task math, group g"
    assert lines[2] == "completed after 3 min 20 s, reward 0.5, 70 tokens"
    assert lines[3] == "not collected yet"
    assert shown(msgspec.structs.replace(ended, collected_s=201.0))[3] == "collected after 3 min 21 s"
    lost = shown(msgspec.structs.replace(ended, outcome=Outcome.INFRASTRUCTURE_ERROR, reward=None, error=LOST), 200)
    assert lost[2] == "infrastructure_error after 3 min 20 s, 70 tokens"
    assert lost[3] == f"lease_lost: {LOST.message}"


def test_text_from_elsewhere_is_neither_markup_nor_control() -> None:
    error = ErrorInfo("failed", "[bold]\x1b[31m\nred[/bold]")
    spans = (msgspec.structs.replace(TRACE.spans[0], error=error),)
    text = "\n".join(shown(msgspec.structs.replace(TRACE, spans=spans, restarts=()), 200))
    assert "INIT of try 1: failed: [bold]\\x1b[31m\\nred[/bold]" in text


def test_a_history_without_its_middle_says_so() -> None:
    assert shown(msgspec.structs.replace(TRACE, left_out=12))[-1].startswith("12 events in the middle are not kept")


@pytest.mark.parametrize(
    ("start_s", "end_s", "filled"),
    [(0.0, 10.0, (0, BAR)), (0.0, 0.001, (0, 1)), (5.0, 7.5, (6, 9)), (10.0, 10.0, (11, 12)), (9.0, None, (10, 12))],
)
def test_a_bar_is_where_its_span_is(start_s: float, end_s: float | None, filled: tuple[int, int]) -> None:
    span = Span(phase=Phase.RUN, place="held", attempt=1, start_s=start_s, end_s=end_s)
    first, last = filled
    assert bar(span, 10.0, BAR) == " " * first + "█" * (last - first)
    assert len(bar(span, 0.0, BAR)) in (1, BAR)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.000 s"),
        (9.9, "9.900 s"),
        (59.9, "59.9 s"),
        (61.2, "1 min 1 s"),
        (3600.0, "1 h 0 min"),
        (90061, "25 h 1 min"),
    ],
)
def test_a_time_has_about_three_digits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_json_has_every_field() -> None:
    content = json.loads(json_text(TRACE))
    assert set(content) == set(JobTrace.__struct_fields__) - {"request_id"}
    assert content["outcome"] is None
    assert set(content["spans"][0]) == set(Span.__struct_fields__)
    assert content["spans"][3]["error"]["code"] == "lease_lost"


def test_json_is_harmless_in_a_terminal() -> None:
    """It printed what reorders a line on the screen, and C1 controls, as they were."""
    text = "\x1b[31m\x7f\x9b\u202e\u2066é"
    shown = json_text(msgspec.structs.replace(TRACE, error=ErrorInfo("failed", text)))
    assert shown.isascii()
    assert shown.isprintable()
    assert json.loads(shown)["error"]["message"] == text


@pytest.mark.parametrize("job_id", ["", "a b", "a:b", "-a", "x" * 65])
def test_what_cannot_be_an_id_is_said_in_words(job_id: str) -> None:
    """The service's answer was its regular expression."""
    with RolloutClient("ipc:///nowhere") as client:
        for ask in (client.trace, client.cancel):
            with pytest.raises(UnknownJob, match=r"a job id is 1 to 64 letters, digits and `\._-`"):
                ask(job_id)


def test_service_that_is_not_there(tmp_path: Path) -> None:
    done = prorl("job", "a b", "--connect", "tcp://nowhere", cwd=tmp_path)
    assert done.returncode == 2
    assert "tcp://HOST:PORT" in done.stderr
