"""Adapters of a vLLM server over HTTP, with a server that behaves as vLLM's does."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from aiohttp import web
from support.adapters import small_adapter, small_base

from prorl_zmq.config import LoraSlots
from prorl_zmq.errors import ConfigError, EngineFailed, InvalidWeights
from prorl_zmq.inference.engine import Wanted
from prorl_zmq.inference.http.http_engine import HttpEngine
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.engines import VersionSpan
from prorl_zmq.wire.messages.jobs import Sampling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = np.arange(1, 4, dtype=np.int32)
CHAT = ChatSettings("transformers", "tokenizer")


def error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


class Adapters:
    """What vLLM says of its adapters."""

    def __init__(self, server: Any, speech: Any) -> None:
        self.paths: dict[str, str] = {}
        self.prompt_logprobs: list[Any] = []
        """Of texts to score; empty: none is scored."""
        self._speech = speech
        server.handlers |= {LOAD: self.load, UNLOAD: self.unload, speech.path: self.generate}

    def load(self, body: Any) -> web.Response:
        name, path = body["lora_name"], body["lora_path"]
        if name in self.paths:
            return error(400, f"The lora adapter '{name}' has already been loaded. set 'load_inplace' to True")
        if "rejected" in path:
            return error(500, "Call to add_lora method failed")
        self.paths[name] = path
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    def unload(self, body: Any) -> web.Response:
        if self.paths.pop(body["lora_name"], None) is None:
            return error(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
        return web.Response(text="Success")

    def generate(self, body: Any) -> web.Response:
        name = body.get("model", "base")
        if name not in ("base", *self.paths):
            return error(404, f"The model `{name}` does not exist.")
        if self.prompt_logprobs:
            return web.json_response({"choices": [{}], "prompt_logprobs": self.prompt_logprobs})
        return self._speech.good(body)


@pytest.fixture(params=["vllm", "completions"])
def engine_of(
    request: pytest.FixtureRequest, serving: Callable[..., Any], speeches: dict[str, Any], tmp_path: Path
) -> Callable[[], Any]:
    """An asynchronous context manager: an engine, its server, and what that has loaded."""
    base = small_base(tmp_path / "base")

    @asynccontextmanager
    async def running() -> AsyncIterator[tuple[HttpEngine, Any, Adapters]]:
        speech = speeches[request.param]
        async with serving(speech) as server:
            cards = {"data": [{"id": "base", "root": str(base)}]}
            server.handlers["/v1/models"] = lambda _: web.json_response(cards)
            adapters = Adapters(server, speech)
            engine = await HttpEngine.start(
                server.url, api=request.param, chat=CHAT, start_s=5.0, lora=LoraSlots(slots=2, rank=2)
            )
            try:
                yield engine, server, adapters
            finally:
                await engine.close()

    return running


async def ask(engine: HttpEngine, model: str, version: int) -> tuple[VersionSpan, ...]:
    wanted = Wanted(adapter=(model, version))
    return (await engine.generate(PROMPT, Sampling(max_tokens=4), (), "job", wanted=wanted)).spans


def test_requests_name_the_adapters_version(engine_of: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with engine_of() as (engine, server, adapters):
            assert (engine.description.adapter_slots, engine.description.adapter_rest_s) == (2, 10.0)
            path = small_adapter(tmp_path / "given")
            await engine.load_adapter("a", 7, path)
            assert adapters.paths == {"given": str(path)}
            assert await ask(engine, "a", 7) == (VersionSpan(7, 0, 4),)
            assert server.requests[-1][1]["model"] == "given"
            done = await engine.generate(PROMPT, Sampling(max_tokens=4), (), "job")
            assert done.spans == (VersionSpan(0, 0, 4),)
            assert server.requests[-1][1].get("model", "base") == "base"
            await engine.remove_adapter("a", 7)
            await engine.remove_adapter("a", 7)
            assert adapters.paths == {}
            with pytest.raises(EngineFailed, match="version 7 of the adapter a is not loaded"):
                await ask(engine, "a", 7)

    asyncio.run(main())


def test_texts_are_scored_by_the_adapters_version(engine_of: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with engine_of() as (engine, server, adapters):
            path = small_adapter(tmp_path / "given")
            await engine.load_adapter("a", 7, path)
            listed = [None, {"2": {"logprob": -0.5, "rank": 1}}, {"3": {"logprob": -1.5, "rank": 1}}]
            adapters.prompt_logprobs = listed
            adapters.paths.clear()  # the server was started again
            for adapter, version, name in ((("a", 7), 7, "given"), (None, 0, "base")):
                scores = await engine.score(PROMPT, 0, "job", adapter)
                assert (scores.weight_version, scores.logprobs.tolist()) == (version, [0.0, -0.5, -1.5])
                assert server.requests[-1][1].get("model", "base") == name
            assert adapters.paths == {"given": str(path)}
            with pytest.raises(EngineFailed, match="version 8 of the adapter a is not loaded"):
                await engine.score(PROMPT, 0, "job", ("a", 8))

    asyncio.run(main())


def test_a_server_that_was_started_again_gets_its_adapters_back(engine_of: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with engine_of() as (engine, _, adapters):
            path = small_adapter(tmp_path / "given")
            await engine.load_adapter("a", 7, path)
            adapters.paths.clear()
            assert await ask(engine, "a", 7) == (VersionSpan(7, 0, 4),)
            assert adapters.paths == {"given": str(path)}
            adapters.paths.clear()
            await engine.remove_adapter("a", 7)

    asyncio.run(main())


def test_many_requests_bring_an_adapter_back_together(engine_of: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with engine_of() as (engine, server, adapters):
            await engine.load_adapter("a", 7, small_adapter(tmp_path / "given"))
            adapters.paths.clear()
            assert await asyncio.gather(*(ask(engine, "a", 7) for _ in range(8))) == [(VersionSpan(7, 0, 4),)] * 8
            assert server.asked(UNLOAD) == []

    asyncio.run(main())


def test_other_hosts_adapters_of_the_same_server_stay(engine_of: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with engine_of() as (engine, server, adapters):
            path = small_adapter(tmp_path / "a@7-given")
            adapters.paths |= {"a@7-other": "/other", "a@7-given": str(path)}  # the second by an earlier host
            await engine.load_adapter("a", 7, path)
            assert adapters.paths == {"a@7-other": "/other", "a@7-given": str(path)}
            assert server.asked(UNLOAD) == []
            await engine.remove_adapter("a", 7)
            assert adapters.paths == {"a@7-other": "/other"}

    asyncio.run(main())


def test_a_busy_server_does_not_blame_the_adapter(engine_of: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with engine_of() as (engine, server, _):
            server.handlers[LOAD] = lambda _: error(429, "busy")
            with pytest.raises(EngineFailed, match=r"does not load the adapter in .*given now: .*busy"):
                await engine.load_adapter("a", 7, small_adapter(tmp_path / "given"))

    asyncio.run(main())


def test_a_wrong_adapter_does_not_reach_the_server(engine_of: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with engine_of() as (engine, server, _):
            for config, words in (({"use_dora": True}, "use_dora"), ({"r": 9}, "its rank is 9")):
                with pytest.raises(InvalidWeights, match=words):
                    await engine.load_adapter("a", 7, small_adapter(tmp_path / "wrong", **config))
            assert server.asked(LOAD) == []
            with pytest.raises(InvalidWeights, match=r"cannot load the adapter in .*add_lora method failed"):
                await engine.load_adapter("a", 7, small_adapter(tmp_path / "rejected"))
            del server.handlers[LOAD]
            with pytest.raises(EngineFailed, match=f"has no {LOAD}: start vLLM with --enable-lora and VLLM_ALLOW"):
                await engine.load_adapter("a", 7, small_adapter(tmp_path / "given"))
            server.handlers[UNLOAD] = lambda _: error(500, "odd")
            with pytest.raises(EngineFailed, match="not loaded"):
                await ask(engine, "a", 7)

    asyncio.run(main())


def test_only_vllm_takes_adapters(serving: Any, speeches: dict[str, Any], tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(speeches["prorl"]) as server:
            with pytest.raises(ConfigError, match="speaks prorl; adapters need vllm or completions"):
                await HttpEngine.start(server.url, chat=CHAT, start_s=5.0, lora=LoraSlots())
        async with serving(speeches["vllm"]) as server:
            engine = await HttpEngine.start(server.url, chat=CHAT, start_s=5.0)
            with pytest.raises(EngineFailed, match="start it with the option lora"):
                await engine.load_adapter("a", 7, small_adapter(tmp_path / "given"))
            await engine.close()

    asyncio.run(main())
