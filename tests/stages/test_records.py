"""Records through a whole service: what the engine gave arrives, at its tokens, and nothing else does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import numpy as np
import pytest
from recording_engine import RecordingEngine, experts_of

from prorl_zmq import EpisodeLimits, Group, Job, Role, Sampling
from prorl_zmq.data.rows import rows_of
from prorl_zmq.errors import InvalidJob
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.inference.embedded.base_policy import base_policy
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.policy import log_softmax
from prorl_zmq.inference.tokenizer import decode
from prorl_zmq.stages.handler import AgentHandler, Evaluation
from prorl_zmq.testing import LocalService
from prorl_zmq.wire.messages.jobs import NamedModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prorl_zmq import Trajectory
    from prorl_zmq.data.trajectory import Segment
    from prorl_zmq.stages.handler import EvalPhase, PhaseData, RunPhase

WAIT_S = 60.0
TOP = 5
ALL = (f"top_logprobs:{TOP}", "sampling_mask", "experts")
SAMPLING = Sampling(max_tokens=24, top_p=0.9, top_k=12, temperature=0.8, seed=5)


class Instance(msgspec.Struct):
    turns: int = 3
    talks: int = 1
    text: str = ""
    aside: str = ""
    """Another conversation of the job's own model, drawn by a sampling of its own: `trained` or `untrained`."""


class Talk(AgentHandler[Instance]):
    """Some conversations of some turns each."""

    task = "talk"
    instance_type = Instance

    async def run(self, phase: RunPhase[Instance]) -> PhaseData:
        for number in range(phase.instance.talks):
            opening = [ChatMessage(Role.SYSTEM, f"Talk {number}.{phase.instance.text}")]
            talk = phase.conversation(opening, name=f"talk-{number}" if number else "main")
            for turn in range(phase.instance.turns):
                if talk.stop is None:
                    await talk.say(f"Question {turn}?")
        if aside := phase.instance.aside:
            opening = [ChatMessage(Role.SYSTEM, "Talk.")]
            await phase.conversation(opening, name="aside", model="aside", trained=aside == "trained").say("Question?")
        return {}

    async def eval(self, phase: EvalPhase[Instance]) -> Evaluation:
        del phase
        return Evaluation(1.0)


class Program(AgentHandler[Instance]):
    """A program leads the rollout: it goes on from its first turn twice, as with a subagent."""

    task = "program"
    instance_type = Instance

    async def run(self, phase: RunPhase[Instance]) -> PhaseData:
        async def play(url: str, key: str, models: Sequence[str]) -> tuple[PhaseData, Sequence[tuple[int, float]]]:
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=WAIT_S) as client:

                async def say(messages: list[dict[str, str]], text: str) -> list[dict[str, str]]:
                    asked = [*messages, {"role": "user", "content": text}]
                    body = {"model": models[0], "messages": asked}
                    answer = (await client.post(f"{url}/chat/completions", json=body)).raise_for_status().json()
                    return [*asked, answer["choices"][0]["message"]]

                first = await say([{"role": "system", "content": "Talk."}], "Question 0?")
                for line in ("main", "other"):
                    messages = first
                    for turn in range(1, phase.instance.turns):
                        messages = await say(messages, f"Question {turn} of {line}?")
            return {}, ()

        return await phase.serve(play)

    async def eval(self, phase: EvalPhase[Instance]) -> Evaluation:
        del phase
        return Evaluation(1.0)


ENGINE = RecordingEngine()


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    with LocalService(handlers={"talk": Talk, "program": Program}, engine=ENGINE) as running:
        yield running


def run(service: LocalService, **changes: Any) -> Trajectory:
    job = Job(**({"task": "talk", "instance": {}, "sampling": SAMPLING, "record": ALL} | changes))
    with service.client(timeout_s=WAIT_S) as client:
        client.submit(job)
        (trajectory,) = client.stream()
    assert trajectory.outcome == "completed", trajectory.error
    return trajectory


ASIDE = {"aside": NamedModel("policy", Sampling(max_tokens=8, temperature=0.0))}


def test_a_conversation_that_is_not_trained_needs_no_record(service: LocalService) -> None:
    trajectory = run(service, instance={"aside": "untrained"}, models=ASIDE)
    for segment in trajectory.segments():
        check(segment)


