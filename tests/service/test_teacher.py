"""`Job.teacher` through a whole service: the scores are a record of the rollout, or are missing by name."""

from __future__ import annotations

import asyncio
import re
import threading
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from recording_engine import RecordingEngine
from support.rescoring import teacher_policy
from support.waiting import until
from teachers import TOP, Moody, check_scores, of_other_words, without_context

from prorl_zmq import Job, PhaseLimits, Role, Sampling
from prorl_zmq.data.scores import Scores
from prorl_zmq.errors import ConfigError, InvalidJob
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.inference.embedded.base_policy import base_policy
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.stages.handler import AgentHandler, Evaluation
from prorl_zmq.testing import LocalService, say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_zmq import Trajectory
    from prorl_zmq.stages.handler import EvalPhase, PhaseData, RunPhase

WAIT_S = 60.0
ARRAYS = {"teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs"}


class Instance(msgspec.Struct):
    talks: int = 2
    breaks: str = ""
    critic: bool = False
    """Whether the first talk has a critic, which is a trained model of its own."""


class Talk(AgentHandler[Instance]):
    """Conversations of two turns each."""

    task = "talk"
    instance_type = Instance

    async def run(self, phase: RunPhase[Instance]) -> PhaseData:
        for number in range(phase.instance.talks):
            opening = [ChatMessage(Role.SYSTEM, f"Talk {number}.")]
            talk = phase.conversation(opening, name=f"talk-{number}" if number else "main")
            await talk.say("One?")
            if talk.stop is None:
                await talk.say("Two?")
            if phase.instance.critic and not number:
                critic = phase.conversation(opening, name="critic", model="critic", trained=True)
                await critic.say("Was it right?")
        if phase.instance.breaks:
            raise InvalidJob("the task broke")
        return {}

    async def eval(self, phase: EvalPhase[Instance]) -> Evaluation:
        del phase
        return Evaluation(1.0)


class Stuck(EmbeddedEngine):
    """Scores nothing; notes when it was asked, and when it was stopped."""

    def __init__(self) -> None:
        super().__init__(teacher_policy())
        self.began, self.ended = threading.Event(), threading.Event()

    async def score(self, token_ids: Any, top: int, job_id: str) -> Scores:
        del token_ids, top, job_id
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()
        raise AssertionError


MOODY, STUCK = Moody(2), Stuck()


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    models = {
        "teacher": EmbeddedEngine(teacher_policy(), 5),
        "short": without_context(),
        "foreign": of_other_words(),
        "mute": say("no"),
        "moody": MOODY,
        "broken": Moody(1000),
        "stuck": STUCK,
        "critic": EmbeddedEngine(teacher_policy(), 3),
    }
    with LocalService(handlers={"talk": Talk}, engine=RecordingEngine(), models=models) as started:
        yield started


def run(service: LocalService, **changes: Any) -> Trajectory:
    job = Job(**({"task": "talk", "instance": {}, "sampling": Sampling(max_tokens=12), "teacher": "teacher"} | changes))
    with service.client(timeout_s=WAIT_S) as client:
        client.submit(job)
        (trajectory,) = client.stream()
    return trajectory


def scores_of(trajectory: Trajectory, top: int) -> Scores:
    """Return the record as `client.score` has it, where a segment's first token has log-prob 0 and no candidates."""
    records, tokens = trajectory.records, len(trajectory.token_ids)
    rows = records.rows("teacher_logprobs")
    scores = Scores(np.zeros(tokens, "f4"), np.full((tokens, top), -1, "i4"), np.zeros((tokens, top), "f4"))
    for array, name in zip((scores.logprobs, scores.top_ids, scores.top_logprobs), sorted(ARRAYS), strict=True):
        assert array.dtype == records[name].dtype
        array[rows] = records[name]
    return scores


