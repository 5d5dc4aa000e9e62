"""Hostile and clumsy requests for samples: each is refused, costs no other request anything, and ends its jobs."""

from __future__ import annotations

import asyncio
import io
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from support.waiting import until, until_async

from prorl_zmq.inference.embedded.base_policy import base_policy
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.security.keys import KeyFolder
from prorl_zmq.testing import LocalService, say
from prorl_zmq.wire.messages.base import KeyRole

from .conftest import gateway_of, http

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .conftest import Http

HI = [{"role": "user", "content": "hi"}]
WRONG: tuple[Any, ...] = (
    None, True, 0, -1, 2**40, 2**70, 1e308, 0.5, "", "x", "\x00", "é" * 3000, [], [[]], [None], [True], [2**70],
    ["x", 1], {}, {"a": 1}, {"content": [{"type": "image_url"}]}, [{"role": "tool"}], [{"role": "user", "content": 5}],
)  # fmt: skip
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "policy", "messages": HI, "max_tokens": 2},
    "/v1/completions": {"model": "policy", "prompt": "hi", "max_tokens": 2},
    "/api/v1/asample": {
        "sampling_session_id": "s:0:policy",
        "seq_id": 1,
        "prompt": {"chunks": [{"tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": 2},
    },
    "/api/v1/create_sampling_session": {"session_id": "s", "sampling_session_seq_id": 0, "base_model": "policy"},
    "/api/v1/retrieve_future": {"request_id": "f" * 32},
}
COMMON = (
    "model", "n", "stream", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
    "stop", "stop_token_ids", "return_token_ids", "prompt_logprobs", "logprobs", "echo", "ignore_eos", "logit_bias",
    "presence_penalty", "response_format", "stream_options",
)  # fmt: skip
FIELDS: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": (*COMMON, "messages", "tools", "tool_choice", "top_logprobs"),
    "/v1/completions": (*COMMON, "prompt", "best_of", "suffix"),
    "/api/v1/asample": (
        "sampling_session_id", "prompt", "sampling_params", "num_samples", "prompt_logprobs", "topk_prompt_logprobs",
        "topk_sample_logprobs", "target_prompt_logprobs", "prompt_logprobs_last_n", "prompt_alt_tokens_k",
    ),
    "/api/v1/create_sampling_session": ("session_id", "sampling_session_seq_id", "base_model", "model_path"),
    "/api/v1/retrieve_future": ("request_id",),
}  # fmt: skip
TARGETS: tuple[Any, ...] = (
    {"data": [1], "shape": [1]},
    {"data": [1], "shape": [1, 2]},
    {"data": [1], "shape": [2, 1]},
    {"data": [-2], "shape": [1, 1]},
    {"data": [1], "shape": [1, 1], "dtype": "float32"},
    {"data": [1], "shape": [1, -1]},
    {"data": [], "shape": [1, 2**31 - 1]},
    {"data": [1], "shape": [1, 1], "sparse_crow_indices": [0, 1]},
    {"data": [1], "shape": [1, 1], "sparse_crow_indices": [], "sparse_col_indices": []},
    {"data": [1], "shape": [1, 1], "sparse_crow_indices": [0, 1, 1], "sparse_col_indices": [0]},
    {"data": [1], "shape": [1, 1], "sparse_crow_indices": [1, 1], "sparse_col_indices": [0]},
    {"data": [1], "shape": [1, 1], "sparse_crow_indices": [0, 1], "sparse_col_indices": [1]},
    {"data": [1], "shape": [1, 1], "sparse_crow_indices": [0, 1], "sparse_col_indices": [0, 0]},
)
BODIES = (b"", b"[]", b"7", b"{", b"\xff\xfe", b'{"model": "\\ud800"}', b"[" * 5000, b'{"a":' * 5000, b'{"n": NaN}')
BODY_LIMIT_BYTES = 64 << 20


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    with LocalService(engine=EmbeddedEngine(base_policy())) as started:
        yield started


async def posted(client: Http, path: str, body: bytes) -> int:
    """Post a body; give the status of an answer that says why if it is an error."""
    async with client.session.post(path, data=io.BytesIO(body)) as answer:
        told = await answer.read()
        assert answer.status < 500, f"{path} {body[:200]!r}: {told[:300]!r}"
        if answer.status >= 400:
            assert json.loads(told)["error"], (path, body[:200])
        return answer.status


async def check_serves(client: Http) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert await posted(client, path, json.dumps(VALID[path]).encode()) == 200


async def check_nothing_runs(service: LocalService) -> None:
    async with service.async_client() as client:

        async def is_idle() -> bool:
            status = await client.status()
            return not any((*status.queued.values(), *status.running.values()))

        await until_async(is_idle, "the end of all jobs")


