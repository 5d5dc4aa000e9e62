"""What is noted of the time that an episode takes."""

from __future__ import annotations

import time

import pytest

from prorl_zmq.stages.episode import Episode
from prorl_zmq.wire.messages.jobs import STEPS_LIMIT


def test_what_took_time_is_a_step_and_the_timings_are_the_sums() -> None:
    began = time.monotonic() - 10.0
    record = Episode(began=began)
    record.spent("chat", time.monotonic())  # too short to be told
    record.metrics["turns"] = 1
    record.spent("engine", began + 6.0)
    record.spent("tool.bash", began + 9.0)
    record.metrics["turns"] = 2
    record.spent("engine", began + 9.5)
    assert [(step.name, step.turn, round(step.start_s, 3)) for step in record.steps] == [
        ("engine", 1, 6.0),
        ("tool.bash", 1, 9.0),
        ("engine", 2, 9.5),
    ]
    assert [step.seconds for step in record.steps] == pytest.approx([4.0, 1.0, 0.5], abs=0.5)
    engine = [step.seconds for step in record.steps if step.name == "engine"]
    assert record.timings["engine"] == pytest.approx(sum(engine))
    assert set(record.timings) == {"chat", "engine", "tool.bash"}


def test_the_steps_of_an_endless_episode_are_bounded_and_its_timings_go_on() -> None:
    record = Episode(began=time.monotonic() - 10.0)
    for _ in range(STEPS_LIMIT + 5):
        record.spent("engine", record.began)
    assert len(record.steps) == STEPS_LIMIT
    assert record.timings["engine"] >= 10.0 * (STEPS_LIMIT + 5)
