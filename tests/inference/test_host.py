from __future__ import annotations

import asyncio
import dataclasses
import signal
import subprocess
import sys
import threading
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zmq
from msgspec.structs import replace

from prorl_zmq.errors import (
    ConfigError,
    DuplicateBackend,
    EndpointInUse,
    EngineFailed,
    InvalidEndpoint,
    UnknownBackend,
)
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.engine import KvEventSource
from prorl_zmq.inference.hosting import host as host_module
from prorl_zmq.inference.hosting.host import EngineHost, HostOptions
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.backends import AddBackend, AnyBackendRequest, BackendAlive, DrainBackend, RemoveBackend
from prorl_zmq.wire.messages.base import PROTOCOL_VERSION, Done, Refused
from prorl_zmq.wire.messages.engines import (
    Abort,
    AnyEngineReply,
    EngineHealth,
    EngineReady,
    Generate,
    Generated,
    VersionSpan,
    WeightUpdate,
)
from prorl_zmq.wire.messages.front_door import Submit
from prorl_zmq.wire.messages.jobs import Sampling
from prorl_zmq.wire.sockets import bind, open_socket

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from prorl_zmq.inference.engine import Generation

    InWorld = Callable[[Callable[[Any], Any]], None]

PROMPT = np.arange(1, 20, dtype=np.int32)


def generate(request_id: str, max_tokens: int = 5, seed: int | None = None) -> bytes:
    return codec.encode(Generate(request_id, job_id="job", sampling=Sampling(1.0, max_tokens, seed)))


