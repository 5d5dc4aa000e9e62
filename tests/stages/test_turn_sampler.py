"""What is noted of the time that an episode takes."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prorl_zmq.errors import EngineFailed
from prorl_zmq.inference.engine import Generation
from prorl_zmq.stages import episode as episode_module
from prorl_zmq.stages import turn_sampler
from prorl_zmq.stages.episode import Episode, JobPolicy
from prorl_zmq.stages.turn_sampler import TurnSampler
from prorl_zmq.wire.messages.engines import VersionSpan
from prorl_zmq.wire.messages.jobs import STEPS_LIMIT, Job, Sampling, StepTokens


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


def test_a_generation_has_its_tokens_and_a_wait_for_room_is_none_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(turn_sampler, "time", clock)
    monkeypatch.setattr(episode_module, "time", clock)
    answers: list[Any] = [
        Generation(np.zeros(5, np.int32), np.zeros(5, np.float32), (VersionSpan(0, 0, 5),), "stop", 40, {}, 30, 7.0),
        EngineFailed("gone"),
    ]

    async def generate(*_: Any) -> Generation:
        nonlocal now
        now += 9.0
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    episode = Episode(began=90.0)
    chat: Any = SimpleNamespace(stop_token_ids=(), decode=str)
    sampler = TurnSampler(JobPolicy(generate, chat, 0, Job(task="t", instance={}), episode), Sampling())
    asyncio.run(sampler.sample(np.zeros(100, np.int32), 8, 0))
    with pytest.raises(EngineFailed):
        asyncio.run(sampler.sample(np.zeros(100, np.int32), 8, 1))
    assert [(step.start_s, step.seconds, step.tokens) for step in episode.steps] == [
        (17.0, 2.0, StepTokens(100, 40, 30, 5)),
        (19.0, 9.0, None),
    ]
    assert episode.timings == {"room": 7.0, "engine": 11.0}
