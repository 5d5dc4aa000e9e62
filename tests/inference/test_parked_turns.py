"""Turns that a real host with the embedded engine holds back, while the figures of its KV cache say that it is full."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from prorl_zmq.errors import EngineFailed, RequestTimeout
from prorl_zmq.inference.kv_figures import KvFigures
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.backends import BackendAlive, BackendHeld
from prorl_zmq.wire.messages.base import Done
from prorl_zmq.wire.messages.engines import (
    Abort,
    AnyEngineReply,
    EngineHealth,
    EngineReady,
    Generate,
    Generated,
    Parked,
    Score,
    Scored,
    WeightUpdate,
)
from prorl_zmq.wire.messages.jobs import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    InWorld = Callable[[Callable[[Any], Any]], None]

PROMPT = np.arange(1, 20, dtype=np.int32)
CAPACITY = 30
"""One of the prompts fits."""
FULL, CALM = KvFigures(CAPACITY, 1.0, 0, 2), KvFigures(CAPACITY, 0.0, 0, 0)
SAMPLING = Sampling(1.0, 5, 3)


def turn(request_id: str, job: str, age_s: float = 0.0) -> bytes:
    return codec.encode(Generate(request_id, job_id=job, sampling=SAMPLING, age_s=age_s))


async def fill(world: Any, held: int = 4) -> None:
    """Restart the world's host with an engine whose cache is full, and let the jobs `old` and `new` have had a turn."""
    world.stop.set()
    await world.running
    world.stop = asyncio.Event()
    world.broker.requests.clear()

    def answer(request: Any) -> Any:
        is_beat = isinstance(request, BackendAlive) and request.room is not None
        return BackendHeld(request.request_id, held) if is_beat else Done(request.request_id)

    world.broker.answers = answer
    world.start_host(CALM)
    await beats(world)  # the host knows then that jobs hold it
    raw = world.raw()
    for job in ("old", "new"):
        raw.send(b"", turn(f"first-{job}", job, 50.0 if job == "old" else 0.0), PROMPT.tobytes())
        assert isinstance(await raw.receive(AnyEngineReply), Generated)
    await beats(world)
    world.engine.figures = FULL
    await beats(world)


async def beats(world: Any, count: int = 2) -> None:
    """Wait for heartbeats that begin from now on."""
    seen = len(world.broker.requests)
    await world.broker.until(lambda: len(world.broker.requests) >= seen + count)


async def parked(world: Any, request_id: str = "p1") -> Any:
    """Return a client whose turn is parked."""
    raw = world.raw()
    raw.send(b"", turn(request_id, "new"), PROMPT.tobytes())
    assert await raw.receive(AnyEngineReply) == Parked(request_id, world.host._figures.parking.park_s)
    return raw


def test_a_parked_turn_has_the_tokens_log_probs_and_versions_of_any_other(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        alone = await world.client.generate(world.backend, "alone", PROMPT, SAMPLING, ())
        await fill(world)
        marks: list[str] = []
        asked = asyncio.create_task(
            world.client.generate(world.backend, "new", PROMPT, SAMPLING, (), on_parked=lambda: marks.append("parked"))
        )
        await world.broker.until(lambda: getattr(world.broker.requests[-1], "load", None) and marks)
        await beats(world)
        load = world.broker.requests[-1].load
        assert (load.running, load.parked) == (0, 1)
        old = await world.client.generate(world.backend, "old", PROMPT, SAMPLING, (), age_s=60.0)
        assert not asked.done(), "older groups go on meanwhile"
        world.engine.figures = CALM
        done = await asked
        for one in (done, old):
            np.testing.assert_array_equal(one.token_ids, alone.token_ids)
            np.testing.assert_array_equal(one.logprobs, alone.logprobs)
            assert one.spans == alone.spans
        assert marks == ["parked"]
        assert done.room_wait_s > 0.0
        assert old.room_wait_s == alone.room_wait_s == 0.0

    in_world(test)


@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
def test_new_weights_do_not_wait_for_parked_turns(
    in_world: InWorld, make_policy: Any, tmp_path: Path, mode: Any
) -> None:
    make_policy(5).save(tmp_path / "new.npz")

    async def test(world: Any) -> None:
        await fill(world)
        waiting, trainer = await parked(world), world.raw()
        trainer.send(b"", codec.encode(WeightUpdate("u1", "load", 7, str(tmp_path / "new.npz"), mode)))
        assert (await trainer.receive(AnyEngineReply)).weight_version == 7
        await beats(world)
        assert len(world.host._parked) == 1
        world.engine.figures = CALM
        done = await waiting.receive(AnyEngineReply)
        assert [(span.weight_version, span.start, span.end) for span in done.spans] == [(7, 0, 5)]

    in_world(test)


def test_a_cancelled_turn_is_forgotten_at_once(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        await fill(world)
        raw = await parked(world)
        raw.send(b"", codec.encode(Abort("p1")))
        raw.send(b"", codec.encode(EngineHealth("h1")))
        assert await raw.receive(AnyEngineReply) == EngineReady("h1", 0)
        assert (len(world.host._parked), len(world.host._figures.parking)) == (0, 0)
        assert world.host._envelopes == {}
        rollouts = world.host._figures.parking._rollouts
        assert [(job, one.under_way) for job, one in rollouts.items()] == [("old", 0), ("new", 0)]

    in_world(test)


def test_a_client_that_asks_again_learns_that_its_turn_is_parked(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        await fill(world)
        first, second = await parked(world), world.raw()
        second.send(b"", turn("p1", "new"), PROMPT.tobytes())
        for one in (second, first):
            assert isinstance(await one.receive(AnyEngineReply), Parked)
        world.engine.figures = CALM
        assert await first.receive(AnyEngineReply) == await second.receive(AnyEngineReply)

    in_world(test)


def test_a_host_that_stops_fails_its_parked_turns(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        await fill(world)
        raw = await parked(world)
        world.stop.set()
        error = (await raw.receive(AnyEngineReply)).error
        assert (error.code, error.fields["unreachable"]) == ("engine_failed", True)
        await world.running

    in_world(test)


def test_texts_are_scored_while_turns_are_parked(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        await fill(world)
        raw = await parked(world)
        for number in range(8):
            raw.send(b"", codec.encode(Score(f"s{number}", job_id="teacher")), PROMPT.tobytes())
        assert {type(await raw.receive(AnyEngineReply)) for _ in range(8)} == {Scored}
        assert len(world.host._parked) == 1

    in_world(test)


def test_a_parked_turn_is_not_late(in_world: InWorld) -> None:
    """Its client waits for as long as it may be parked, and then for the answer."""

    async def test(world: Any) -> None:
        await fill(world)
        world.host._figures.parking.park_s = 2.0
        done = await world.client.generate(world.backend, "new", PROMPT, SAMPLING, (), 1.0)
        assert len(done.token_ids) == 5

    in_world(test)


def test_an_engine_without_figures_parks_nothing(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        assert world.host._figures.parking is None
        with pytest.raises((EngineFailed, RequestTimeout)):
            await world.client.generate(world.backend, "new", PROMPT, Sampling(1.0, 30_000, 3), (), 0.2)
        assert len(world.host._parked) == 0

    in_world(test)
