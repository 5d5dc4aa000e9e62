"""What a trace and a result say together of one job."""

from __future__ import annotations

import pytest

from prorl_zmq.errors import ErrorInfo
from prorl_zmq.explain.parts import OWN_CODE
from prorl_zmq.explain.rollout import EngineCall, rollout_of, within
from prorl_zmq.wire.messages.front_door import JobTrace, Span
from prorl_zmq.wire.messages.jobs import Outcome, Phase, Result, Step, StepTokens

LOST = ErrorInfo("lease_lost", "run was lost")


def spans(*stays: tuple[Phase, int, float, float, float | None], lost: int = -1) -> tuple[Span, ...]:
    """Return spans of (phase, attempt, queued, began, ended); the stay `lost` ended with an error."""
    made: list[Span] = []
    for number, (phase, attempt, queued_s, began_s, ended_s) in enumerate(stays):
        made.append(Span(phase=phase, place="queued", attempt=attempt, start_s=queued_s, end_s=began_s))
        error = LOST if number == lost else None
        where = {"node": "gpu-7", "stage_id": f"{phase}-1", "backends": ("e-0", "e-1") if phase == Phase.RUN else ()}
        made.append(
            Span(phase=phase, place="held", attempt=attempt, start_s=began_s, end_s=ended_s, error=error, **where)
        )
    return tuple(made)


def trace(made: tuple[Span, ...], *, ended_s: float | None) -> JobTrace:
    outcome = Outcome.COMPLETED if ended_s is not None else None
    told = {"outcome": outcome, "ended_s": ended_s, "task": "t"} if outcome else {}
    return JobTrace("r", job_id="job-1", accepted_at=1000.0, age_s=20.0, spans=made, **told)


TOKENS = StepTokens(100, 20, 70, 5)
THREE = spans((Phase.INIT, 1, 0.0, 1.0, 2.0), (Phase.RUN, 1, 2.0, 2.5, 8.5), (Phase.EVAL, 1, 8.5, 8.5, 9.0))


def test_run_is_divided_by_its_timings() -> None:
    timings = {"init": 1.0, "init_queue": 1.0, "run": 6.0, "engine": 3.0, "tool.bash": 2.0, "chat": 0.5, "eval": 0.5}
    result = Result(
        job_id="job-1",
        task="t",
        outcome=Outcome.COMPLETED,
        timings=timings,
        metrics={"generated_tokens": 50.0},
        steps=(Step("engine", 1, 0.0, 1.0, TOKENS), Step("tool.bash", 1, 1.0, 1.9), Step("engine", 2, 3.0, 1.0)),
    )
    found = rollout_of(trace(THREE, ended_s=9.0), result)

    init, run, evaluation = found.works
    assert (init.queued_at, init.began, init.ended) == (1000.0, 1001.0, 1002.0)
    assert run.parts == {"engine": 3.0, "tool.bash": 2.0, "chat": 0.5, OWN_CODE: pytest.approx(0.5)}
    assert (run.node, run.backend) == ("gpu-7", "e-1")
    assert evaluation.parts == {"EVAL": 0.5}
    assert found.divided
    assert (found.tokens, found.ended, found.worked_s) == (50, 1009.0, 7.5)
    assert found.longest == Step("tool.bash", 1, 1.0, 1.9)
    assert run.calls == (EngineCall(1002.5, 1003.5, TOKENS),)
    assert found.again_tokens == (70, 100)


def test_timings_of_what_went_at_the_same_time_fit_into_run() -> None:
    result = Result(job_id="job-1", task="t", outcome=Outcome.COMPLETED, timings={"engine": 18.0, "tool.task": 6.0})
    run = rollout_of(trace(THREE, ended_s=9.0), result).works[1]
    assert run.parts == {"engine": pytest.approx(4.5), "tool.task": pytest.approx(1.5), OWN_CODE: 0.0}


def test_without_a_result_run_is_one_part() -> None:
    found = rollout_of(trace(THREE, ended_s=9.0))
    assert found.works[1].parts == {"RUN": 6.0}
    assert not found.divided


def test_a_lost_run_is_done_again_from_init() -> None:
    made = spans(
        *((Phase.INIT, 1, 0.0, 0.0, 1.0), (Phase.RUN, 1, 1.0, 1.0, 5.0)),
        *((Phase.INIT, 2, 5.0, 5.0, 6.0), (Phase.RUN, 2, 6.0, 6.0, 9.0), (Phase.EVAL, 2, 9.0, 9.0, 10.0)),
        lost=1,
    )
    result = Result(job_id="job-1", task="t", outcome=Outcome.COMPLETED, timings={"engine": 2.0})
    found = rollout_of(trace(made, ended_s=10.0), result)
    assert [work.lost for work in found.works] == ["lease_lost", "lease_lost", "", "", ""]
    assert [work.failed for work in found.works] == [False, True, False, False, False]
    assert found.works[1].parts == {"RUN": 4.0}
    assert found.works[3].parts["engine"] == 2.0
    assert found.worked_s == 5.0


def test_a_lost_eval_is_done_again_alone() -> None:
    made = spans(
        *((Phase.INIT, 1, 0.0, 0.0, 1.0), (Phase.RUN, 1, 1.0, 1.0, 5.0)),
        *((Phase.EVAL, 1, 5.0, 5.0, 6.0), (Phase.EVAL, 2, 6.0, 6.0, 7.0)),
        lost=2,
    )
    found = rollout_of(trace(made, ended_s=7.0))
    assert [work.lost for work in found.works] == ["", "", "lease_lost", ""]


def test_what_has_not_ended_lasts_until_now() -> None:
    running = rollout_of(trace(THREE[:3] + spans((Phase.RUN, 1, 2.0, 2.5, None))[1:], ended_s=None))
    assert (running.ended, running.works[-1].ended) == (None, 1020.0)

    waiting = rollout_of(
        trace((*THREE[:2], Span(phase=Phase.RUN, place="queued", attempt=1, start_s=2.0)), ended_s=None)
    )
    assert waiting.waits == (Phase.RUN, 1002.0)
    assert len(waiting.works) == 1


def test_of_a_rollout_the_part_within_a_time() -> None:
    """INIT lasts from 1000 to 1001, RUN to 1003, EVAL to 1004: see `THREE`."""
    whole = rollout_of(trace(THREE, ended_s=4.0))
    assert within(whole, 0.0, 2000.0) == whole
    middle = within(whole, whole.works[0].began + 0.25 * whole.works[0].seconds, whole.works[1].began + 0.5)
    assert [work.phase for work in middle.works] == [Phase.INIT, Phase.RUN]
    assert middle.accepted == middle.works[0].began == middle.works[0].queued_at
    assert middle.works[0].seconds == pytest.approx(0.75 * whole.works[0].seconds)
    assert all(sum(work.parts.values()) == pytest.approx(work.seconds) for work in middle.works)
    assert (middle.ended, middle.outcome, middle.cut_off) == (middle.works[-1].ended, None, True)
    assert (whole.outcome, whole.cut_off) == (Outcome.COMPLETED, False)
    assert middle.works[-1].seconds == pytest.approx(0.5)


def test_what_goes_on_has_still_not_ended_within_a_time_that_does() -> None:
    waiting = rollout_of(
        trace((*THREE[:2], Span(phase=Phase.RUN, place="queued", attempt=1, start_s=2.0)), ended_s=None)
    )
    cut = within(waiting, 1003.0)
    assert (cut.ended, cut.accepted, cut.works, cut.waits) == (None, 1003.0, (), (Phase.RUN, 1003.0))
