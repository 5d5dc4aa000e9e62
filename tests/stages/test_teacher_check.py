"""A job with a teacher: RUN compares vocabularies only, and SCORE names its own faults."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from prorl_zmq import Job
from prorl_zmq.errors import InvalidJob, NoBackend
from prorl_zmq.stages import rollout
from prorl_zmq.stages.rollout import Rollout
from prorl_zmq.stages.score_runner import ScoreRunner
from prorl_zmq.wire.messages.backends import Backend
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.jobs import Phase
from prorl_zmq.wire.messages.stages import PhaseFailed, StartPhase, TextToScore

if TYPE_CHECKING:
    from collections.abc import Sequence

OWN = Backend(backend_id="own", endpoint="ipc://own")
TEACHER = Backend(backend_id="x", endpoint="ipc://x", name="teacher")


def check(listed: Sequence[Backend] | Exception) -> None:
    async def of_model(model: str) -> Sequence[Backend]:
        assert model == "teacher"
        if isinstance(listed, Exception):
            raise listed
        return listed

    services = SimpleNamespace(backends=SimpleNamespace(of_model=of_model))
    begun: Any = SimpleNamespace(_job=Job(task="math", instance={}, teacher="teacher:4"), _services=services)
    asyncio.run(Rollout._check_teacher(begun, OWN))


def test_a_broker_that_does_not_answer_costs_no_rollout() -> None:
    check(NoBackend("the backend broker did not answer"))
    check(())


def test_a_teacher_with_another_vocabulary_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def same_vocabulary(*_: Any) -> bool:
        return False

    monkeypatch.setattr(rollout, "same_vocabulary", same_vocabulary)
    with pytest.raises(InvalidJob):
        check([TEACHER])


def test_a_lost_trajectory_is_no_fault_of_the_job() -> None:
    services: Any = SimpleNamespace(stage_id="score-1")
    text = TextToScore(chat=ChatSettings(), tokens=2, ranges=((0, 2),))
    command = StartPhase(job_id="j", attempt=1, phase=Phase.SCORE, text=text)
    job = Job(task="math", instance={}, job_id="j", teacher="teacher:4")
    end, block = asyncio.run(ScoreRunner(services, command, job, b"").run())
    assert isinstance(end, PhaseFailed)
    assert (end.error.code, block) == ("internal_error", None)
