"""Figures for trackers: what of a report and of rollouts becomes which name."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.data.trajectory import Role, Trajectory
from prorl_zmq.data.trajectory_builder import TrajectoryBuilder
from prorl_zmq.trackers import batch_values, rollout_values
from prorl_zmq.trackers.values import NAME_CHARACTERS, NAMES, loggable
from prorl_zmq.wire.messages.batches import BatchReport, Distribution, GivenUpGroup, RolloutDistribution
from prorl_zmq.wire.messages.jobs import Outcome, Result


def rollout(outcome: Outcome, reward: float | None, versions: list[int], **more: dict[str, float]) -> Trajectory:
    builder = TrajectoryBuilder()
    builder.begin_turn(Role.ASSISTANT)
    count = len(versions)
    builder.add_generated(np.arange(count, dtype=np.int32), np.zeros(count, np.float32), np.array(versions, np.int32))
    result = Result(job_id="a", task="t", outcome=outcome, reward=reward, tokens=count, turns=1, **more)
    return Trajectory.from_frame(result, builder.block())


def test_a_report_is_flat_and_keeps_its_zeros() -> None:
    report = BatchReport(
        launched=40,
        completed=32,
        given_up_groups=1,
        given_up=(GivenUpGroup("p", {"timeout": 3}),),
        wasted={"stale": 3, "not_needed": 5},
        wasted_s={"stale": 1.5},
        kept=RolloutDistribution(reward=Distribution(count=16, mean=0.5, most=1.0, p50=0.5, p90=1.0)),
    )
    values = batch_values(report)
    assert values["batch/launched"] == 40
    assert values["batch/completed"] == 32
    assert values["batch/failed"] == 0
    assert values["batch/given_up_groups"] == 1
    assert values["batch/wasted/stale"] == 3
    assert values["batch/wasted/not_needed"] == 5
    assert values["batch/wasted_s/stale"] == 1.5
    assert values["batch/kept/reward/mean"] == 0.5
    assert values["batch/dropped/seconds/p90"] == 0
    assert not any("given_up/" in name for name in values)
    assert loggable(values) == values


def test_rollouts_have_rewards_staleness_and_seconds() -> None:
    rollouts = [
        rollout(Outcome.COMPLETED, 1.0, [3, 4], timings={"run": 2.0, "engine": 1.0, "tool.bash": 0.5}),
        rollout(Outcome.COMPLETED, 0.0, [4], timings={"run": 4.0}, metrics={"turns": 2.0}),
        rollout(Outcome.TIMEOUT, None, []),
    ]
    values = rollout_values(rollouts, weight_version=5)
    assert values["rollouts/count"] == 3
    assert values["rollouts/completed"] == 2
    assert values["rollouts/timeout"] == 1
    assert values["rollouts/cancelled"] == 0
    assert values["reward/mean"] == 0.5
    assert (values["staleness/mean"], values["staleness/most"]) == (1.5, 2)
    assert values["seconds/run"] == 3.0
    assert values["seconds/tool.bash"] == 0.5
    assert values["metrics/turns"] == 2.0
    assert values["tokens/mean"] == 1.0
    assert not any(name.startswith("staleness") for name in rollout_values(rollouts))


def test_no_rollouts_have_no_means() -> None:
    values = rollout_values([], 0)
    assert values.pop("rollouts/count") == 0
    assert set(values.values()) == {0.0}


@given(st.dictionaries(st.text(), st.floats() | st.integers(-(2**60), 2**60), max_size=NAMES + 20))
def test_what_is_logged_suits_every_tracker(values: dict[str, float]) -> None:
    logged = loggable(values)
    assert len(logged) <= NAMES
    assert all(math.isfinite(value) for value in logged.values())
    for name in logged:
        assert len(name) <= NAME_CHARACTERS
        assert all(letter.isascii() and (letter.isalnum() or letter in "_./-") for letter in name)


@pytest.mark.parametrize(("name", "logged"), [("seconds/tool.<img>", "seconds/tool._img_"), ("pass@1", "pass_1")])
def test_other_characters_are_replaced(name: str, logged: str) -> None:
    assert loggable({name: 1}) == {logged: 1.0}