def test_a_sampling_that_gives_no_mask_is_refused_before_it_is_drawn_by(service: LocalService) -> None:
    with service.client(timeout_s=WAIT_S) as client:
        client.submit(
            Job(task="talk", instance={"aside": "trained"}, sampling=SAMPLING, record=("sampling_mask",), models=ASIDE)
        )
        (trajectory,) = client.stream()
    assert (trajectory.outcome, trajectory.result.attempt) == ("failed", 1)
    assert trajectory.error is not None
    assert trajectory.error.code == "invalid_job"
    assert "the model 'aside': sampling_mask needs top_p" in trajectory.error.message


def check(segment: Segment) -> None:
    """Compare the records of a segment with what the policy itself says of its tokens."""
    records, generated = segment.records, np.flatnonzero(segment.loss_mask)
    assert records.names == ("top_logprobs", "sampling_mask", "experts")
    assert records.rows("top_ids").tolist() == records.rows("sampling_mask").tolist() == generated.tolist()
    policy = base_policy()
    logits = policy.logits(policy.contexts(segment.token_ids))[generated]
    ends = np.cumsum(records["mask_counts"])
    supports = np.split(records["mask_ids"], ends[:-1])
    for row, (token, support) in enumerate(zip(segment.token_ids[generated].tolist(), supports, strict=True)):
        assert token in support
        assert 1 <= len(support) <= SAMPLING.top_k
        renormalised = log_softmax(logits[row][support][None], SAMPLING.temperature)[0]
        assert renormalised[support == token] == pytest.approx(segment.logprobs[generated[row]], abs=1e-5)
        ids, logprobs = records["top_ids"][row], records["top_logprobs"][row]
        there = ids >= 0
        assert there.sum() == min(TOP, len(support))
        assert set(ids[there]) <= set(support)
        best = np.sort(renormalised)[::-1][: there.sum()]
        np.testing.assert_allclose(logprobs[there], best, atol=1e-5)
        assert (logprobs[~there] == -9999.0).all()
    known = records.rows("experts")
    assert known.tolist() == list(range(len(segment.token_ids) - 1)), "only the last token was never fed to the model"
    np.testing.assert_array_equal(records["experts"], experts_of(segment.token_ids)[:-1])


def test_what_the_engine_gave_arrives_at_its_tokens(service: LocalService) -> None:
    trajectory = run(service)
    (segment,) = trajectory.segments()
    assert trajectory.result.metrics["turns"] > 1
    check(segment)
    assert trajectory.records["experts"].dtype == np.uint8
    assert trajectory.records["experts"].base is not None, "a view"
    assert trajectory.result.records_dropped == {}


def test_each_turn_asks_only_for_the_rows_that_are_new(service: LocalService) -> None:
    trajectory = run(service)
    asked = [(prompt, rows) for job, prompt, rows in ENGINE.wanted if job == trajectory.job_id]
    spoken = trajectory.turns[trajectory.turns[:, 2] == int(Role.ASSISTANT)].tolist()
    last = [start + int(np.flatnonzero(trajectory.loss_mask[start:end])[-1]) for start, end, _ in spoken]
    assert [rows for _, rows in asked] == [0, *last[:-1]], "the last generated token has no row until the next turn"


def test_the_arrays_are_the_same_bytes_with_and_without_records(service: LocalService) -> None:
    with_records, without = run(service), run(service, record=())
    for name in ("token_ids", "loss_mask", "logprobs", "weight_versions", "turns"):
        assert getattr(with_records, name).tobytes() == getattr(without, name).tobytes()
    assert len(without.records) == 0
    assert (without.result.records, without.result.records_dropped) == ((), {})


@pytest.mark.parametrize("aborts", [0, 2])
def test_turns_of_a_program_are_joined_with_their_records(service: LocalService, aborts: int) -> None:
    """Each line of its calls is a segment; the turn that both have in common is generated in the first one only."""
    ENGINE.aborts = aborts
    trajectory = run(service, task="program", instance={"turns": 3})
    assert ENGINE.aborts == 0
    assert len(trajectory.versions) == 1 + aborts, "new weights came within turns"
    first, second = trajectory.segments()
    for segment in (first, second):
        check(segment)
    common = int(
        np.flatnonzero(first.token_ids[: len(second.token_ids)] != second.token_ids[: len(first.token_ids)])[0]
    )
    assert first.loss_mask[:common].any()
    assert not second.loss_mask[:common].any()
    asked = [rows for job, _, rows in ENGINE.wanted if job == trajectory.job_id]
    assert len(asked) == 5 + aborts
    assert asked[0] == 0
    assert all(asked[1:]), "each turn asks for the rows behind those that it continues"


