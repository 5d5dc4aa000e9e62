"""Engines that a client names: each gets a host, which ends with its gateway or when it is told."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from chat_families import FAMILIES, make_tokenizer
from support.waiting import until_async

from ..inference.http.conftest import FakeServer, Speech
from .conftest import http

if TYPE_CHECKING:
    from pathlib import Path

    from support.services import SharedService


@pytest.mark.proof
def test_a_token_server_is_used_and_cleared(served: SharedService, tmp_path: Path) -> None:
    """As verl does in token mode: its servers say nothing of a tokenizer, which comes with the jobs."""
    tokenizer = make_tokenizer(FAMILIES["chatml"])
    tokenizer.save_pretrained(tmp_path / "model")
    said = tokenizer.encode("The answer is \\boxed{2}.<|im_end|>", add_special_tokens=False)
    parameters = {"custom_tokenizer": str(tmp_path / "model"), "max_output_tokens": 64, "max_model_len": 4096}
    asked = {"instance": {"problem": "1 + 1", "answer": "2"}, "sampling_params": parameters}

    async def asks(url: str) -> None:
        server, speech = FakeServer(), Speech("prorl")

        def generate(body: Any) -> web.Response:
            if "prompt_ids" not in body:
                return web.json_response({"detail": "prompt_ids is missing"}, status=422)
            ids = said[: speech.max_tokens(body)]
            return web.json_response(speech.answer(ids, [-0.5] * len(ids)))

        server.handlers["/generate"] = generate
        await server.start()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(server.stop)
            client = await stack.enter_async_context(http(url))
            service = await stack.enter_async_context(served.without_engine())
            await until_async(client.is_up, "the gateway")
            assert (await client.post("/clear_llm_server"))[0] == 200
            assert (await client.post("/add_llm_server", {"address": "nowhere"}))[0] == 400
            for _ in range(2):  # duplicates are ignored
                assert (await client.post("/add_llm_server", {"address": server.url}))[0] == 200
            assert (await client.post("/start"))[0] == 200
            status, answer = await client.post("/process", asked)
            assert (status, answer["error"], answer["resolved"]) == (200, None, True)
            message = answer["messages"][-1]
            assert (message["token_ids"], message["content"]) == (said, "The answer is \\boxed{2}.")
            (prompt,) = [body["prompt_ids"] for body in server.asked("/generate") if body.get("max_tokens") == 64]
            assert message["input_ids"] == prompt
            assert [one["content"] for one in answer["messages"]][1] == "1 + 1"
            assert [one["state"] for one in (await client.get("/status"))[1]["llm_servers"]] == ["started"]
            assert len(await service.backends.list()) == 2
            assert (await client.post("/clear_llm_server"))[0] == 200
            assert len(await service.backends.list()) == 1

    with served.gateway() as (_, url):
        asyncio.run(asks(url))


@pytest.mark.proof
def test_a_gateway_that_was_killed_starts_its_engines_again(served: SharedService) -> None:
    """They end with it, and which they were is known."""

    async def before(url: str) -> None:
        async with http(url) as client:
            await until_async(client.is_up, "the gateway")
            await client.post("/start")
            await client.post("/add_llm_server", {"address": "http://127.0.0.1:1"})

    async def after(url: str) -> None:
        async with http(url) as client:
            await until_async(client.is_up, "the gateway")
            (one,) = (await client.get("/status"))[1]["llm_servers"]
            assert one["address"] == "http://127.0.0.1:1"
            await client.post("/clear_llm_server")
            await client.post("/stop")

    with served.gateway("--name", "again") as (process, url):
        asyncio.run(before(url))
        process.end(signal.SIGKILL)
    with served.gateway("--name", "again") as (_, url):
        asyncio.run(after(url))
