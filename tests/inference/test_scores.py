"""Scores of texts: against a rescoring in float64, beside generations, and of bad input."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from prorl_zmq.data.scores import Scores, first_scores, joined_scores, scores_in_rows, scores_of_rows
from prorl_zmq.errors import Busy, EngineFailed
from prorl_zmq.inference.embedded.embedded_engine import SCORED_TOKENS, EmbeddedEngine
from prorl_zmq.inference.engine import checked_scores
from prorl_zmq.inference.hosting import score_queue
from prorl_zmq.inference.hosting.score_queue import ScoreQueue
from prorl_zmq.inference.policy import Policy
from prorl_zmq.inference.prompt_logprobs import scores_by_rank
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.base import Refused
from prorl_zmq.wire.messages.engines import Abort, AnyEngineReply, Score, Scored
from prorl_zmq.wire.messages.jobs import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    InWorld = Callable[[Callable[[Any], Any]], None]

CLOSE = 1e-4
"""Most that a log-prob may differ from that of float64, beside a millionth of its own: float32 has 7 digits."""
PARTS = 8
CLOCK_S = 0.002
"""The timers of uvloop count milliseconds."""


def text(length: int, seed: int = 0, vocabulary: int = 50) -> np.ndarray[Any, Any]:
    return np.random.default_rng([seed, length]).integers(0, vocabulary, length).astype(np.int32)


def in_float64(policy: Policy, token_ids: Any) -> Any:
    """All log-probs of each position but the first, float64 [T - 1, vocabulary]."""
    wide = Policy({name: value.astype(np.float64) for name, value in policy.parameters.items()})  # type: ignore[misc]
    logits = wide.logits(wide.contexts(token_ids))[1:]
    logits = logits - logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def check_exact(scores: Scores, token_ids: Any, expected: Any, top: int) -> None:
    """Check scores against all log-probs, float64 [T - 1, vocabulary]; equally likely tokens may be in any order."""
    assert (scores.logprobs.dtype, scores.top_ids.dtype, scores.top_logprobs.dtype) == ("f4", "i4", "f4")
    assert scores.top_ids.shape == scores.top_logprobs.shape == (len(token_ids), top)
    assert scores.logprobs[0] == 0
    assert np.all(scores.top_ids[0] == -1)
    assert np.all(scores.top_logprobs[0] == 0)
    own = np.take_along_axis(expected, token_ids[1:, None].astype(np.int64), 1)[:, 0]
    np.testing.assert_allclose(scores.logprobs[1:], own, atol=CLOSE, rtol=1e-6)
    np.testing.assert_allclose(scores.top_logprobs[1:], -np.sort(-expected, 1)[:, :top], atol=CLOSE, rtol=1e-6)
    named = np.take_along_axis(expected, scores.top_ids[1:].astype(np.int64), 1)
    np.testing.assert_allclose(scores.top_logprobs[1:], named, atol=CLOSE, rtol=1e-6)


@pytest.mark.parametrize("length", [1, 2, 17, SCORED_TOKENS + 1, 2 * SCORED_TOKENS + 100])
@pytest.mark.parametrize("top", [0, 1, 20])
def test_embedded_scores_are_those_of_float64(policy: Policy, length: int, top: int) -> None:
    token_ids = text(length)
    scores = asyncio.run(EmbeddedEngine(policy, 3).score(token_ids, top, "job"))
    check_exact(scores, token_ids, in_float64(policy, token_ids), top)
    assert scores.weight_version == 3


def test_scores_are_of_one_version_though_weights_change(
    policy: Policy, make_policy: Callable[..., Policy], tmp_path: Path
) -> None:
    other = make_policy(7)
    other.save(tmp_path / "other.npz")
    token_ids = text(6 * SCORED_TOKENS)

    async def scored() -> tuple[Scores, int]:
        engine = EmbeddedEngine(policy)
        scoring = asyncio.create_task(engine.score(token_ids, 2, "job"))
        await asyncio.sleep(0)
        engine._take_weights(other)
        await engine.end_update(1)
        return await scoring, engine.weight_version

    scores, version = asyncio.run(scored())
    assert (scores.weight_version, version) == (0, 1)
    check_exact(scores, token_ids, in_float64(policy, token_ids), 2)


@pytest.mark.parametrize(
    ("token_ids", "top", "words"),
    [
        (text(0), 1, "empty"),
        (np.array([1, 50], np.int32), 1, "outside of 0 to 49"),
        (np.zeros(32_768, np.int32), 1, "no room in a context of 32768"),
        (text(5), 51, "top=51: a position has 0 to 50"),
        (text(5), -1, "top=-1"),
    ],
)
def test_what_cannot_be_scored_is_refused(policy: Policy, token_ids: Any, top: int, words: str) -> None:
    with pytest.raises(EngineFailed, match=words) as refused:
        asyncio.run(EmbeddedEngine(policy).score(token_ids, top, "job"))
    assert refused.value.refused


@pytest.mark.parametrize("merged", [False, True])
def test_a_token_among_the_likeliest_has_an_entry_of_its_own_or_not(merged: bool) -> None:
    """A list by position has k + 1 entries; a dictionary by id has k if the token is among the likeliest."""
    token_ids = np.array([9, 4, 7], np.int32)
    first = [(4, -0.5, 2), (3, -0.4, 1)] if merged else [(4, -0.5, 2), (3, -0.4, 1), (4, -0.5, 2)]
    entries = [*first, (7, -8.0, 40), (1, -0.1, 1), (2, -0.2, 2)]
    ids, logprobs, ranks = zip(*entries, strict=True)
    scores = scores_by_rank(token_ids, 2, [len(first), 3], (ids, logprobs, ranks))
    assert scores.top_ids.tolist() == [[-1, -1], [3, 4], [1, 2]]
    np.testing.assert_allclose(scores.logprobs, [0, -0.5, -8.0])
    np.testing.assert_allclose(scores.top_logprobs[1:], [[-0.4, -0.5], [-0.1, -0.2]])
    assert scores_by_rank(token_ids[:1], 2, [], ((), (), ())).top_ids.tolist() == [[-1, -1]]
    with pytest.raises(EngineFailed, match="another text"):
        scores_by_rank(token_ids[::-1], 2, [len(first), 3], (ids, logprobs, ranks))
    with pytest.raises(EngineFailed, match="1 tokens of a text of 3"):
        scores_by_rank(token_ids, 2, [len(first)], (ids, logprobs, ranks))


def good(tokens: int = 4, top: int = 2) -> Scores:
    rest = tokens - 1
    ids, logprobs = np.zeros((rest, top), np.int32), np.full((rest, top), -1, np.float32)
    return joined_scores([first_scores(top), Scores(np.full(rest, -1, np.float32), ids, logprobs)])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logprobs": np.zeros(3, np.float32)}, "logprobs float32"),
        ({"top_ids": np.zeros((4, 2), np.float32)}, "top_ids float32"),
        ({"top_ids": np.full((4, 2), 50, np.int32)}, "outside of 0 to 49"),
        ({"top_logprobs": np.full((4, 2), np.nan, np.float32)}, "not a logarithm"),
        ({"top_logprobs": np.full((4, 2), -np.inf, np.float32)}, "not a logarithm"),
        ({"logprobs": np.full(4, 0.5, np.float32)}, "not a logarithm"),
    ],
)
def test_an_engines_malformed_scores_are_rejected(change: dict[str, Any], words: str) -> None:
    checked_scores(good(), 4, 2, 50)
    with pytest.raises(EngineFailed, match=words):
        checked_scores(replace(good(), **change), 4, 2, 50)


@pytest.mark.parametrize("impossible", [-np.inf, -9999.0])
@pytest.mark.parametrize("name", ["logprobs", "top_logprobs"])
def test_a_token_of_probability_zero_is_the_texts_fault(name: str, impossible: float) -> None:
    scores = good()
    getattr(scores, name)[2] = impossible
    with pytest.raises(EngineFailed, match="a probability above 0") as failed:
        checked_scores(scores, 4, 2, 50)
    assert failed.value.fields.get("refused")
    for name_of_broken in ("logprobs", "top_logprobs"):
        broken = good()
        getattr(broken, name_of_broken)[2] = np.nan
        with pytest.raises(EngineFailed) as failed:
            checked_scores(broken, 4, 2, 50)
        assert not failed.value.fields.get("refused"), "the engine is broken"


def test_rows_of_a_trajectory_hold_scores(policy: Policy) -> None:
    token_ids = text(30)
    scores = asyncio.run(EmbeddedEngine(policy).score(token_ids, 3, "job"))
    found_ids, found = scores_of_rows(*scores_in_rows(token_ids, scores), 3, 5)
    np.testing.assert_array_equal(found_ids, token_ids)
    for name in ("logprobs", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(found, name), getattr(scores, name))
        assert getattr(found, name).flags.c_contiguous
    assert found.weight_version == 5


def test_a_host_scores(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        token_ids = text(700)
        assert world.broker.requests == [] or world.broker.requests[0].backend.scores
        scores = await world.client.score(world.backend, "job", token_ids, 5, 10.0)
        check_exact(scores, token_ids, in_float64(world.policy, token_ids), 5)
        with pytest.raises(EngineFailed, match="backend engine-0: a prompt of 40000 tokens") as refused:
            await world.client.score(world.backend, "job", np.zeros(40_000, np.int32), 5, 10.0)
        assert refused.value.refused

    in_world(test)


def test_a_host_refuses_what_its_engine_cannot_do(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        world.engine._description = replace(world.engine.description, scores=False)
        with pytest.raises(EngineFailed, match="the engine of embedded cannot score") as refused:
            await world.client.score(world.backend, "job", text(7), 1, 10.0)
        assert refused.value.refused
        raw = world.raw()
        raw.send(b"", codec.encode(Score("r1", job_id="job", top=2)))
        reply = await raw.receive(AnyEngineReply)
        assert isinstance(reply, Refused)
        assert "2 frames" in reply.error.message

    in_world(test)


def test_a_repeated_request_is_scored_once(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        asked = []
        score = world.engine.score

        async def noted(token_ids: Any, top: int, job_id: str) -> Scores:
            asked.append(job_id)
            await asyncio.sleep(0.1)
            return await score(token_ids, top, job_id)

        world.engine.score = noted
        first, second, message = world.raw(), world.raw(), codec.encode(Score("r1", job_id="job", top=2))
        for connection in (first, second, second):
            connection.send(b"", message, text(9).tobytes())
        for connection in (first, second):
            assert isinstance(await connection.receive(AnyEngineReply), Scored)
        assert asked == ["job"]

    in_world(test)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.01)


class Held:
    """An engine whose scores end when a test says so."""

    def __init__(self) -> None:
        self.description = SimpleNamespace(scores=True, vocabulary=50, model="held")
        self.running: dict[str, asyncio.Event] = {}

    async def score(self, token_ids: Any, top: int, job_id: str) -> Scores:
        self.running[job_id] = asyncio.Event()
        try:
            await self.running[job_id].wait()
        finally:
            del self.running[job_id]
        return good(len(token_ids), top)


class Queue:
    """A queue with what is around it."""

    def __init__(self) -> None:
        self.engine, self.generating = Held(), False
        self.answers: list[str] = []
        self.failures: list[str] = []
        self.queue = ScoreQueue(
            self.engine,  # type: ignore[arg-type]
            lambda: self.generating,
            lambda _: nullcontext(),
            lambda _, reply, arrays: self.answers.append(reply.request_id),
            lambda _, request_id, error: self.failures.append(request_id),
        )

    def add(self, *names: str) -> None:
        for name in names:
            self.queue.add([], Score(name, job_id=name, top=1), text(4))

    async def running(self) -> set[str]:
        for _ in range(3):
            await asyncio.sleep(0)
        return set(self.engine.running)


def test_texts_wait_for_generations() -> None:
    async def test() -> None:
        one = Queue()
        names = [f"r{number}" for number in range(10)]
        one.add(*names)
        assert await one.running() == set(names[: score_queue.AT_ONCE])
        one.generating = True
        for name in names[:4]:
            one.engine.running[name].set()
        assert await one.running() == set(), "the share of those four is used up"
        await asyncio.sleep(0.05)
        assert await one.running() == {"r4"}, "one at a time beside generations"
        began = time.monotonic()
        await asyncio.sleep(0.1)
        one.engine.running["r4"].set()
        assert await one.running() == set()
        took_s = time.monotonic() - began
        await until(lambda: one.engine.running)
        assert time.monotonic() - began > 0.95 * took_s / score_queue.SHARE
        assert await one.running() == {"r5"}
        one.engine.running["r5"].set()
        assert await one.running() == set()
        one.generating = False
        one.queue.generations_ended()
        assert len(await one.running()) <= 1, "others may come soon"
        await until(lambda: len(one.engine.running) == 4)
        assert await one.running() == {"r6", "r7", "r8", "r9"}, "no generation is left to wait for"
        assert one.answers == names[:6]
        for task in one.queue.close():
            task.cancel()
        assert await one.running() == set()

    asyncio.run(test())


def test_aborted_and_closed_requests() -> None:
    async def test() -> None:
        one = Queue()
        names = [f"r{number}" for number in range(8)]
        one.add(*names)
        one.queue.abort("r0")
        one.queue.abort("r5")
        one.queue.abort("unknown")
        assert await one.running() == {"r1", "r2", "r3", "r4"}
        tasks = one.queue.close()
        assert len(tasks) == 4
        assert one.failures == ["r6", "r7"]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert one.answers == []

    asyncio.run(test())


def test_a_full_queue_is_busy(in_world: InWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_queue, "WAITING_LIMIT", 0)

    async def test(world: Any) -> None:
        with pytest.raises(Busy, match="0 texts wait to be scored here, which is the limit") as full:
            await world.client.score(world.backend, "job", text(5), 2, 30.0)
        assert full.value.fields == {"retry_after_s": score_queue.RETRY_S}
        monkeypatch.setattr(score_queue, "WAITING_LIMIT", 1)
        assert len((await world.client.score(world.backend, "job", text(5), 2, 30.0)).logprobs) == 5

    in_world(test)


def test_generations_go_on_beside_scoring(in_world: InWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of a text costs one step of generations at most, and each text is followed by three times its time."""
    steps: list[None] = []
    texts: list[tuple[float, float, int]] = []
    """When the scoring of each began and ended, and the steps between."""

    async def test(world: Any) -> None:
        loop, step, score = asyncio.get_running_loop(), world.engine._step, world.engine.score

        def counted_step() -> None:
            steps.append(None)
            step()

        async def timed_score(*arguments: Any) -> Scores:
            began, before = loop.time(), len(steps)
            scores: Scores = await score(*arguments)
            texts.append((began, loop.time(), len(steps) - before))
            return scores

        monkeypatch.setattr(world.engine, "_step", counted_step)
        monkeypatch.setattr(world.engine, "score", timed_score)

        async def generate_forever() -> None:
            while True:
                await world.client.generate(world.backend, "job", text(10), Sampling(1.0, 30_000), ())

        async def score_forever() -> None:
            while True:
                await world.client.score(world.backend, "job", text(PARTS * SCORED_TOKENS), 20, 60.0)

        tasks = [asyncio.create_task(generate_forever()) for _ in range(8)]
        try:
            await until(lambda: len(steps) > 50)
            tasks += [asyncio.create_task(score_forever()) for _ in range(8)]
            await until(lambda: len(texts) > 5)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for (began, ended, between), (next_began, _, _) in pairwise(texts):
            assert between >= PARTS - 1
            assert next_began - ended >= 3 * (ended - began) - CLOCK_S

    in_world(test)


def test_cancelled_scoring_frees_its_place(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        world.engine.score = Held().score
        raw = world.raw()
        raw.send(b"", codec.encode(Score("r1", job_id="job", top=2)), text(9).tobytes())
        await until(lambda: "r1" in world.host._scores._asked)
        raw.send(b"", codec.encode(Abort("r1")))
        await until(lambda: "r1" not in world.host._scores._asked)

    in_world(test)