def test_a_rows_records_are_its_segments(service: LocalService) -> None:
    trajectory = run(service, instance={"turns": 2, "talks": 2})
    segments = trajectory.segments()
    assert len(segments) == 2
    for segment in segments:
        check(segment)
    parts = trajectory.split()
    assert [part.result.group_id for part in parts] == ["/main", "/talk-1"]
    for part in parts:
        (row,) = rows_of([Group("g", "g", (part,))])
        check(row.arrays)
        np.testing.assert_array_equal(part.records["experts"], experts_of(part.token_ids)[:-1])
    edge = trajectory.result.segments[0]
    unknown = set(range(len(trajectory.token_ids))) - set(trajectory.records.rows("experts").tolist())
    assert unknown == {edge - 1, len(trajectory.token_ids) - 1}


def test_a_turn_goes_on_with_new_weights_without_a_gap(service: LocalService) -> None:
    ENGINE.aborts = 3
    trajectory = run(service, instance={"turns": 1})
    assert trajectory.result.metrics["continued_turns"] == 3
    assert len(trajectory.versions) == 4
    (segment,) = trajectory.segments()
    check(segment)


def test_rows_are_cut_with_the_tokens_at_a_stop_text(service: LocalService) -> None:
    whole = run(service, instance={"turns": 1})
    said = decode(whole.token_ids[whole.loss_mask][3:6])
    cut = run(service, instance={"turns": 1}, sampling=msgspec.structs.replace(SAMPLING, stop=(said,)))
    assert 0 < cut.generated_tokens < whole.generated_tokens
    assert len(cut.records["top_ids"]) == len(cut.records["mask_counts"]) == cut.generated_tokens
    assert cut.records["mask_counts"].sum() == len(cut.records["mask_ids"])
    rows = cut.records.rows("experts")
    np.testing.assert_array_equal(cut.records["experts"], experts_of(cut.token_ids)[: len(rows)])
    assert len(rows) <= len(cut.token_ids)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"record": ("experts", "experts")}, "named twice"),
        ({"record": ("top_logprobs:1025",)}, "from 1 to 1024"),
        ({"record": ("sampling_mask",), "sampling": Sampling()}, "sampling_mask needs top_p, top_k or min_p"),
    ],
)
def test_what_cannot_be_recorded_is_refused(service: LocalService, changes: dict[str, Any], said: str) -> None:
    with service.client(timeout_s=WAIT_S) as client, pytest.raises(InvalidJob, match=said) as caught:
        client.submit(Job(task="talk", instance={}, **changes))
    assert caught.value.fields["field"] == "record"


def test_a_record_that_the_engine_does_not_give_is_refused_with_its_name() -> None:
    engine = EmbeddedEngine(base_policy(), model="small-7b")
    with LocalService(handlers={"talk": Talk}, engine=engine) as running, running.client(timeout_s=WAIT_S) as client:
        said = r"backend local \(small-7b\) as it was started does not give the record experts: its policy is dense$"
        with pytest.raises(InvalidJob, match=said):
            client.submit(Job(task="talk", instance={}, record=("experts",)))
        limit = base_policy().shape.vocabulary
        with pytest.raises(InvalidJob, match=rf"backend local \(small-7b\) .* gives at most top_logprobs:{limit}$"):
            client.submit(Job(task="talk", instance={}, record=(f"top_logprobs:{limit + 1}",)))
        client.submit(Job(task="talk", instance={}, record=("top_logprobs:3",), sampling=SAMPLING))
        (trajectory,) = client.stream()
        assert trajectory.records["top_ids"].shape == (trajectory.generated_tokens, 3)


def test_records_beyond_the_sessions_quota_are_dropped_by_name() -> None:
    topology = {"rollout_broker": {"max_held_bytes": 2**20, "max_session_share": 0.1}}
    with LocalService(handlers={"talk": Talk}, engine=RecordingEngine(), topology=topology) as running:
        trajectory = run(running, instance={"turns": 16}, sampling=msgspec.structs.replace(SAMPLING, max_tokens=200))
        assert len(trajectory.token_ids) > 300
        why = "the session's quota was full"
        assert trajectory.result.records_dropped == dict.fromkeys(("top_logprobs", "sampling_mask", "experts"), why)
        assert len(trajectory.records) == 0
        assert trajectory.generated_tokens > 0


def test_15_mb_of_experts_arrive(service: LocalService) -> None:
    long = {"turns": 2, "text": "abcdefghij" * 3150}
    trajectory = run(service, instance=long, episode=EpisodeLimits(max_tokens=40_000), record=("experts",))
    experts = trajectory.records["experts"]
    assert experts.nbytes > 12_000_000
    np.testing.assert_array_equal(experts, experts_of(trajectory.token_ids)[:-1])