def test_the_scores_of_all_segments_arrive_in_the_result(service: LocalService) -> None:
    trajectory = run(service, teacher=f"teacher:{TOP}")
    starts = {0, *trajectory.result.segments}
    assert len(starts) == 2
    assert trajectory.records.names == ("teacher",)
    rows = trajectory.records.rows("teacher_top_ids").tolist()
    assert rows == [place for place in range(len(trajectory.token_ids)) if place not in starts], "no row is made up"
    check_scores(scores_of(trajectory, TOP), trajectory, teacher_policy())
    for segment in trajectory.segments():
        assert segment.records.rows("teacher").tolist() == list(range(1, len(segment.token_ids)))
    result = trajectory.result
    assert (trajectory.reward, result.records_dropped) == (1.0, {})
    assert result.metrics["scored_tokens"] == len(trajectory.token_ids)
    assert result.metrics["teacher_weight_version"] == 5
    assert result.timings["score"] > 0


def test_only_the_tokens_of_the_jobs_own_model_are_scored(service: LocalService) -> None:
    whole = run(service, instance={"critic": True}, models={"critic": "critic"}, teacher=f"teacher:{TOP}")
    first, critic, second = whole.split()
    assert [one.result.agent for one in (first, critic, second)] == ["main", "critic", "talk-1"]
    assert critic.result.model == "critic"
    for part in (first, second):
        check_scores(scores_of(part, TOP), part, teacher_policy())
    assert "teacher" not in critic.records.names or not len(critic.records.rows("teacher"))
    own = len(first.token_ids) + len(second.token_ids)
    assert whole.result.metrics["scored_tokens"] == own < len(whole.token_ids)
    assert len(whole.records.rows("teacher")) == own - 2, "less the first token of each segment"


def test_other_arrays_are_as_without_a_teacher(service: LocalService) -> None:
    sampling, record = Sampling(max_tokens=12, seed=3, top_k=8), ("top_logprobs:4", "sampling_mask", "experts")
    taught = run(service, sampling=sampling, record=record)
    alone = run(service, sampling=sampling, record=record, teacher="")
    assert taught.records.names == (*alone.records.names, "teacher")
    assert taught.records["teacher_top_ids"].shape == (len(taught.token_ids) - 2, 0), "none asked for"
    check_scores(scores_of(taught, 0), taught, teacher_policy(), 0)
    for name in ("token_ids", "loss_mask", "logprobs", "weight_versions", "turns"):
        assert getattr(taught, name).tobytes() == getattr(alone, name).tobytes()
    for name, array in alone.records.items():
        np.testing.assert_array_equal(taught.records[name], array)
    assert not {"score", "score_queue"} & alone.result.timings.keys()


def test_the_policy_may_be_its_own_teacher(service: LocalService) -> None:
    trajectory = run(service, teacher="policy")
    own = trajectory.loss_mask[trajectory.records.rows("teacher")]
    mine = trajectory.logprobs[trajectory.loss_mask]
    np.testing.assert_allclose(trajectory.records["teacher_logprobs"][own], mine, atol=1e-4)
    check_scores(scores_of(trajectory, 0), trajectory, base_policy(), 0)


def test_a_teacher_that_fails_at_first_is_asked_again(service: LocalService) -> None:
    trajectory = run(service, teacher="moody")
    check_scores(scores_of(trajectory, 0), trajectory, teacher_policy(), 0)
    assert MOODY.failures == 0


@pytest.mark.parametrize(
    ("teacher", "why"),
    [
        ("short", "too long for the context of 24 tokens of the model 'short'"),
        ("broken", "engine_failed|no_backend"),
        ("stuck", "the teacher took longer than 0.5 s"),
    ],
)
def test_a_record_without_scores_is_dropped_by_name(service: LocalService, teacher: str, why: str) -> None:
    limits = PhaseLimits(teacher_s=0.5 if teacher == "stuck" else WAIT_S)
    trajectory = run(service, teacher=teacher, limits=limits, record=("experts",), backend_wait_s=0.3)
    assert (trajectory.outcome, trajectory.reward) == ("completed", 1.0), "the rollout itself stays"
    assert re.search(why, trajectory.result.records_dropped["teacher"])
    assert trajectory.records.names == ("experts",)
    assert teacher != "stuck" or STUCK.ended.wait(WAIT_S), "the engine stops"


