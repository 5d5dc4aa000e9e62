"""`client.score` through a whole service: a policy, and a frozen teacher of another seed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from support.rescoring import teacher_policy
from teachers import CLOSE, SHORT_CONTEXT, TOP, Moody, check_scores, of_other_words, without_context

from prorl_zmq import Job, Sampling
from prorl_zmq.client.score_jobs import ScoreJobs
from prorl_zmq.data.scores import Scores
from prorl_zmq.errors import InvalidJob
from prorl_zmq.inference.embedded.base_policy import base_policy
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.tokenizer import VOCABULARY_SIZE
from prorl_zmq.testing import LocalService, say
from prorl_zmq.wire.messages.backends import Backend
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.jobs import ConversationPart

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_zmq import RolloutClient, Trajectory


def trajectories(client: RolloutClient, count: int = 40) -> list[Trajectory]:
    sampling = Sampling(max_tokens=24)
    client.submit(
        Job(task="math", instance={"problem": f"{n} + 1?", "ground_truth": "2"}, sampling=sampling)
        for n in range(count)
    )
    return list(client.stream(timeout_s=60))


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    models = {
        "teacher": EmbeddedEngine(teacher_policy(), 5),
        "short": without_context(),
        "foreign": of_other_words(),
        "mute": say("no"),
    }
    with LocalService(engine=EmbeddedEngine(base_policy()), models=models) as started:
        yield started


@pytest.fixture
def client(service: LocalService) -> Iterator[RolloutClient]:
    with service.client() as opened:
        yield opened


def test_a_frozen_teacher_scores_all_trajectories(client: RolloutClient) -> None:
    rollouts = trajectories(client)
    submitted = client.submit(Job(task="math", instance={"problem": "1?", "ground_truth": "1"}))
    scores = client.score(rollouts, model="teacher", top=TOP)
    assert len(scores) == len(rollouts)
    for one, trajectory in zip(scores, rollouts, strict=True):
        assert one.weight_version == 5
        check_scores(one, trajectory, teacher_policy())
    assert [one.job_id for one in client.stream(timeout_s=60)] == submitted, "scoring has a session of its own"
    assert client.score([]) == []


def test_each_segment_is_a_text_of_its_own(client: RolloutClient) -> None:
    (whole,) = trajectories(client, 1)
    parted = replace(whole, result=msgspec.structs.replace(whole.result, segments=(9, 20)))
    scores = client.score([parted, whole], top=TOP)
    check_scores(scores[0], parted, teacher_policy())
    check_scores(scores[1], whole, teacher_policy())
    assert not np.allclose(scores[0].logprobs, scores[1].logprobs)


def test_the_policy_scores_its_own_words(client: RolloutClient) -> None:
    (trajectory,) = trajectories(client, 1)
    (scores,) = client.score([trajectory], model="policy", top=0)
    check_scores(scores, trajectory, base_policy(), 0)
    mask = trajectory.loss_mask
    np.testing.assert_allclose(scores.logprobs[mask], trajectory.logprobs[mask], atol=CLOSE)
    assert scores.top_ids.shape == (len(mask), 0)


def test_a_trajectory_without_tokens_has_empty_scores(client: RolloutClient) -> None:
    (trajectory,) = trajectories(client, 1)
    nothing = replace(
        trajectory,
        **{name: getattr(trajectory, name)[:0] for name in ("token_ids", "loss_mask", "logprobs", "weight_versions")},
        result=msgspec.structs.replace(trajectory.result, tokens=0),
    )
    empty, scores = client.score([nothing, trajectory], top=TOP)
    assert empty.top_ids.shape == (0, TOP)
    check_scores(scores, trajectory, teacher_policy())


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"top": 65}, "top", "0 to 64"),
        ({"model": "mute"}, "model", "no backend of the model 'mute' can score texts: local-mute"),
        ({"model": "nobody"}, "model", "no backend serves the model 'nobody'"),
        ({"model": "foreign"}, "model", "another vocabulary than the text"),
        (
            {"model": "short"},
            "token_ids",
            f"context of {SHORT_CONTEXT} tokens of the model 'short': there must be",
        ),
    ],
)
def test_what_cannot_be_scored_is_refused(
    client: RolloutClient, options: dict[str, Any], field: str, words: str
) -> None:
    rollouts = trajectories(client, 2)
    with pytest.raises(InvalidJob, match=words) as refused:
        client.score(rollouts, **options)
    assert refused.value.field == field
    assert len(client.score(rollouts, top=TOP)) == 2, "nothing is left behind"


def test_ids_beyond_the_vocabulary_are_refused(client: RolloutClient) -> None:
    (trajectory,) = trajectories(client, 1)
    wrong = replace(trajectory, token_ids=np.full_like(trajectory.token_ids, VOCABULARY_SIZE))
    with pytest.raises(InvalidJob, match=r"trajectory 1 .*outside of 0 to") as refused:
        client.score([trajectory, wrong], top=TOP)
    assert refused.value.job_id == trajectory.job_id


def test_a_trajectorys_tokenizer_is_that_of_its_own_model(client: RolloutClient) -> None:
    (whole,) = trajectories(client, 1)
    backends = [
        Backend(
            backend_id=f"of-{name}",
            endpoint="ipc://x",
            name=name,
            scores=True,
            chat=ChatSettings("transformers", f"/models/{name}"),
        )
        for name in ("policy", "critic", "teacher")
    ]
    part = replace(whole, result=msgspec.structs.replace(whole.result, model="critic", backend=""))
    (job,) = ScoreJobs([part], "teacher", 0, backends).take()
    assert job.instance["chat"]["tokenizer"] == "/models/critic"
    with pytest.raises(InvalidJob, match="nor one of the model 'critic'"):
        ScoreJobs([part], "teacher", 0, [backends[0], backends[2]])
    both = (ConversationPart("main", 0, 1), ConversationPart("critic", 1, 1, model="critic"))
    mixed = replace(whole, result=msgspec.structs.replace(whole.result, segments=(9,), conversations=both))
    with pytest.raises(InvalidJob, match=r"tokens of other models \(critic\)"):
        ScoreJobs([mixed], "teacher", 0, backends)


def test_scores_are_not_lost_with_those_that_fail(client: RolloutClient) -> None:
    (trajectory,) = trajectories(client, 1)
    wrong = replace(trajectory, token_ids=np.full_like(trajectory.token_ids, VOCABULARY_SIZE))
    first, failed, last = client.score([trajectory, wrong, trajectory], top=TOP, return_errors=True)
    assert isinstance(failed, InvalidJob)
    assert (failed.job_id, "trajectory 1 " in failed.message) == (trajectory.job_id, True)
    for scores in (first, last):
        assert isinstance(scores, Scores)
        check_scores(scores, trajectory, teacher_policy())
    (short,) = client.score([trajectory], model="short", return_errors=True)
    assert isinstance(short, InvalidJob)
    assert "too long for the context" in short.message


def test_a_malformed_score_job_fails_alone(client: RolloutClient) -> None:
    chat = msgspec.to_builtins(ChatSettings())
    instances = [
        {"token_ids": b"12345", "chat": chat},
        {"token_ids": b"", "chat": chat},
        {"token_ids": bytes(40), "segments": [4, 4], "chat": chat},
        {"token_ids": bytes(40), "segments": [10], "chat": chat},
        {"token_ids": bytes(40), "top": 65, "chat": chat},
        {"token_ids": bytes(40), "chat": {"kind": "other"}},
        {"token_ids": bytes(40), "chat": chat},
    ]
    client.submit(Job(task="score", instance=instance, models={"teacher": "teacher"}) for instance in instances)
    ended = list(client.stream(timeout_s=60))
    assert sorted(one.outcome for one in ended) == ["completed", *["failed"] * 6]
    assert {one.error.code for one in ended if one.error is not None} == {"invalid_job"}


def test_a_failed_text_is_scored_again() -> None:
    models = {"teacher": Moody()}

    async def scored(service: LocalService) -> list[Scores]:
        async with service.async_client() as client:
            await client.submit(Job(task="math", instance={"problem": "1?", "ground_truth": "1"}))
            found = [one async for one in client.stream(timeout_s=60)]
            scores = await client.score(found, top=TOP)
            check_scores(scores[0], found[0], teacher_policy())
            return scores

    with LocalService(engine=EmbeddedEngine(base_policy()), models=models) as service:
        assert len(asyncio.run(scored(service))) == 1
    assert models["teacher"].failures == 0
