"""Several trained agents in one rollout, each with a model, weight versions, a reward and a group of its own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import pytest
from support.waiting import until

from prorl_zmq import Job, Role, Sampling
from prorl_zmq.data.rows import rows_of
from prorl_zmq.data.trajectory import oldest_version
from prorl_zmq.errors import EngineFailed, InvalidJob, NotTrainable, SandboxLimitExceeded
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.inference.embedded.base_policy import base_policy
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.stages.handler import AgentHandler, Evaluation
from prorl_zmq.stages.other_models import ChatEndpoints, OtherModels
from prorl_zmq.testing import LocalService, say
from prorl_zmq.wire.messages.backends import Backend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from prorl_zmq import Trajectory
    from prorl_zmq.inference.policy import Policy
    from prorl_zmq.stages.handler import EvalPhase, PhaseData, RunPhase
    from prorl_zmq.stages.job_backend import JobBackend

WAIT_S = 60.0
CLOSE = 1e-4
VERSION_OF_GUESSER = 5


class Instance(msgspec.Struct):
    trains_user: bool | None = None
    rounds: int = 2
    breaks: str = ""
    """What fails: `user`, `world`, which is no agent, or `eval`."""


class Game(AgentHandler[Instance]):
    """One agent asks, another one guesses; each has a reward of its own."""

    task = "game"
    instance_type = Instance

    async def run(self, phase: RunPhase[Instance]) -> PhaseData:
        wanted = phase.instance
        asker = phase.conversation([ChatMessage(Role.SYSTEM, "Ask.")], name="asker")
        opening = [ChatMessage(Role.SYSTEM, "Guess.")]
        guesser = phase.conversation(opening, name="guesser", model="guesser", trained=wanted.trains_user)
        said = "Begin."
        for _ in range(wanted.rounds):
            asked = await asker.say(said)
            if wanted.breaks == "user":
                raise EngineFailed("the guesser's engine has gone", refused=True)
            guessed = await guesser.say(asked.text)
            said = guessed.text
            if asked.stop is not None or guessed.stop is not None:
                break
        if wanted.breaks == "world":
            raise SandboxLimitExceeded("one of the agents filled the disk", limit="disk")
        return {}

    async def eval(self, phase: EvalPhase[Instance]) -> Evaluation:
        if phase.instance.breaks == "eval":
            raise SandboxLimitExceeded("what the agents left fills the disk", limit="disk")
        return Evaluation(0.0, rewards={"asker": 1.0, "guesser": -1.0} if phase.instance.trains_user else {})


def guessers_policy() -> Policy:
    policy, random = base_policy().copy(), np.random.default_rng(5)
    policy.parameters["output_weight"] += random.normal(0, 0.1, policy.parameters["output_weight"].shape).astype("f4")
    return policy


@pytest.fixture
def service() -> Iterator[LocalService]:
    models = {"b": EmbeddedEngine(guessers_policy(), VERSION_OF_GUESSER), "script": say(lambda _: "seven")}
    with LocalService(handlers={"game": Game}, engine=EmbeddedEngine(base_policy()), models=models) as running:
        yield running


def job(**instance: Any) -> Job:
    models = {"guesser": instance.pop("guesser", "b")}
    return Job(task="game", instance=instance, models=models, sampling=Sampling(max_tokens=64, seed=1), max_attempts=1)


def run(service: LocalService, **instance: Any) -> Trajectory:
    with service.client(timeout_s=WAIT_S) as client:
        client.submit(job(**instance))
        (trajectory,) = client.stream()
        until(lambda: not any(one.in_flight for one in client.backends.list()), "the backends are released")
    return trajectory


def distance(part: Trajectory, policy: Policy) -> float:
    """Return the largest difference of a generated token's log-prob from a model's own."""
    worst = 0.0
    for segment in part.segments():
        expected = policy.logprobs(segment.token_ids)
        worst = max(worst, float(np.abs(expected - segment.logprobs)[segment.loss_mask].max(initial=0.0)))
    return worst


def test_a_scripted_user_is_text_alone_and_the_agent_one_trajectory(service: LocalService) -> None:
    whole = run(service, guesser="script")
    assert whole.outcome == "completed", whole.error
    (asker,) = whole.split()
    assert (asker.result.agent, asker.result.model, asker.reward) == ("asker", "policy", 0.0)
    assert asker.group_id.endswith("/asker")
    assert "assistant: seven" in whole.result.notes["conversation guesser"]
    asked, guessed = whole.result.conversations
    assert (asked.model, guessed.model, guessed.trained, guessed.segments) == ("", "script", False, 0)
    assert distance(asker, base_policy()) < CLOSE


def test_two_agents_of_two_models_are_two_trajectories_with_what_is_their_own(service: LocalService) -> None:
    whole = run(service, trains_user=True)
    assert whole.outcome == "completed", whole.error
    asker, guesser = whole.split()
    own = [(one.result.agent, one.result.model, one.reward, one.versions) for one in (asker, guesser)]
    assert own == [("asker", "policy", 1.0, (0,)), ("guesser", "b", -1.0, (VERSION_OF_GUESSER,))]
    assert (asker.group_id, guesser.group_id) == (f"{whole.group_id}/asker", f"{whole.group_id}/guesser")
    assert whole.versions == (0,), "of the job's own model"
    assert {asker.logprobs_mode, guesser.logprobs_mode} == {"processed_logprobs"}
    assert whole.result.metrics["turns"] == sum(
        int((part.turns[:, 2] == Role.ASSISTANT).sum()) for part in whole.split()
    )
    assert whole.result.metrics["generated_tokens"] == whole.generated_tokens
    for part, model, other in (
        (asker, base_policy(), guessers_policy()),
        (guesser, guessers_policy(), base_policy()),
    ):
        assert distance(part, model) < CLOSE
        assert distance(part, other) > 100 * CLOSE, "a mix-up of models would show"
    assert whole.result.conversations[1].oldest_version == VERSION_OF_GUESSER


def test_groups_are_by_agent_and_a_trainer_gets_its_own_models(service: LocalService) -> None:
    with service.client(timeout_s=WAIT_S) as client, client.open_batch(2, 2, keep="all") as batch:
        batch.feed([job(trains_user=True), job(trains_user=True)])
        groups = list(batch)
    roles = [role for group in groups for role in group.split()]
    assert [role.group_id for role in roles] == [f"{one.group_id}/{name}" for one in groups for name in names()]
    assert [role.rewards.tolist() for role in roles] == [[1.0, 1.0], [-1.0, -1.0]] * 2
    assert [role.model for role in roles] == ["policy", "b"] * 2
    of_b = [role for group in groups for role in group.split("b")]
    assert {row.trajectory.result.model for row in rows_of(of_b)} == {"b"}
    assert [versions for row in rows_of(of_b) for versions in row.versions] == [VERSION_OF_GUESSER] * len(rows_of(of_b))
    assert groups[0].split("c") == []
    with pytest.raises(NotTrainable, match=r"has tokens of the model b, and job \S+ of policy; a trainer trains one"):
        rows_of(roles)
    with pytest.raises(NotTrainable, match="has the trained conversations asker, guesser; split its group by role"):
        rows_of(groups)


def names() -> tuple[str, str]:
    return "asker", "guesser"


def test_new_weights_of_one_model_make_only_its_agents_tokens_newer(service: LocalService, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    guessers_policy().save(path)
    with service.client(timeout_s=WAIT_S) as client:
        client.update_weights(path, 9, model="b")
    asker, guesser = run(service, trains_user=True).split()
    assert (asker.versions, guesser.versions) == ((0,), (9,))


def test_the_oldest_version_of_a_block_skips_tokens_of_other_models(service: LocalService, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    base_policy().save(path)
    with service.client(timeout_s=WAIT_S) as client:
        client.update_weights(path, 8)
    whole = run(service, trains_user=True)
    arrays = (whole.token_ids, whole.logprobs, whole.weight_versions, whole.turns, whole.loss_mask)
    block = b"".join(array.tobytes() for array in arrays)
    assert oldest_version(block, whole.result) == 8
    assert int(whole.weight_versions[whole.loss_mask].min()) == VERSION_OF_GUESSER


@pytest.mark.parametrize(
    ("breaks", "outcome"), [("user", "infrastructure_error"), ("world", "failed"), ("eval", "failed")]
)
def test_a_failure_of_one_agent_masks_the_episode(service: LocalService, breaks: str, outcome: str) -> None:
    whole = run(service, trains_user=True, breaks=breaks)
    assert (whole.outcome, whole.reward) == (outcome, None)
    assert [one.reward for one in whole.split()] == [None] * len(whole.split())


@pytest.mark.parametrize("breaks", ["world", "eval"])
def test_a_failure_with_one_trained_model_has_the_reward_zero(service: LocalService, breaks: str) -> None:
    whole = run(service, guesser="script", breaks=breaks)
    assert (whole.outcome, whole.reward) == ("failed", 0.0)


@pytest.mark.parametrize("model", ["teacher", "far"])
def test_a_frozen_model_and_an_endpoint_cannot_be_trained(model: str) -> None:
    class Assigned:
        async def assigned(self) -> Backend:
            return Backend(backend_id="x", endpoint="ipc://x", name="teacher", frozen=True)

    endpoints = ChatEndpoints({"PRORL_MODEL_FAR_URL": "http://far", "PRORL_MODEL_FAR_MODEL": "far"})
    others = OtherModels(job(), endpoints, lambda _: cast("JobBackend", Assigned()))
    why = "is frozen" if model == "teacher" else "is an endpoint"
    with pytest.raises(InvalidJob, match=f"the model '{model}' {why}, so its conversation cannot be trained on"):
        asyncio.run(others.policy(model, trained=True))
    assert asyncio.run(others.policy(model)).job.task == "game", "it may talk"
