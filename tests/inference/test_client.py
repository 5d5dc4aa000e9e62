from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zmq

from prorl_zmq.errors import Closed, EngineFailed, MalformedMessage, RequestTimeout
from prorl_zmq.inference.client import EngineClient, read_generation
from prorl_zmq.wire import codec
from prorl_zmq.wire.async_socket import AsyncSocket
from prorl_zmq.wire.messages.backends import Backend
from prorl_zmq.wire.messages.engines import Abort, AnyEngineRequest, EngineReady, Generate, Generated, VersionSpan
from prorl_zmq.wire.messages.jobs import Sampling
from prorl_zmq.wire.sockets import bind, open_socket, split_envelope

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    InWorld = Callable[[Callable[[Any], Any]], None]

PROMPT = np.arange(1, 20, dtype=np.int32)
TWO = VersionSpan(0, 0, 2)


def test_a_generation_arrives_as_the_engine_made_it(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        there = await world.client.generate(world.backend, "job", PROMPT, Sampling(1.0, 50, 3), (49,))
        here = await world.engine.generate(PROMPT, Sampling(1.0, 50, 3), (49,), "job")
        assert there.token_ids.tolist() == here.token_ids.tolist()
        np.testing.assert_allclose(there.logprobs, here.logprobs, atol=1e-5)
        assert (there.spans, there.finish_reason) == (here.spans, here.finish_reason)

    in_world(test)


def test_many_generations_share_a_connection(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        generations = await asyncio.gather(
            *(world.client.generate(world.backend, "job", PROMPT, Sampling(1.0, n, n), ()) for n in range(1, 40))
        )
        assert [len(generation.token_ids) for generation in generations] == list(range(1, 40))

    in_world(test)


def test_a_host_says_that_it_serves(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        assert (await world.client.health(world.host.endpoint, 5)).weight_version == 0

    in_world(test)


def test_a_refusal_names_the_backend(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        with pytest.raises(EngineFailed, match="engine-0: the prompt holds a token id outside") as caught:
            await world.client.generate(world.backend, "job", PROMPT + 1000, Sampling(), ())
        assert caught.value.backend == "engine-0"

    in_world(test)


def test_cancelling_aborts_the_generation_at_the_host(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        call = asyncio.create_task(world.client.generate(world.backend, "job", PROMPT, Sampling(1.0, 30_000), ()))
        while not (await world.client.health(world.host.endpoint, 5)).in_flight:
            pass
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        async with asyncio.timeout(5):
            while (await world.client.health(world.host.endpoint, 5)).in_flight:
                pass

    in_world(test)


def test_a_limit_aborts_too(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        with pytest.raises(EngineFailed, match=r"engine-0: no reply from .* within 0\.3 s"):
            await world.client.generate(world.backend, "job", PROMPT, Sampling(1.0, 30_000), (), timeout_s=0.3)
        async with asyncio.timeout(5):
            while (await world.client.health(world.host.endpoint, 5)).in_flight:
                pass

    in_world(test)


def test_closing_fails_what_waits(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        call = asyncio.create_task(world.client.generate(world.backend, "job", PROMPT, Sampling(1.0, 30_000), ()))
        await world.client.health(world.host.endpoint, 5)
        world.client.close()
        world.client.close()
        with pytest.raises(Closed):
            await call
        with pytest.raises(Closed):
            await world.client.health(world.host.endpoint, 5)

    in_world(test)


class Host:
    """The host's end of a line, for what a sound host never does: a ROUTER that can vanish and come back."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.client = EngineClient(self.context, reconnect_s=1.5)  # a socket tries again at least once a second
        self.backend = Backend(backend_id="b", endpoint=f"ipc://{folder}/engine")
        self.requests: asyncio.Queue[Any] = asyncio.Queue()
        self.answer: Callable[[Generate], list[bytes] | None] = lambda _: None
        self.appear()

    def appear(self) -> None:
        router = open_socket(self.context, zmq.ROUTER)
        bind(router, self.backend.endpoint)
        self._socket = AsyncSocket(router, self._receive, copied=8)

    def vanish(self) -> None:
        self._socket.close()

    def _receive(self, frames: list[Any]) -> None:
        envelope, message = split_envelope(frames)
        request = codec.decode(message[0], AnyEngineRequest)
        self.requests.put_nowait(request)
        answer = self.answer(request) if not isinstance(request, Abort) else None
        if answer is not None:
            self._socket.send([*envelope, *answer])

    def generate(self, timeout_s: float = 10.0) -> Any:
        return self.client.generate(self.backend, "job", PROMPT, Sampling(), (), timeout_s=timeout_s)

    def close(self) -> None:
        self.client.close()
        self.vanish()
        self.context.destroy(linger=0)


def with_host(folder: Path, test: Callable[[Host], Any]) -> None:
    async def main() -> None:
        host = Host(folder)
        try:
            await test(host)
        finally:
            host.close()

    asyncio.run(main())


def good(request: Generate) -> list[bytes]:
    header = codec.encode(Generated(request.request_id, finish_reason="stop", spans=(TWO,)))
    return [header, np.array([1, 2], np.int32).tobytes(), np.zeros(2, np.float32).tobytes()]


def test_a_host_that_comes_back_is_asked_again(tmp_path: Path) -> None:
    async def test(host: Host) -> None:
        call = asyncio.create_task(host.generate())
        first = await host.requests.get()
        host.vanish()
        host.answer = good
        host.appear()
        assert (await call).token_ids.tolist() == [1, 2]
        assert (await host.requests.get()).request_id == first.request_id

    with_host(tmp_path, test)


def test_a_host_that_dies_fails_its_requests_long_before_their_limit(tmp_path: Path) -> None:
    async def test(host: Host) -> None:
        call = asyncio.create_task(host.generate(timeout_s=600))
        await host.requests.get()
        host.vanish()
        async with asyncio.timeout(5):
            with pytest.raises(EngineFailed, match="no connection"):
                await call
            with pytest.raises(EngineFailed, match="no connection"):
                await host.generate(timeout_s=600)
        host.answer = good
        host.appear()
        assert len((await host.generate()).token_ids) == 2

    with_host(tmp_path, test)


def test_a_host_that_never_was_fails_the_request(tmp_path: Path) -> None:
    async def test(host: Host) -> None:
        host.vanish()
        async with asyncio.timeout(5):
            with pytest.raises(EngineFailed, match="no connection"):
                await host.generate(timeout_s=600)
        with pytest.raises(RequestTimeout):
            await host.client.health(host.backend.endpoint, 0.05)

    with_host(tmp_path, test)


def test_a_request_that_was_given_up_during_an_outage_is_aborted_after_it(tmp_path: Path) -> None:
    async def test(host: Host) -> None:
        call = asyncio.create_task(host.generate())
        asked = await host.requests.get()
        host.vanish()
        with pytest.raises(EngineFailed, match="no connection"):
            await call
        host.appear()
        assert await host.requests.get() == Abort(asked.request_id)

    with_host(tmp_path, test)


def test_connections_to_hosts_that_are_gone_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_zmq.inference.client.ABANDONED_S", 0.0)

    async def test(host: Host) -> None:
        def opened() -> int:
            return sum(not socket.closed for socket in host.context._sockets)

        host.vanish()
        others = [Backend(backend_id=f"b{n}", endpoint=f"ipc://{tmp_path}/gone-{n}") for n in range(4)]
        numbers = []
        for other in others:
            with pytest.raises(EngineFailed):
                await host.client.generate(other, "job", PROMPT, Sampling(), (), timeout_s=0.01)
            numbers.append(opened())
        assert numbers == numbers[:1] * 4

    with_host(tmp_path, test)


def test_answers_to_nobody_are_dropped(tmp_path: Path) -> None:
    async def test(host: Host) -> None:
        def stray(request: Generate) -> list[bytes]:
            host._socket.send([b"nobody", b"", b"\xc1"])
            return [codec.encode(EngineReady("some-other", 0))]

        host.answer = stray
        with pytest.raises(EngineFailed, match="no reply from"):
            await host.generate(timeout_s=0.2)
        assert isinstance(await host.requests.get(), Generate)
        assert isinstance(await host.requests.get(), Abort)

    with_host(tmp_path, test)


def test_garbage_in_place_of_an_answer_was_waited_out(tmp_path: Path) -> None:
    async def test(host: Host) -> None:
        for garbage in ([b"\xc1"], [b""], []):
            host.answer = lambda _, garbage=garbage: garbage
            async with asyncio.timeout(20):
                with pytest.raises(EngineFailed, match="sent what is not a message") as caught:
                    await host.generate(timeout_s=600)
            assert not caught.value.unreachable
        host.answer = good
        assert len((await host.generate()).token_ids) == 2

    with_host(tmp_path, test)


def test_a_malformed_answer_fails_the_request_at_once(tmp_path: Path) -> None:
    async def test(host: Host) -> None:
        host.answer = lambda r: [codec.pack({"type": "generated", "request_id": r.request_id, "spans": 3})]
        with pytest.raises(EngineFailed, match="backend b: the answer is malformed"):
            await host.generate()
        host.answer = lambda r: [codec.encode(EngineReady(r.request_id, 0))]
        with pytest.raises(EngineFailed, match="answered a prompt with EngineReady"):
            await host.generate()

    with_host(tmp_path, test)


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://127.0.0.1:*"])
def test_a_bad_endpoint_leaked_a_socket_with_every_call(tmp_path: Path, endpoint: str) -> None:
    async def test(host: Host) -> None:
        bad = Backend(backend_id="bad", endpoint=endpoint)

        async def ask() -> int:
            with pytest.raises(EngineFailed, match="backend bad: ") as caught:
                await host.client.generate(bad, "job", PROMPT, Sampling(), ())
            assert caught.value.backend == "bad"
            return sum(not socket.closed for socket in host.context._sockets)

        opened = await ask()
        assert [await ask() for _ in range(5)] == [opened] * 5

    with_host(tmp_path, test)


IDS = np.array([1, 2], np.int32)
LOGPROBS = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("spans", "arrays", "problem"),
    [
        ((TWO,), [IDS], "two frames"),
        ((TWO,), [IDS, LOGPROBS[:1]], "two frames"),
        ((TWO,), [IDS, LOGPROBS, LOGPROBS], "two frames"),
        ((), [IDS[:0], LOGPROBS[:0]], "without a token"),
        ((TWO,), [b"abcdef", b"abcdef"], "two frames"),
        ((), [IDS, LOGPROBS], "do not match"),
        ((VersionSpan(0, 0, 1),), [IDS, LOGPROBS], "do not match"),
        ((VersionSpan(0, 0, 1), VersionSpan(1, 0, 2)), [IDS, LOGPROBS], "do not match"),
        ((VersionSpan(0, 0, 3), VersionSpan(1, 3, 2)), [IDS, LOGPROBS], "do not match"),
        ((VersionSpan(0, 1, 2),), [IDS, LOGPROBS], "do not match"),
        ((TWO,), [-IDS, LOGPROBS], "negative"),
        ((TWO,), [IDS, LOGPROBS * np.nan], "not a logarithm"),
        ((TWO,), [IDS, LOGPROBS - np.inf], "not a logarithm"),
        ((VersionSpan(0, 0, 3),), [np.arange(3, dtype=np.int32), np.zeros(3, np.float32)], "at most 2"),
        ((TWO,), [IDS, LOGPROBS + 1], "not a logarithm"),
        ((VersionSpan(-1, 0, 2),), [IDS, LOGPROBS], "not an int32"),
        ((VersionSpan(0, 0, 1), VersionSpan(2**31, 1, 2)), [IDS, LOGPROBS], "not an int32"),
    ],
)
def test_parts_that_do_not_fit_are_refused(spans: tuple[VersionSpan, ...], arrays: list[Any], problem: str) -> None:
    reply = Generated("r", finish_reason="stop", spans=spans)
    frames = [array if isinstance(array, bytes) else array.tobytes() for array in arrays]
    with pytest.raises((MalformedMessage, EngineFailed), match=problem):
        read_generation(reply, frames, max_tokens=2)


def test_new_weights_may_end_a_turn_before_its_first_token() -> None:
    reply = Generated("r", finish_reason="abort", spans=())
    assert len(read_generation(reply, [b"", b""], max_tokens=2).token_ids) == 0


def test_parts_that_fit_are_taken() -> None:
    spans = (VersionSpan(4, 0, 1), VersionSpan(5, 1, 2))
    reply = Generated("r", finish_reason="stop", spans=spans, cached_tokens=3, again_tokens=7, parked_s=0.5)
    generation = read_generation(reply, [IDS.tobytes(), LOGPROBS.tobytes()], max_tokens=2)
    assert generation.token_ids.tolist() == [1, 2]
    assert generation.logprobs.dtype == np.float32
    assert (generation.cached_tokens, generation.again_tokens, generation.room_wait_s) == (3, 7, 0.5)
