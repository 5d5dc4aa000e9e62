from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch", reason="the example needs torch: install the extra `train`")

from prorl_zmq.examples.train_torch.learner import LearnStats
from prorl_zmq.examples.train_torch.plot import draw
from prorl_zmq.examples.train_torch.records import (
    STEPS,
    BatchRecord,
    Exam,
    StepRecord,
    append_step,
    measure_overlap,
    read_steps,
)

if TYPE_CHECKING:
    from pathlib import Path

STATS = LearnStats(
    tokens=100,
    generated_tokens=50,
    loss=0.1,
    gradient_norm=0.2,
    clipped_low=0.0,
    clipped_high=0.01,
    entropy=0.3,
    kl_behaviour=0.001,
    kl_warm=0.1,
    effective_share=0.99,
    staleness_mean=1.2,
    staleness_max=2,
    logprob_gap=1e-6,
)


def batch(rollouts: int, opened_s: float, met_s: float) -> BatchRecord:
    return BatchRecord(
        reward=0.5,
        rollouts=rollouts,
        kept_groups=8,
        dropped_groups=1,
        unused_rollouts=0,
        opened_s=opened_s,
        met_s=met_s,
    )


def step(number: int, rollouts: int = 60, step_s: float = 6.0) -> StepRecord:
    return StepRecord(
        step=number,
        batch=batch(rollouts, 10.0 * number, 10.0 * number + 5),
        learn_from_s=10.0 * number + 6,
        learned_s=10.0 * number + 8,
        pushed_s=10.0 * number + 8.5,
        wait_s=0.0,
        learn_s=2.0,
        step_s=step_s,
        stats=STATS,
    )


def test_overlap_compares_the_last_steps_with_as_many_rollouts_alone() -> None:
    steps = [step(0, step_s=100.0), step(1, 50, 5.0), step(2, 70, 7.0)]
    alone = [batch(80, 0.0, 8.0), batch(40, 20.0, 24.0)]  # 0.1 s each
    overlap = measure_overlap(steps, alone, [3.0, 5.0])
    assert overlap is not None
    assert (overlap.steps, overlap.step_s, overlap.rollouts_per_step) == (2, 6.0, 60.0)
    assert (overlap.rollout_alone_s, overlap.learn_alone_s) == (pytest.approx(6.0), 4.0)
    assert (overlap.ratio, overlap.serial_ratio) == (pytest.approx(1.0), pytest.approx(10 / 6))
    longer_learning = measure_overlap(steps, alone, [12.0])
    assert longer_learning is not None
    assert longer_learning.ratio == pytest.approx(0.5)


def test_nothing_measured_is_no_overlap() -> None:
    assert measure_overlap([step(0)], [], [1.0]) is None
    assert measure_overlap([step(0)], [batch(1, 0, 1)], []) is None


def test_steps_that_will_be_made_again_are_dropped(tmp_path: Path) -> None:
    assert read_steps(tmp_path, 0) == []
    for number in range(4):
        append_step(tmp_path, step(number))
    assert read_steps(tmp_path, 3) == [step(0), step(1), step(2)]
    lines = (tmp_path / STEPS).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]


def test_a_picture_of_any_number_of_steps(tmp_path: Path) -> None:
    tests = [Exam(step=0, reward={"math": 0.2, "shell": 0.0}), Exam(step=5, reward={"math": 0.5})]
    for count in (0, 1, 20):
        draw([step(number) for number in range(count)], tests, count, tmp_path / "picture.png")
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