def test_values_of_wrong_types_are_refused(service: LocalService, tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway_of(service, tmp_path) as url, http(url) as client:
            for path, valid in VALID.items():
                statuses = [
                    await posted(client, path, json.dumps({**valid, "seq_id": number, name: value}).encode())
                    for number, (name, value) in enumerate((name, value) for name in FIELDS[path] for value in WRONG)
                ]
                assert statuses.count(200) < len(statuses) / 2
            for number, targets in enumerate(TARGETS):
                wrong = {**VALID["/api/v1/asample"], "seq_id": -1 - number, "target_prompt_logprobs": targets}
                assert await posted(client, "/api/v1/asample", json.dumps(wrong).encode()) == 400, targets
            await check_serves(client)
        await check_nothing_runs(service)

    asyncio.run(main())


def test_bodies_that_are_no_requests_are_refused(service: LocalService, tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway_of(service, tmp_path) as url, http(url) as client:
            for path in VALID:
                for body in BODIES:
                    assert await posted(client, path, body) in (400, 404), (path, body[:20])
                long = b'{"model": "policy", "prompt": "' + b"a" * BODY_LIMIT_BYTES + b'"}'
                assert await posted(client, path, long) == 413
                values = b'{"model": "policy", "prompt": [' + b"1," * 3_000_000 + b"1]}"
                assert await posted(client, path, values) == 400
            await check_serves(client)
        await check_nothing_runs(service)

    asyncio.run(main())


def test_a_body_that_does_not_come_is_given_up(
    service: LocalService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prorl_zmq.gateway.endpoint.BODY_S", 0.1)

    async def main() -> None:
        async with gateway_of(service, tmp_path) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{"
            writer.write(head.encode())
            assert await reader.readline() == b"HTTP/1.1 408 Request Timeout\r\n"
            writer.close()

    asyncio.run(main())


def test_a_token_may_open_half_of_the_requests_that_others_leave(
    service: LocalService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prorl_zmq.gateway.server.REQUESTS_LIMIT", 4)
    folder = KeyFolder(tmp_path / "keys")
    alice, bob = ({"X-API-Key": folder.new_bearer(name, KeyRole.TRAINER)} for name in ("alice", "bob"))

    async def main() -> None:
        async with gateway_of(service, tmp_path, keys=tmp_path / "keys") as url, http(url) as client:
            port, (name, token) = int(url.rpartition(":")[2]), next(iter(alice.items()))
            open_ones = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(2)]
            for one in open_ones:  # without their bodies
                one.write(
                    f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{name}: {token}\r\nContent-Length: 9\r\n\r\n".encode()
                )

            async def status(of: dict[str, str]) -> int:
                return (await client.get("/v1/models", headers=of))[0]

            async def is_full() -> bool:
                return await status(alice) == 429

            await until_async(is_full, "the token's share")
            assert await status(bob) == 200
            for one in open_ones:
                one.close()

    asyncio.run(main())


def test_a_tokens_open_bodies_take_half_of_the_memory_that_others_leave(
    service: LocalService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prorl_zmq.gateway.open_bodies.BODIES_BYTES", 4000)
    folder = KeyFolder(tmp_path / "keys")
    alice, bob = (folder.new_bearer(name, KeyRole.TRAINER) for name in ("alice", "bob"))

    async def main() -> None:
        async with gateway_of(service, tmp_path, keys=tmp_path / "keys") as url, http(url) as client:
            port = int(url.rpartition(":")[2])

            _, unfinished = await asyncio.open_connection("127.0.0.1", port)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-API-Key: {alice}\r\nContent-Length: 3000\r\n\r\n"
            unfinished.write(head.encode() + b" " * 1900)

            async def status(token: str) -> int:
                body = {"model": "policy", "prompt": "a" * 200, "max_tokens": 1}
                return (await client.post("/v1/completions", body, headers={"X-API-Key": token}))[0]

            async def is_full() -> bool:
                return await status(alice) == 429

            async def is_free() -> bool:
                return await status(alice) == 200

            await until_async(is_full, "the token's share")
            assert await status(bob) == 200
            unfinished.close()
            await until_async(is_free, "the memory of the body that did not come")

    asyncio.run(main())


def test_a_stream_that_is_left_ends_its_generation(tmp_path: Path) -> None:
    engine = say(lambda _: "e" * 300_000)

    async def main() -> None:
        async with gateway_of(service, tmp_path) as url, aiohttp.ClientSession(url) as session:
            for path, more in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", {"messages": HI})):
                body = {"model": "policy", "max_tokens": 400_000, "stream": True, **more}
                asking = asyncio.create_task(session.post(path, json=body))
                await asyncio.to_thread(until, lambda: bool(engine._running), "a call at the engine")
                asking.cancel()
                await asyncio.to_thread(until, lambda: not engine._running, "the end of the generation")
        await check_nothing_runs(service)

    with LocalService(engine=engine) as service:
        asyncio.run(main())


def test_scores_that_are_left_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, scoring = EmbeddedEngine(base_policy()), []

    async def endless(*_: Any) -> Any:
        scoring.append(True)
        try:
            await asyncio.Event().wait()
        finally:
            scoring.clear()

    monkeypatch.setattr(engine, "score", endless)

    async def main() -> None:
        async with gateway_of(service, tmp_path) as url, aiohttp.ClientSession(url) as session:
            body = {"model": "policy", "prompt": "hi", "max_tokens": 1, "echo": True, "logprobs": 1}
            asking = asyncio.create_task(session.post("/v1/completions", json=body))
            await asyncio.to_thread(until, lambda: bool(scoring), "a text at the engine")
            asking.cancel()
            await asyncio.to_thread(until, lambda: not scoring, "the end of the scoring")
        await check_nothing_runs(service)

    with LocalService(engine=engine) as service:
        asyncio.run(main())