def test_it_registers_and_sends_heartbeats(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        await world.broker.until(lambda: len(world.broker.requests) >= 4)
        first, *later = world.broker.requests
        assert isinstance(first, AddBackend)
        assert first.heartbeats
        assert first.backend.backend_id == "engine-0"
        assert first.backend.endpoint == world.host.endpoint
        assert first.backend.chat.kind == "embedded"
        assert first.backend.version == version("prorl-zmq")
        assert all(isinstance(request, BackendAlive) for request in later)

    in_world(test)


def test_heartbeats_say_what_the_engine_does(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        done, endless = world.raw(), world.raw()
        done.send(b"", generate("r1", 40), PROMPT.tobytes())
        await done.receive(AnyEngineReply)
        endless.send(b"", generate("r2", 30_000), PROMPT.tobytes())
        beats = world.broker.requests
        await world.broker.until(lambda: any(getattr(beat, "load", None) and beat.load.running for beat in beats))
        load = beats[-1].load
        assert (load.running, load.prompt_tokens, load.generated_tokens) == (1, len(PROMPT), 40)
        assert load.memory_bytes > 2**20
        assert max(beat.load.tokens_per_s for beat in beats if isinstance(beat, BackendAlive)) > 0
        endless.send(b"", codec.encode(Abort("r2")))

    in_world(test)


@pytest.mark.parametrize(
    ("odd", "problem"),
    [
        ({"cached_tokens": np.int64(3)}, ""),
        ({"spans": (VersionSpan(np.int64(0), np.int32(0), np.int64(4)),)}, ""),  # type: ignore[arg-type]
        ({"cached_tokens": float("nan")}, "cached_tokens"),
        ({"cached_tokens": None}, "cached_tokens"),
        ({"spans": None}, "version spans"),
        ({"finish_reason": "tired"}, "finish reason 'tired'; there are stop, length, abort"),
        ({"token_ids": np.array([1.5, 2, 3, 4])}, "token ids of type float64 [4]"),
        ({"token_ids": [1, 2, 3, 4]}, ""),
        ({"logprobs": np.array([["x"] * 4])}, "log-probs of type <U1 [1, 4]"),
    ],
)
def test_what_an_engine_says_oddly_costs_one_answer_and_no_heartbeat(
    in_world: InWorld, odd: dict[str, Any], problem: str
) -> None:
    """NumPy's integers ended the host, and NaN made every later heartbeat malformed."""

    async def test(world: Any) -> None:
        client, beats = world.raw(), world.broker.requests
        given = world.engine.generate

        async def say(*arguments: Any) -> Generation:
            return dataclasses.replace(await given(*arguments), **odd)

        world.engine.generate = say
        client.send(b"", generate("r1", 4, seed=1), PROMPT.tobytes())
        reply = await client.receive(AnyEngineReply)
        if problem:
            assert problem in reply.error.message
        else:
            assert isinstance(reply, Generated)
        count = len(beats)
        await world.broker.until(lambda: len(beats) >= count + 2 and isinstance(beats[-1], BackendAlive))

    in_world(test)


@pytest.mark.parametrize(("name", "value"), [("context_tokens", float("nan")), ("max_in_flight", "many"), ("model", 7)])
def test_an_engine_that_describes_itself_wrongly_cannot_start(in_world: InWorld, name: str, value: object) -> None:
    async def test(world: Any) -> None:
        engine = EmbeddedEngine(world.policy)
        description = dataclasses.replace(engine.description, **{name: value})
        wrong = type("Wrong", (EmbeddedEngine,), {"description": description})(world.policy)
        options = HostOptions(
            endpoint=f"ipc://{world.folder}/wrong", backend_broker=world.broker.endpoint, backend_id="wrong"
        )
        with pytest.raises(EngineFailed, match=f"cannot start: the engine describes itself wrongly: .*{name}"):
            EngineHost(world.context, wrong, options)

    in_world(test)


@pytest.mark.parametrize(("version", "expected"), [(np.int64(3), 3), (float("nan"), None), (-1, None)])
def test_a_weight_version_that_is_none_ends_the_host_with_the_reason(
    in_world: InWorld, version: Any, expected: int | None
) -> None:
    async def test(world: Any) -> None:
        def told() -> bool:
            return getattr(world.broker.requests[-1], "weight_version", None) == expected

        await world.broker.until(lambda: world.broker.requests)
        world.engine.__class__ = type("Odd", (EmbeddedEngine,), {"weight_version": version})
        if expected is not None:
            await world.broker.until(told)
            return
        with pytest.raises(EngineFailed, match="says that its weight version is"):
            await world.running
        world.running = asyncio.create_task(asyncio.sleep(0))

    in_world(test)


def test_a_health_check_that_fails_is_a_problem_and_no_end(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        async def ill() -> None:
            raise ValueError("a fault of its own")

        world.engine.check_health = ill
        beats = world.broker.requests
        await world.broker.until(lambda: any("fault of its own" in getattr(beat, "problem", "") for beat in beats))

    in_world(test)


def test_a_version_that_is_told_is_that_of_the_next_tokens(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        client = world.raw()
        client.send(b"", codec.encode(WeightUpdate("n1", "set", 6)))
        assert (await client.receive(AnyEngineReply)).weight_version == 6
        client.send(b"", generate("r1", 4), PROMPT.tobytes())
        assert [span.weight_version for span in (await client.receive(AnyEngineReply)).spans] == [6]
        await world.broker.until(lambda: getattr(world.broker.requests[-1], "weight_version", 0) == 6)

    in_world(test)


def test_an_engine_that_is_not_well_says_why(in_world: InWorld) -> None:
    """It stays on the list: without that, nobody could give a half-updated engine its weights again."""

    async def test(world: Any) -> None:
        async def ill() -> None:
            raise EngineFailed("it coughs")

        def told(problem: str) -> bool:
            beat = world.broker.requests[-1]
            return isinstance(beat, BackendAlive) and beat.problem == problem

        await world.broker.until(lambda: world.broker.requests and told(""))
        world.engine.check_health = ill
        await world.broker.until(lambda: told("it coughs"))
        del world.engine.check_health
        await world.broker.until(lambda: told(""))

    in_world(test)


def test_a_generation_that_is_aborted_before_it_begins_leaves_nothing(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        client = world.raw()
        for number in range(50):
            client.send(b"", generate(f"r{number}", 30_000), PROMPT.tobytes())
            client.send(b"", codec.encode(Abort(f"r{number}")))
        client.send(b"", codec.encode(EngineHealth("h1")))
        await client.receive(AnyEngineReply)
        client.send(b"", codec.encode(EngineHealth("h2")))
        assert (await client.receive(AnyEngineReply)).in_flight == 0
        assert world.host._envelopes == {}

    in_world(test)


@pytest.mark.parametrize("said", [-1, 2**63])
def test_prefix_cache_hits_that_cannot_be_are_not_believed(in_world: InWorld, said: int) -> None:
    """One of -1 made every later heartbeat malformed."""

    async def test(world: Any) -> None:
        honest = world.engine.generate

        async def lying(*arguments: Any) -> Generation:
            return dataclasses.replace(await honest(*arguments), cached_tokens=said)

        world.engine.generate = lying
        client = world.raw()
        client.send(b"", generate("r1", 4), PROMPT.tobytes())
        generated = await client.receive(AnyEngineReply)
        assert generated.cached_tokens == (len(PROMPT) if said > 0 else 0)
        beats = world.broker.requests
        await world.broker.until(lambda: getattr(beats[-1], "load", None) and beats[-1].load.generated_tokens == 4)

    in_world(test)


def test_an_engine_that_is_dead_ends_its_host(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        async def dead() -> None:
            raise EngineFailed("it is dead", fatal=True)

        world.engine.check_health = dead
        with pytest.raises(EngineFailed, match="it is dead"):
            await asyncio.wait_for(asyncio.shield(world.running), 10)
        world.start_host()

    in_world(test)


def test_a_restarted_broker_is_told_at_once(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        broker = world.broker
        await broker.until(lambda: any(isinstance(request, BackendAlive) for request in broker.requests))
        broker.requests.clear()

        def restarted(request: AnyBackendRequest) -> Done | Refused:
            if isinstance(request, BackendAlive) and not any(isinstance(r, AddBackend) for r in broker.requests):
                return Refused(request.request_id, UnknownBackend("who?", backend="engine-0").info())
            return Done(request.request_id)

        broker.answers = restarted
        await broker.until(lambda: len(broker.requests) >= 4)
        assert [type(request) for request in broker.requests[:3]] == [BackendAlive, AddBackend, BackendAlive]

    in_world(test)


def test_while_its_name_is_taken_it_keeps_asking_and_sends_no_heartbeat(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        broker = world.broker
        broker.answers = lambda r: Refused(r.request_id, DuplicateBackend("taken", backend="engine-0").info())
        await broker.until(lambda: len(broker.requests) >= 4)
        assert {type(request) for request in broker.requests} == {AddBackend}

    in_world(test)


def test_a_backend_that_is_refused_for_good_ends_its_host_with_the_reason(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        broker = world.broker
        await broker.until(lambda: any(isinstance(request, BackendAlive) for request in broker.requests))
        refusal = ConfigError("engine-0 is the model of an adapter", key="name").info()
        broker.answers = lambda r: Refused(r.request_id, refusal)
        await broker.until(lambda: len(broker.requests) >= 4)  # refused heartbeats end nothing
        broker.requests.clear()
        unknown = UnknownBackend("who?", backend="engine-0").info()
        broker.answers = lambda r: Refused(r.request_id, refusal if isinstance(r, AddBackend) else unknown)
        with pytest.raises(ConfigError, match="engine-0 is the model of an adapter"):
            await asyncio.wait_for(asyncio.shield(world.running), 10)
        assert sum(isinstance(request, AddBackend) for request in broker.requests) <= 2
        world.start_host()

    in_world(test)


def test_heartbeats_do_not_pile_up_for_a_silent_broker(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        broker = world.broker
        broker.answers = lambda _: None
        await broker.until(lambda: len(broker.requests) >= 8)  # over a second line after five
        broker.answers = lambda r: Done(r.request_id)
        await broker.until(lambda: isinstance(broker.requests[-1], BackendAlive))

    in_world(test)


def test_it_leaves_the_broker_when_it_stops(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        broker = world.broker
        await broker.until(lambda: any(isinstance(request, BackendAlive) for request in broker.requests))
        running = world.raw()
        running.send(b"", generate("r1", 30_000), PROMPT.tobytes())
        running.send(b"", codec.encode(EngineHealth("h1")))
        assert (await running.receive(AnyEngineReply)).in_flight == 1
        world.stop.set()
        await world.running
        await broker.until(lambda: isinstance(broker.requests[-1], RemoveBackend))
        assert isinstance(broker.requests[-2], DrainBackend)
        refused = await running.receive(AnyEngineReply)
        assert (refused.request_id, refused.error.code) == ("r1", "engine_failed")
        await world.host.close()

    in_world(test)


def test_a_host_that_leaves_a_broker_that_forgot_it_does_not_register_again(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        broker = world.broker
        await broker.until(lambda: any(isinstance(request, BackendAlive) for request in broker.requests))
        broker.requests.clear()

        def forgotten(request: AnyBackendRequest) -> Done | Refused:
            if isinstance(request, DrainBackend | RemoveBackend):
                return Refused(request.request_id, UnknownBackend("who?", backend="engine-0").info())
            return Done(request.request_id)

        broker.answers = forgotten
        world.stop.set()
        await world.running
        assert [type(request) for request in broker.requests[-2:]] == [DrainBackend, RemoveBackend]

    in_world(test)


def test_stopping_does_not_wait_for_a_broker_that_is_gone(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        await world.broker.until(lambda: any(isinstance(r, BackendAlive) for r in world.broker.requests))
        world.broker.close()
        world.stop.set()
        async with asyncio.timeout(3):
            await world.running

    in_world(test)


def test_it_generates_reports_and_takes_new_weights(in_world: InWorld, make_policy: Any, tmp_path: Path) -> None:
    make_policy(5).save(tmp_path / "new.npz")

    async def test(world: Any) -> None:
        raw = world.raw()
        raw.send(b"", generate("g1", 5), PROMPT.tobytes())
        generated = await raw.receive(AnyEngineReply)
        assert isinstance(generated, Generated)
        assert generated.finish_reason == "length"
        world.broker.requests.clear()
        raw.send(b"", codec.encode(WeightUpdate("u1", "load", 7, str(tmp_path / "new.npz"))))
        ready = await raw.receive(AnyEngineReply)
        assert ready.times.load_s >= ready.times.pause_s > 0
        assert replace(ready, times=None) == EngineReady("u1", 7)
        await world.broker.until(
            lambda: any(isinstance(r, BackendAlive) and r.weight_version == 7 for r in world.broker.requests)
        )
        raw.send(b"", codec.encode(WeightUpdate("u2", "load", 8, str(tmp_path / "missing.npz"))))
        refused = await raw.receive(AnyEngineReply)
        assert isinstance(refused, Refused)
        assert refused.error.code == "invalid_weights"
        raw.send(b"", codec.encode(EngineHealth("h1")))
        assert await raw.receive(AnyEngineReply) == EngineReady("h1", 7)

    in_world(test)


def test_the_halves_of_an_update_are_told_to_the_backend_broker(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        raw = world.raw()

        async def ask(request: Any) -> Any:
            raw.send(b"", codec.encode(request))
            return await raw.receive(AnyEngineReply)

        assert (await ask(WeightUpdate("e0", "end", 7))).error.code == "update_not_begun"
        assert await ask(WeightUpdate("b1", "begin", 7, limit_s=60.0)) == EngineReady("b1", 0)
        assert (await ask(WeightUpdate("b2", "begin", 8, limit_s=60.0))).error.code == "update_in_progress"
        assert (await ask(WeightUpdate("n1", "set", 8))).error.code == "update_in_progress"
        assert await ask(WeightUpdate("b1", "begin", 7, mode="drain", limit_s=60.0)) == EngineReady("b1", 0)
        assert await ask(WeightUpdate("e1", "end", 7)) == EngineReady("e1", 7)
        await world.broker.until(lambda: any(getattr(r, "weight_version", 0) == 7 for r in world.broker.requests))
        assert await ask(WeightUpdate("e2", "end", 7)) == EngineReady("e2", 7)
        assert (await ask(WeightUpdate("e3", "end", 8))).error.code == "update_not_begun"
        assert await ask(WeightUpdate("c1", "cancel", 8)) == EngineReady("c1", 7)

    in_world(test)


def test_a_host_that_stops_in_the_middle_of_an_update_ends(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        raw = world.raw()
        raw.send(b"", codec.encode(WeightUpdate("b1", "begin", 7, limit_s=60.0)))
        assert await raw.receive(AnyEngineReply) == EngineReady("b1", 0)
        raw.send(b"", generate("g1"), PROMPT.tobytes())
        raw.send(b"", codec.encode(EngineHealth("h1")))  # behind the other: once it is answered, both have arrived
        assert await raw.receive(AnyEngineReply) == EngineReady("h1", 0, 1)
        world.stop.set()
        refused = await raw.receive(AnyEngineReply)
        assert (type(refused), refused.request_id) == (Refused, "g1")
        await world.running

    in_world(test)


def test_a_request_that_is_sent_again_runs_once_and_is_answered_over_both_connections(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        calls = []
        original = world.engine.generate

        async def counted(*args: Any) -> Any:
            calls.append(args)
            return await original(*args)

        world.engine.generate = counted
        first, second = world.raw(), world.raw()
        first.send(b"", generate("g1", 2000, seed=1), PROMPT.tobytes())
        first.send(b"", codec.encode(EngineHealth("h1")))
        await first.receive(AnyEngineReply)
        second.send(b"", generate("g1", 2000, seed=1), PROMPT.tobytes())
        for connection in (second, first):  # what came over the dead one of the two may be read last
            assert isinstance(await connection.receive(AnyEngineReply), Generated)
        assert len(calls) == 1
        assert world.host._envelopes == {}

    in_world(test)


def test_a_request_that_is_repeated_as_its_generation_ends_is_answered(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        first, second, asked = world.raw(), world.raw(), {}
        serve, original = world.host._serve, world.engine.generate

        def noted(envelope: Any, request: Any, message: Any) -> None:
            asked[request.request_id] = envelope, request, message
            serve(envelope, request, message)

        async def generate_and_repeat(*args: Any) -> Any:
            done = await original(*args)
            envelope, (_, request, message) = asked["h1"][0], asked["g1"]
            asyncio.get_running_loop().call_soon(serve, envelope, request, message)
            return done

        world.host._serve, world.engine.generate = noted, generate_and_repeat
        second.send(b"", codec.encode(EngineHealth("h1")))
        await second.receive(AnyEngineReply)
        first.send(b"", generate("g1", 20, seed=1), PROMPT.tobytes())
        for connection in (first, second):
            assert isinstance(await connection.receive(AnyEngineReply), Generated)

    in_world(test)


def test_an_abort_ends_the_generation_without_a_reply(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        raw = world.raw()
        raw.send(b"", generate("g1", 30_000), PROMPT.tobytes())
        raw.send(b"", codec.encode(EngineHealth("h1")))
        assert await raw.receive(AnyEngineReply) == EngineReady("h1", 0, 1)
        raw.send(b"", codec.encode(Abort("g1")))
        raw.send(b"", codec.encode(Abort("never-seen")))
        raw.send(b"", codec.encode(EngineHealth("h2")))
        raw.send(b"", codec.encode(EngineHealth("h3")))
        await raw.receive(AnyEngineReply)
        await asyncio.sleep(0)
        raw.send(b"", codec.encode(EngineHealth("h4")))
        await raw.receive(AnyEngineReply)
        assert await raw.receive(AnyEngineReply) == EngineReady("h4", 0, 0)

    in_world(test)


@pytest.mark.parametrize(
    ("frames", "request_id", "code"),
    [
        ([b"", b"\xc1"], "unknown", "malformed_message"),
        ([b"", b"\xdf\xff\xff\xff\xff"], "unknown", "malformed_message"),
        (
            [b"", codec.pack({"type": "generate", "request_id": "r1", "protocol": PROTOCOL_VERSION})],
            "r1",
            "malformed_message",
        ),
        ([b"", codec.encode(Submit("r1", "s"))], "r1", "malformed_message"),
        ([b"", codec.pack({"request_id": ["a"]})], "unknown", "malformed_message"),
        ([b"", generate("r1")], "r1", "malformed_message"),
        ([b"", generate("r1"), b"abc"], "r1", "malformed_message"),
        ([b"", generate("r1"), b"abcd", b"abcd"], "r1", "malformed_message"),
        ([b"", codec.encode(EngineHealth("r1")), b"more"], "r1", "malformed_message"),
        ([b"", generate("r1"), b""], "r1", "engine_failed"),
        ([b"", generate("r1"), np.array([99], np.int32).tobytes()], "r1", "engine_failed"),
    ],
)
def test_a_bad_request_is_refused_and_the_host_goes_on(
    in_world: InWorld, frames: list[bytes], request_id: str, code: str
) -> None:
    async def test(world: Any) -> None:
        raw = world.raw()
        raw.send(*frames)
        refused = await raw.receive(AnyEngineReply)
        assert isinstance(refused, Refused)
        assert (refused.request_id, refused.error.code) == (request_id, code)
        raw.send(b"", codec.encode(EngineHealth("h1")))
        assert await raw.receive(AnyEngineReply) == EngineReady("h1", 0)

    in_world(test)


@pytest.mark.parametrize("frames", [[b"no envelope"], [b""], [b"a", b"b", b"c", b"d", b"e"]])
def test_what_has_no_envelope_is_dropped(in_world: InWorld, frames: list[bytes]) -> None:
    async def test(world: Any) -> None:
        raw = world.raw()
        raw.send(*frames)
        raw.send(b"", codec.encode(EngineHealth("h1")))
        assert await raw.receive(AnyEngineReply) == EngineReady("h1", 0)

    in_world(test)


def test_a_stage_process_of_another_version_is_refused_with_both_numbers(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        raw = world.raw()
        raw.send(b"", codec.encode(EngineHealth("h1", protocol=PROTOCOL_VERSION + 1)))
        refused = await raw.receive(AnyEngineReply)
        assert (refused.request_id, refused.error.code) == ("h1", "version_mismatch")
        assert refused.error.fields == {"ours": PROTOCOL_VERSION, "theirs": PROTOCOL_VERSION + 1}

    in_world(test)


def test_a_fault_of_the_engine_is_answered(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        async def broken(*_: Any) -> Any:
            raise RuntimeError("boom")

        world.engine.generate = broken
        raw = world.raw()
        raw.send(b"", generate("g1"), PROMPT.tobytes())
        refused = await raw.receive(AnyEngineReply)
        assert refused.error.code == "internal_error"
        assert "boom" in refused.error.message

    in_world(test)


def test_an_update_that_hangs_kept_the_host_from_ending(in_world: InWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "UPDATES_S", 0.1)

    async def test(world: Any) -> None:
        async def hang(*_: Any) -> None:
            await asyncio.Event().wait()

        world.engine.update_weights = hang
        raw = world.raw()
        raw.send(b"", codec.encode(WeightUpdate("u1", "load", 1, "/hangs")))
        raw.send(b"", codec.encode(EngineHealth("h1")))
        assert isinstance(await raw.receive(AnyEngineReply), EngineReady)
        world.stop.set()
        async with asyncio.timeout(5):
            await world.running
        refused = await raw.receive(AnyEngineReply)
        assert (refused.request_id, refused.error.code) == ("u1", "engine_failed")

    in_world(test)


def test_a_malformed_request_left_an_entry_and_stole_the_answer_of_a_live_one(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        asker, thief = world.raw(), world.raw()
        asker.send(b"", generate("g1", 2000), PROMPT.tobytes())
        asker.send(b"", codec.encode(EngineHealth("h1")))
        await asker.receive(AnyEngineReply)
        for request_id in ("g1", "g2"):
            thief.send(b"", generate(request_id), b"abc")
            assert (await thief.receive(AnyEngineReply)).request_id == request_id
        assert set(world.host._envelopes) == {"g1"}
        assert isinstance(await asker.receive(AnyEngineReply), Generated)
        assert world.host._envelopes == {}

    in_world(test)


def test_two_hosts_on_one_endpoint_are_refused(tmp_path: Path, make_policy: Any) -> None:
    endpoint = f"ipc://{tmp_path}/engine"
    code = "import sys, time\n"
    code += "import zmq; from prorl_zmq.wire.sockets import bind, open_socket\n"
    code += "bind(open_socket(zmq.Context(), zmq.ROUTER), sys.argv[1]); print('bound', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-P", "-c", code, endpoint], stdout=subprocess.PIPE)

    async def main() -> None:
        with zmq.Context() as context:
            EngineHost(
                context,
                EmbeddedEngine(make_policy()),
                HostOptions(endpoint=endpoint, backend_broker=f"ipc://{tmp_path}/broker", backend_id="e"),
            )

    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"bound\n"
        with pytest.raises(EndpointInUse):
            asyncio.run(main())
    finally:
        other.kill()
        other.communicate()


@pytest.mark.parametrize("wrong", ["events", "replay", "broker"])
def test_a_host_that_cannot_be_made_leaves_nothing_open(tmp_path: Path, make_policy: Any, wrong: str) -> None:
    ends = {name: f"ipc://{tmp_path}/{name}" for name in ("events", "replay", "broker")}
    ends[wrong] = f"ipc://{tmp_path}/{'long' * 30}"
    engine = EmbeddedEngine(make_policy())
    source = KvEventSource(ends["events"], ends["replay"], block_tokens=4)
    engine._description = dataclasses.replace(engine.description, kv_events=source)
    options = HostOptions(
        endpoint=f"ipc://{tmp_path}/engine",
        backend_broker=ends["broker"],
        backend_id="e",
        weights=tmp_path / "weights",
        copies_all=True,
    )

    opened: list[zmq.Socket[bytes]] = []
    threads = threading.enumerate()

    class Noting(zmq.Context[zmq.Socket[bytes]]):
        def socket(self, *arguments: Any, **named: Any) -> Any:
            opened.append(super().socket(*arguments, **named))
            return opened[-1]

    async def main() -> None:
        context = Noting()
        try:
            with pytest.raises(InvalidEndpoint, match="long"):
                EngineHost(context, engine, options)
            assert opened
            assert all(each.closed for each in opened)
        finally:
            context.destroy(linger=0)

    asyncio.run(main())
    assert not set(threading.enumerate()) - set(threads)


def test_a_host_process_serves_and_ends_cleanly_on_sigterm(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from prorl_zmq.inference.hosting.host import HostOptions\n"
        "from prorl_zmq.inference.hosting.host_process import run_engine_host\n"
        "from prorl_zmq.inference.embedded.embedded_engine import load_embedded_engine\n"
        "from prorl_zmq.inference.policy import Policy, PolicyShape\n"
        "path = pathlib.Path(sys.argv[1]) / 'model.npz'; Policy.initial(PolicyShape(), 0).save(path)\n"
        "async def start(): return load_embedded_engine(path)\n"
        "run_engine_host(start, HostOptions(endpoint='tcp://127.0.0.1:*', "
        "backend_broker=f'ipc://{sys.argv[1]}/broker', backend_id='e0', heartbeat_s=0.1))"
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = open_socket(context, zmq.ROUTER)
    bind(router, f"ipc://{tmp_path}/broker")
    process = subprocess.Popen([sys.executable, "-P", "-c", code, str(tmp_path)])
    try:
        seen: list[AnyBackendRequest] = []
        while process.poll() is None:
            if not router.poll(10_000):
                pytest.fail("the host is silent")
            identity, _, header = router.recv_multipart()
            request = codec.decode(header, AnyBackendRequest)
            seen.append(request)
            router.send_multipart([identity, b"", codec.encode(Done(request.request_id))])
            if len(seen) == 3:
                process.send_signal(signal.SIGTERM)
            if isinstance(request, RemoveBackend):
                break
        assert process.wait(10) == 0
        assert isinstance(seen[0], AddBackend)
        assert seen[0].backend.endpoint.startswith("tcp://127.0.0.1:")
        assert isinstance(seen[-1], RemoveBackend)
    finally:
        process.kill()
        process.wait()
        context.destroy(linger=0)
