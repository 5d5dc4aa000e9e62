"""What a phase's end looks like on the wire, whatever the task's own code gave: the broker can always read it."""

from __future__ import annotations

from typing import Any

import pytest

from prorl_zmq.errors import ErrorInfo, HandlerFailed
from prorl_zmq.stages.phase_runner import checked, readable
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.base import METRICS_LIMIT, SEGMENTS_LIMIT
from prorl_zmq.wire.messages.jobs import Outcome, Phase
from prorl_zmq.wire.messages.stages import PhaseDone, PhaseFailed

EVENT: dict[str, Any] = {"stage_id": "s", "job_id": "j", "attempt": 1}
SHORT = ErrorInfo("handler_failed", "no")


def failed(error: Any = SHORT, **more: Any) -> PhaseFailed:
    return PhaseFailed(**EVENT, phase=Phase.RUN, outcome=Outcome.FAILED, error=error, **more)


def test_an_event_in_good_order_is_left_alone() -> None:
    event = failed(ErrorInfo("mine", "no", {"line": 3, "why": None}), metrics={"a": 1.0}, tokens=3, turns=1)
    assert readable(event) == event


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        ({str(number): 1.0 for number in range(100_000)}, "eval gave 100000 metrics; at most 512 can be passed on"),
        ({"x" * 1000: 1.0}, "eval gave something that cannot be passed on: Expected `str` of length <= 128"),
    ],
)
def test_metrics_beyond_the_limit_are_the_handlers_error(metrics: dict[str, float], problem: str) -> None:
    with pytest.raises(HandlerFailed, match=problem):
        checked(PhaseDone(**EVENT, phase=Phase.EVAL, reward=1.0, metrics=metrics))


def test_as_many_metrics_as_are_allowed_pass() -> None:
    event = PhaseDone(**EVENT, phase=Phase.EVAL, reward=1.0, metrics={str(n): 1.0 for n in range(METRICS_LIMIT)})
    assert checked(event) == event


@pytest.mark.parametrize(
    "error",
    [
        ErrorInfo("c" * 1000, "m" * 4_000_000, {f"{n:03d}" + "k" * 1000: "v" * 100_000 for n in range(100)}),
        ErrorInfo("mine", "\ud800"),
        ErrorInfo(None, "no"),  # type: ignore[arg-type]
        ErrorInfo("mine", "no", {"a": [1]}),  # type: ignore[dict-item]
        None,
    ],
)
def test_an_error_of_any_kind_is_told_in_short(error: Any) -> None:
    event = readable(failed(error, metrics={"a": 1.0}, tokens=3, turns=1))
    frame = codec.encode(event)
    assert len(frame) < 300_000
    assert codec.decode(frame, PhaseFailed) == event
    assert (event.tokens, event.metrics) == (3, {"a": 1.0})


@pytest.mark.parametrize(
    "record", [{"timings": {f"tool.{n}": 1.0 for n in range(1000)}}, {"segments": (1,) * (SEGMENTS_LIMIT + 1)}]
)
def test_a_record_that_is_too_large_is_left_out(record: dict[str, Any]) -> None:
    event = readable(failed(tokens=3, turns=1, **record))
    assert event == failed()
    assert codec.decode(codec.encode(event), PhaseFailed) == event
