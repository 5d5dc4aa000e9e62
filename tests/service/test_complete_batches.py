"""`open_batch(complete=…)`: a service replaces rollouts that lack a record, and groups keep their size."""

from __future__ import annotations

import asyncio
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import slime_types
from framework_python import framework_python
from recording_engine import RecordingEngine, experts_of
from support.distillation import distillation_arguments
from support.rescoring import teacher_policy
from vllm_python import environment

from prorl_zmq import Job, Role, Sampling
from prorl_zmq.errors import BatchFailed, EngineFailed, InvalidBatch, InvalidJob
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.engine import NOTHING_MORE
from prorl_zmq.integrations import slime
from prorl_zmq.integrations.recorded import Asked
from prorl_zmq.integrations.skyrl import Generator, TrajectoryID
from prorl_zmq.stages.handler import AgentHandler, Evaluation
from prorl_zmq.testing import LocalService

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_zmq import Group
    from prorl_zmq.data.scores import Scores
    from prorl_zmq.stages.handler import EvalPhase, PhaseData, RunPhase

SIZE = 3
TALK = Path(__file__).parents[1] / "verl_talk.py"
TALK_S = 120.0
ASKED = ("top_logprobs:4", "experts")


class Instance(msgspec.Struct):
    critic: bool = False


class Talk(AgentHandler[Instance]):
    """Two turns, and perhaps one of another trained model."""

    task = "talk"
    instance_type = Instance

    async def run(self, phase: RunPhase[Instance]) -> PhaseData:
        talk = phase.conversation([ChatMessage(Role.SYSTEM, "Talk.")])
        await talk.say("One?")
        if talk.stop is None:
            await talk.say("Two?")
        if not phase.instance.critic:
            return {}
        critic = phase.conversation(
            [ChatMessage(Role.SYSTEM, "Was it right?")], name="critic", model="critic", trained=True
        )
        await critic.say("Say.")
        return {}

    async def eval(self, phase: EvalPhase[Instance]) -> Evaluation:
        del phase
        return Evaluation(1.0)


class Forgetful(RecordingEngine):
    """Leaves out a record of some answers."""

    def __init__(self) -> None:
        super().__init__()
        self.forgets: list[str] = []
        """The arrays that the next second turns lack."""
        self.jobs: set[str] = set()

    async def generate(
        self, token_ids: Any, sampling: Any, stop_token_ids: Any, job_id: str, wanted: Any = NOTHING_MORE
    ) -> Any:
        done = await super().generate(token_ids, sampling, stop_token_ids, job_id, wanted)
        if wanted.rows_known and self.forgets and job_id not in self.jobs:
            self.jobs.add(job_id)
            name = self.forgets.pop()
            return replace(done, records={one: array for one, array in done.records.items() if name not in one})
        return done


class Choosy(EmbeddedEngine):
    """Scores no text of its first jobs."""

    def __init__(self) -> None:
        super().__init__(teacher_policy())
        self.left: set[str] = set()

    async def score(self, token_ids: Any, top: int, job_id: str) -> Scores:
        if len(self.left) < 2:
            self.left.add(job_id)
        if job_id in self.left:
            raise EngineFailed("not this one", refused=True)
        return await super().score(token_ids, top, job_id)


ENGINE, CHOOSY = Forgetful(), Choosy()


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    models = {"choosy": CHOOSY, "critic": EmbeddedEngine(teacher_policy())}
    with LocalService(handlers={"talk": Talk}, engine=ENGINE, models=models) as started:
        yield started


def job(**changes: Any) -> Job:
    fields = {
        "task": "talk",
        "instance": {"critic": True},
        "sampling": Sampling(max_tokens=12, seed=1),
        "record": ASKED,
    }
    return Job(**{**fields, **changes})


def collected(service: LocalService, prompts: list[Job], **options: Any) -> tuple[list[Group], Any]:
    with service.client(timeout_s=60) as client:
        with client.open_batch(len(prompts), SIZE, keep="all", **options) as batch:
            batch.feed(prompts)
            groups = list(batch)
        return groups, batch.status


def check(groups: list[Group]) -> None:
    assert [len(group) for group in groups] == [SIZE] * len(groups)
    for trajectory in (one for group in groups for one in group.trajectories):
        own, critic = trajectory.split()
        assert critic.records.rows("experts").tolist() == []
        assert own.records.rows("top_logprobs").tolist() == np.flatnonzero(own.loss_mask).tolist()
        np.testing.assert_array_equal(own.records["experts"], experts_of(own.token_ids)[:-1])


def test_rollouts_with_missing_rows_are_replaced(service: LocalService) -> None:
    ENGINE.forgets = ["experts", "experts", "top"]
    groups, status = collected(service, [job(), job()], complete=("top_logprobs", "experts"))
    check(groups)
    assert ENGINE.forgets == []
    assert (status.kept, status.failed, status.failures) == (2, 3, {"record_dropped": 3})


def test_a_batch_that_asks_for_none_keeps_them(service: LocalService) -> None:
    ENGINE.forgets = ["experts"]
    groups, status = collected(service, [job()])
    assert (ENGINE.forgets, status.failed) == ([], 0)
    experts = [form for one in groups[0].trajectories for form in one.result.records if form.name == "experts"]
    assert sorted(form.complete for form in experts) == [False, True, True]


