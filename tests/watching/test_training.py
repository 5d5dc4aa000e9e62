"""The steps of trainings, from the batches that were closed and from when weights changed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.watching.training import trainings
from prorl_zmq.wire.messages.watching import BatchStep, StepList

FIGURES: dict[str, Any] = {
    "weight_version": 3,
    "groups": 2,
    "rollouts": 8,
    "failed": 1,
    "reward": 0.5,
    "tokens": 100.0,
    "tokens_p90": 180.0,
    "seconds": 9.0,
    "staleness": 0.25,
    "staleness_most": 1.0,
}


def batch(opened: float | None, ended: float, had: float, session: str = "grpo", **more: Any) -> BatchStep:
    times = {"opened_at": opened, "began_at": opened, "ended_at": ended, "served_at": had, "closed_at": had + 0.5}
    return BatchStep(**{"batch_id": f"b-{had:g}", "session": session, **FIGURES, **times, **more})


def shares(steps: list[BatchStep], *weights: float) -> list[tuple[float | None, ...]]:
    """What became of the time of each step: its length, rollouts' share, the trainer's, and that of both."""
    listed = StepList("r", steps=tuple(steps), weights=tuple(enumerate(weights)))
    (training,) = trainings({"rollout": listed})
    return [(one.step_s, one.rollouts_share, one.trainer_share, one.overlap) for one in training.steps]


def test_a_trainer_that_waits_for_its_rollouts_overlaps_nothing() -> None:
    steps = [batch(0.0, 10.0, 10.0), batch(15.0, 24.0, 25.0), batch(30.0, 40.0, 40.0)]
    assert shares(steps, 15.0, 30.0) == [
        (10.0, 1.0, 0.0, 0.0),
        pytest.approx((15.0, 9 / 15, 5 / 15, 0.0)),
        pytest.approx((15.0, 10 / 15, 5 / 15, 0.0)),
    ]


def test_a_trainer_that_learns_while_the_next_batch_runs_overlaps() -> None:
    steps = [batch(0.0, 10.0, 10.0), batch(10.0, 18.0, 20.0), batch(20.0, 30.0, 30.0)]
    assert shares(steps, 16.0, 26.0) == [
        (10.0, 1.0, 0.0, 0.0),
        pytest.approx((10.0, 0.8, 0.6, 0.6)),
        pytest.approx((10.0, 1.0, 0.6, 0.6)),
    ]


def test_a_batch_without_prompts_does_not_work() -> None:
    steps = [batch(0.0, 10.0, 10.0), batch(10.0, 20.0, 20.0, began_at=15.0)]
    assert shares(steps, 14.0)[1] == pytest.approx((10.0, 0.5, 0.4, 0.0))


def test_what_is_not_known_is_left_out() -> None:
    assert shares([batch(None, 10.0, 10.0), batch(10.0, 20.0, 20.0)]) == [
        (None, None, None, None),
        (10.0, 1.0, None, None),
    ]


def test_sessions_are_trainings_and_batches_without_rollouts_no_steps() -> None:
    listed = StepList("r", steps=(batch(0, 1, 1), batch(0, 2, 2, "other"), batch(0, 3, 3, rollouts=0)))
    found = trainings({"rollout-0": listed, "rollout-1": StepList("r", steps=(batch(0, 9, 9, "third"),))})
    assert [(one.session, one.broker, len(one.steps)) for one in found] == [
        ("third", "rollout-1", 1),
        ("other", "rollout-0", 1),
        ("grpo", "rollout-0", 1),
    ]
    (step,) = found[0].steps
    assert {name: getattr(step, name) for name in FIGURES} == FIGURES


TIMES = st.lists(st.integers(0, 60).map(float), min_size=0, max_size=20).map(sorted)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12), TIMES)
def test_shares_are_those_of_a_clock_that_looks_each_tenth_of_a_second(
    drawn: list[tuple[int, int, int]], changes: list[float]
) -> None:
    steps = [
        batch(float(at), float(at + runs), at + runs + waits + place / 100)
        for place, (at, runs, waits) in enumerate(drawn)
    ]
    steps.sort(key=lambda one: one.served_at or 0.0)
    had = [one.served_at or 0.0 for one in steps]
    starts = [steps[0].opened_at or 0.0, *(one for one, _ in pairwise(had))]
    for step, start, end in zip(shares(steps, *changes), starts, had, strict=True):
        if step[2] is None or end - start < 1.0:
            continue
        times = [start + (end - start) * (index + 0.5) / 400 for index in range(400)]

        def rolls(at: float) -> bool:
            return any((one.opened_at or 0.0) <= at < (one.ended_at or 0.0) for one in steps)

        def learns(at: float) -> bool:
            return any(one <= at < min((change for change in changes if change > one), default=one) for one in had)

        seen = [sum(map(rolls, times)), sum(map(learns, times)), sum(rolls(at) and learns(at) for at in times)]
        assert [one / 400 for one in seen] == pytest.approx(step[1:], abs=0.05)