@pytest.mark.parametrize(
    "error", [ConfigError("no tokenizer there", key="chat.tokenizer"), MemoryError("no room there")]
)
def test_any_other_failure_of_scoring_costs_the_record_only(
    service: LocalService, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def fails(*_: Any) -> bool:
        raise error

    monkeypatch.setattr("prorl_zmq.stages.job_backend.same_vocabulary", fails)
    trajectory = run(service, record=("experts",))
    assert (trajectory.outcome, trajectory.reward) == ("completed", 1.0)
    assert re.search("no (tokenizer|room) there", trajectory.result.records_dropped["teacher"])
    assert trajectory.records.names == ("experts",)


def test_a_rollout_without_a_reward_is_not_scored(service: LocalService) -> None:
    trajectory = run(service, instance={"breaks": "yes"})
    assert (trajectory.outcome, trajectory.reward) == ("failed", None)
    assert trajectory.result.records_dropped == {"teacher": "the rollout has no reward"}
    assert len(trajectory.token_ids) > 0


def test_a_cancelled_rollout_leaves_its_teacher(service: LocalService) -> None:
    for event in (STUCK.began, STUCK.ended):
        event.clear()
    with service.client(timeout_s=WAIT_S) as client:
        (job_id,) = client.submit(Job(task="talk", instance={}, teacher="stuck", sampling=Sampling(max_tokens=4)))
        assert STUCK.began.wait(WAIT_S)
        client.cancel(job_id)
        (trajectory,) = client.stream()
    assert trajectory.outcome == "cancelled"
    assert STUCK.ended.wait(WAIT_S)


def test_rollouts_go_on_while_all_teachers_hang() -> None:
    stuck = Stuck()
    with (
        LocalService(handlers={"talk": Talk}, engine=RecordingEngine(), models={"stuck": stuck}, slots=2) as started,
        started.client(timeout_s=WAIT_S) as client,
    ):
        sampling = Sampling(max_tokens=4)
        waiting = client.submit(Job(task="talk", instance={}, teacher="stuck", sampling=sampling) for _ in range(6))
        assert stuck.began.wait(WAIT_S)
        others = client.submit(Job(task="talk", instance={}, sampling=sampling) for _ in range(6))
        found = list(islice(client.stream(), 6))
        assert sorted(one.job_id for one in found) == sorted(others)
        until(lambda: client.status().queued.get("score") == 4, "all others have their rewards", WAIT_S)
        assert not stuck.ended.is_set()
        status = client.status()
        assert (status.running["score"], status.running["run"], status.running["eval"]) == (2, 0, 0)
        for job_id in waiting:
            client.cancel(job_id)
        left = list(client.stream())
    assert {(one.outcome, one.reward) for one in left} == {("cancelled", None)}
    assert all(len(one.token_ids) for one in left), "what RUN wrote is there"


def test_a_teacher_with_another_tokenizer_fails_the_job(service: LocalService) -> None:
    trajectory = run(service, teacher="foreign")
    assert trajectory.outcome == "failed"
    assert len(trajectory.token_ids) == 0, "before the first token"
    assert trajectory.error is not None
    assert trajectory.error.code == "invalid_job"
    assert "'foreign'" in trajectory.error.message
    assert "another vocabulary than the text" in trajectory.error.message


@pytest.mark.parametrize(
    ("teacher", "words"),
    [
        ("nobody", r"no backend serves the model 'nobody' \(teacher\); the service has .*short.*teacher"),
        ("mute", "the teacher 'mute' cannot score texts: backend local-mute"),
    ],
)
def test_a_teacher_that_cannot_be_is_refused_at_the_front_door(service: LocalService, teacher: str, words: str) -> None:
    with pytest.raises(InvalidJob, match=words) as refused:
        run(service, teacher=teacher)
    assert refused.value.field == "teacher"


def test_a_service_without_processes_for_teachers_refuses_them() -> None:
    with LocalService(handlers={"talk": Talk}, engine=RecordingEngine()) as started:
        with pytest.raises(InvalidJob, match=r'no stage process is for teachers; .* role = "score"') as refused:
            run(started, teacher="policy")
        assert refused.value.field == "teacher"


@pytest.mark.parametrize("teacher", ["teacher:0", "teacher:65", "teacher:", "a b", ":4"])
def test_a_teacher_is_a_model_and_a_number_from_1_to_64(service: LocalService, teacher: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        run(service, teacher=teacher)
    assert refused.value.field == "$.teacher"