def test_rollouts_that_their_teacher_did_not_score_are_replaced(service: LocalService) -> None:
    prompts = [job(record=(), teacher="choosy:2") for _ in range(2)]
    groups, status = collected(service, prompts, complete=["teacher"])
    assert [len(group) for group in groups] == [SIZE, SIZE]
    for trajectory in (one for group in groups for one in group.trajectories):
        own, _ = trajectory.split()
        assert own.records.rows("teacher").tolist() == list(range(1, len(own.token_ids)))
    assert status.failures == {"record_dropped": 2}


def test_a_batch_that_gets_no_complete_rollout_says_what_it_lacks(service: LocalService) -> None:
    ENGINE.forgets = ["experts"] * 100
    said = (
        r"1 groups in a row .*: record_dropped \(\d jobs\); the log of the rollout broker says which records, and why"
    )
    with pytest.raises(BatchFailed, match=said):
        collected(service, [job()] * 2, complete=("experts",), max_given_up=1)
    ENGINE.forgets = []


def test_a_batch_refuses_a_job_that_asks_for_no_record(service: LocalService) -> None:
    with pytest.raises(
        InvalidJob, match="does not ask for the record experts, which the batch's rollouts must have"
    ) as error:
        collected(service, [job(record=())], complete=("experts",))
    assert error.value.fields["field"] == "record"
    with pytest.raises(InvalidJob, match="the record teacher"):
        collected(service, [job()], complete=("experts", "teacher"))
    with pytest.raises(InvalidBatch, match="complete"):
        collected(service, [job()], complete=("routes",))


# The adapters ---------------------------------------------------------------------------------------------------------


def prompt() -> dict[str, Any]:
    return {"task": "talk", "instance": {}, "sampling": {"max_tokens": 12}}


def test_a_dropped_record_ends_no_skyrl_training(service: LocalService) -> None:
    ENGINE.forgets = ["experts", "experts"]
    generator = Generator(lambda *_: job(instance={}), connect=service.client, asked=Asked(record=("experts",)))
    ids = [TrajectoryID("uid", place) for place in range(SIZE)]
    given = {"prompts": [[]] * SIZE, "env_classes": ["talk"] * SIZE, "trajectory_ids": ids}
    output = asyncio.run(generator.generate(given))
    assert ENGINE.forgets == []
    for routes, *parts in zip(
        output["rollout_expert_indices"], output["prompt_token_ids"], output["response_ids"], strict=True
    ):
        token_ids = np.concatenate(parts)
        np.testing.assert_array_equal(routes, experts_of(token_ids)[:-1])


def test_a_dropped_record_ends_no_slime_training(service: LocalService, monkeypatch: pytest.MonkeyPatch) -> None:
    slime_types.install(monkeypatch)
    monkeypatch.setattr(slime_types, "Sample", slime_types.RecordingSample)
    ENGINE.forgets = ["experts", "experts"]
    args = SimpleNamespace(
        prorl_endpoint=service.front_door,
        prorl_record=["experts"],
        rollout_batch_size=2,
        n_samples_per_prompt=SIZE,
        rollout_max_response_len=12,
    )
    try:
        output = slime.generate_rollout(args, 0, slime_types.DataSource(SIZE, [prompt()]))
    finally:
        slime.close()
    assert ENGINE.forgets == []
    assert [len(group) for group in output.samples] == [SIZE, SIZE]
    for sample in (one for group in output.samples for one in group):
        np.testing.assert_array_equal(sample.rollout_routed_experts, experts_of(np.array(sample.tokens))[:-1])


@pytest.mark.proof
def test_a_dropped_record_ends_no_verl_training(service: LocalService, tmp_path: Path) -> None:
    ENGINE.forgets = ["experts", "experts"]
    command = [framework_python("trainers"), str(TALK), service.front_door, str(SIZE)]
    done = subprocess.run(
        command, env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True, check=False, timeout=TALK_S
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert ENGINE.forgets == []
    assert found["statuses"] == {"a": "finished", "b": "finished"}
    assert len(found["rows"]) == 2 * SIZE
    for row in found["rows"]:
        *routes, last = row["routed_experts"]
        np.testing.assert_array_equal(routes, experts_of(np.array(row["input_ids"]))[:-1])
        assert not np.any(last), "verl's own row"


def test_a_rollout_without_scores_ends_no_distillation(service: LocalService, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason="of the extra [trl]")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from prorl_zmq.integrations.trl import DistillationWorker

    CHOOSY.left.clear()
    args = distillation_arguments(4, 1000, 2)
    worker = DistillationWorker([prompt()], args, teacher="choosy", connect=service.client)
    with worker._session:
        worker._fill()
    assert len(CHOOSY.left) == 2
    assert worker.rollout_buffer.qsize() == 4
    for _ in range(4):
        sample = worker.rollout_buffer.get()
        assert (sample.teacher_topk_ids >= 0).any(axis=1).tolist() == sample.completion_mask.tolist()
