"""The HTTP engine and a real vLLM server. Other tests use it too: each begins with whatever weights it has."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.request
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from vllm_python import START_LIMIT_S

from prorl_zmq.errors import EngineFailed, InvalidWeights
from prorl_zmq.inference.checkpoint import read_tensors
from prorl_zmq.inference.engine import Wanted, checked_scores
from prorl_zmq.inference.hosting.engine_updates import EngineUpdates
from prorl_zmq.inference.http.http_engine import HttpEngine
from prorl_zmq.inference.weights.published_weights import PublishedWeights
from prorl_zmq.inference.weights.version_chain import Content
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.engines import VersionSpan
from prorl_zmq.wire.messages.jobs import Sampling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from vllm_server import VllmServer

    from prorl_zmq.inference.engine import Generation

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2 * START_LIMIT_S)]

PROMPT = np.arange(10, 310, dtype=np.int32)
"""More than two blocks of the prefix cache."""
APIS = ("vllm", "completions")


@pytest.fixture
def server(vllm_server: VllmServer) -> VllmServer:
    return vllm_server


@asynccontextmanager
async def engine_of(server: VllmServer, api: Any) -> AsyncIterator[HttpEngine]:
    engine = await HttpEngine.start(server.url, api=api, start_s=30.0)
    try:
        yield engine
    finally:
        await engine.close()


async def until_generated(server: VllmServer, tokens: int) -> None:
    async with asyncio.timeout(60):
        while await asyncio.to_thread(server.generated_tokens) < tokens:
            pass  # the question itself takes its time


async def settled_tokens(server: VllmServer) -> int:
    """Return the server's count once it stands still: it follows the last step with a delay."""
    async with asyncio.timeout(60):
        before, now = -1, server.generated_tokens()
        while now != before:
            await asyncio.sleep(0.2)
            before, now = now, server.generated_tokens()
    return now


async def likeliest(engine: HttpEngine, prompt: Any = PROMPT, count: int = 12) -> Generation:
    return await engine.generate(prompt, Sampling(temperature=0, max_tokens=count), (), "job")


def same(one: Generation, other: Generation) -> bool:
    return one.token_ids.tolist() == other.token_ids.tolist() and np.allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_the_probe_finds_out_what_the_server_is(server: VllmServer) -> None:
    async def main() -> None:
        async with engine_of(server, "auto") as engine:
            description, model = engine.description, str(server.models[0])
            assert engine._dialect.name == "vllm"
            assert description.model == model
            assert description.chat == ChatSettings("transformers", model)
            assert (description.context_tokens, description.vocabulary) == (4096, 1024)
            assert description.logprobs_mode == "raw_logprobs"
            await engine.check_health()
        with pytest.raises(EngineFailed, match="sglang: POST /generate: 404"):
            await HttpEngine.start(server.url, api="sglang", start_s=30.0)

    asyncio.run(main())


def test_both_dialects_give_the_same_tokens(server: VllmServer) -> None:
    async def main() -> None:
        async with engine_of(server, "vllm") as tokens, engine_of(server, "completions") as completions:
            for seed in range(3):
                sampling = Sampling(temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, max_tokens=30, seed=seed)
                one = await tokens.generate(PROMPT, sampling, (), "job")
                other = await completions.generate(PROMPT, sampling, (), "job")
                assert same(one, other)
                assert len(one.token_ids) == 30
                assert one.finish_reason == other.finish_reason == "length"
            assert one.cached_tokens >= 256
            assert other.cached_tokens >= 256

    asyncio.run(main())


@pytest.mark.parametrize("api", APIS)
def test_turns_end_where_they_should(server: VllmServer, api: str) -> None:
    async def main() -> None:
        async with engine_of(server, api) as engine:
            free = await likeliest(engine, count=30)
            stop = free.token_ids.tolist()[7]
            place = free.token_ids.tolist().index(stop)
            stopped = await engine.generate(PROMPT, Sampling(temperature=0, max_tokens=30), (stop,), "job")
            assert stopped.finish_reason == "stop"
            assert stopped.token_ids.tolist() == free.token_ids.tolist()[: place + 1]
            # Some text is there before long, whatever this model says.
            texts = Sampling(max_tokens=200, stop=("a", "e", " "), seed=1)
            ended = await engine.generate(PROMPT, texts, (), "job")
            assert ended.finish_reason == "stop"
            assert len(ended.token_ids) < 200
            nearly_full = np.resize(PROMPT, 4088)
            full = await engine.generate(nearly_full, Sampling(temperature=0, max_tokens=100_000), (), "job")
            assert (full.finish_reason, len(full.token_ids)) == ("length", 8)

    asyncio.run(main())


@pytest.mark.parametrize("api", APIS)
def test_many_at_once_and_some_cancelled(server: VllmServer, api: str) -> None:
    async def main() -> None:
        async with engine_of(server, api) as engine:
            alone = await likeliest(engine, PROMPT[:20])
            tasks = [asyncio.create_task(likeliest(engine, PROMPT[: 20 + n % 4])) for n in range(40)]
            endless = [
                asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=1700, seed=n), (), "job"))
                for n in range(8)
            ]
            generations = await asyncio.gather(*tasks)
            assert all(same(generation, alone) for generation in generations[::4])
            for task in endless:
                task.cancel()
            outcomes = await asyncio.gather(*endless, return_exceptions=True)
            assert any(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
            assert same(await likeliest(engine, PROMPT[:20]), alone)

    asyncio.run(main())


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
def test_new_weights_in_the_middle_of_turns(server: VllmServer, api: str, mode: Any) -> None:
    async def main() -> None:
        async with engine_of(server, api) as engine:
            # On a busy machine the turns may end before the swap: then they are longer.
            for tokens, version in zip(range(600, 3600, 600), range(10, 60, 10), strict=True):
                await engine.update_weights(server.models[0], version, "abort")
                old = await likeliest(engine)
                long = Sampling(temperature=0, max_tokens=tokens)
                before = server.generated_tokens()
                turns = [asyncio.create_task(engine.generate(PROMPT[n:], long, (), "job")) for n in range(4)]
                await until_generated(server, before + 40)
                await engine.update_weights(server.models[1], version + 1, mode)
                generations = await asyncio.gather(*turns)
                new = await likeliest(engine)
                assert new.spans == (VersionSpan(version + 1, 0, 12),)
                assert engine.weight_version == version + 1
                assert not same(old, new)
                made = [tuple(span.weight_version for span in generation.spans) for generation in generations]
                ends = {generation.finish_reason for generation in generations}
                if {"keep": set(map(len, made)) == {2}, "abort": ends == {"abort"}, "drain": True}[mode]:
                    break
            for number, generation in enumerate(generations):
                if mode == "keep":
                    assert made[number] == (version, version + 1)
                    swap = generation.spans[1].start
                    prompt = np.concatenate([PROMPT[number:], generation.token_ids[:swap]])
                    tail = await likeliest(engine, prompt, 20)
                    assert tail.token_ids.tolist() == generation.token_ids[swap : swap + 20].tolist()
                    np.testing.assert_allclose(tail.logprobs, generation.logprobs[swap : swap + 20], atol=1e-4)
                else:
                    assert made[number] == (version,)
                    assert (
                        generation.finish_reason == "abort" if mode == "abort" else generation.finish_reason != "abort"
                    )
            await engine.update_weights(server.models[0], version + 2, mode)
            assert same(await likeliest(engine), old)

    asyncio.run(main())


def load(server: VllmServer, path: Path) -> None:
    """Have the server read weights, as a trainer does that moves them itself."""
    body = json.dumps({"method": "reload_weights", "kwargs": {"weights_path": str(path)}}).encode()
    request = urllib.request.Request(
        f"{server.url}/collective_rpc", body, {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
def test_weights_that_a_trainer_moves_between_the_halves(server: VllmServer, api: str, mode: Any) -> None:
    async def main() -> None:
        async with engine_of(server, api) as engine:
            await engine.update_weights(server.models[0], 70, "abort")
            old = await likeliest(engine)
            # As above.
            for tokens, version in zip(range(600, 3600, 600), range(80, 130, 10), strict=True):
                before = server.generated_tokens()
                long = Sampling(temperature=0, max_tokens=tokens)
                turns = [asyncio.create_task(engine.generate(PROMPT[n:], long, (), "job")) for n in range(4)]
                await until_generated(server, before + 40)
                await engine.begin_update(mode)
                waiting = asyncio.create_task(likeliest(engine))
                generated = await settled_tokens(server)
                await asyncio.to_thread(load, server, server.models[1])
                assert server.generated_tokens() == generated
                assert not waiting.done()
                await engine.end_update(version)
                new = await waiting
                assert new.spans == (VersionSpan(version, 0, 12),)
                generations = await asyncio.gather(*turns)
                made = [tuple(span.weight_version for span in generation.spans) for generation in generations]
                ends = {generation.finish_reason for generation in generations}
                await engine.begin_update("abort")
                await asyncio.to_thread(load, server, server.models[0])
                await engine.end_update(version + 1)
                if {"keep": set(map(len, made)) == {2}, "abort": ends == {"abort"}, "drain": True}[mode]:
                    break
            assert not same(old, new)
            assert same(await likeliest(engine), old)
            assert {versions[-1] for versions in made} == ({version} if mode == "keep" else {made[0][0]})
            if mode == "keep":
                await engine.begin_update("keep")
                await asyncio.to_thread(load, server, server.models[1])
                await engine.end_update(version + 2)
                for number, generation in enumerate(generations):
                    swap = generation.spans[1].start
                    prompt = np.concatenate([PROMPT[number:], generation.token_ids[:swap]])
                    tail = await likeliest(engine, prompt, 20)
                    assert tail.token_ids.tolist() == generation.token_ids[swap : swap + 20].tolist()
                    np.testing.assert_allclose(tail.logprobs, generation.logprobs[swap : swap + 20], atol=1e-4)
                await engine.update_weights(server.models[0], version + 3, "keep")
            await engine.begin_update(mode)
            await engine.end_update(None)
            assert same(await likeliest(engine), old)

    asyncio.run(main())


def test_wrong_weights_never_reach_the_server(server: VllmServer, tmp_path: Path) -> None:
    async def main() -> None:
        async with engine_of(server, "vllm") as engine:
            before, version = await likeliest(engine), engine.weight_version
            for path in (tmp_path / "missing", tmp_path):
                with pytest.raises(InvalidWeights):
                    await engine.update_weights(path, 99, "keep")
            assert engine.weight_version == version
            assert same(await likeliest(engine), before)

    asyncio.run(main())


def test_a_delta_reaches_the_server_through_its_hosts_copy(server: VllmServer, tmp_path: Path) -> None:
    """The engine host applies the delta in its copy, and the server reads that while it pauses."""
    (file,) = server.models[0].glob("*.safetensors")
    first = load_file(file)
    second = {**first, "model.norm.weight": -first["model.norm.weight"]}
    full = Path(shutil.copytree(server.models[0], tmp_path / "full"))
    save_file(second, full / file.name, metadata={"format": "pt"})

    async def main() -> None:
        async with engine_of(server, "vllm") as engine:
            await engine.update_weights(full, 200, "keep")
            wanted = await likeliest(engine)
            updates = EngineUpdates(engine, tmp_path / "copy")
            with PublishedWeights(tmp_path / "published", read_tensors(server.models[0])) as published:
                for version, weights in ((201, first), (202, second)):
                    for name, tensor in weights.items():
                        published.add(name, tensor.reshape(-1).view(np.uint8))
                    written = published.write(version)
                    content = Content(version, written.weights)
                    await updates.fetch(written.path, content, 60.0)
                    turn = asyncio.create_task(likeliest(engine, PROMPT[1:], 600))
                    await until_generated(server, server.generated_tokens() + 20)
                    await updates.load(written.path, content, "keep")
                    assert {span.weight_version for span in (await turn).spans} <= {version - 1, version}
                    served = await likeliest(engine)
                    assert served.spans == (VersionSpan(version, 0, 12),)
                    assert same(served, wanted) == (version == 202)
            assert not written.is_full
            assert written.delta_bytes < written.size_bytes / 100
            await updates.close()
            await engine.update_weights(server.models[0], 203, "keep")

    asyncio.run(main())


@pytest.mark.parametrize("top", [0, 20])
def test_both_dialects_score_alike_and_as_generations_say(server: VllmServer, top: int) -> None:
    """A turn's text at temperature 1 has the log-probs with which it was generated."""

    async def test() -> None:
        scored = []
        for api in APIS:
            async with engine_of(server, api) as engine:
                done = await engine.generate(PROMPT, Sampling(1.0, 40, 3), (), "job")
                text = np.concatenate([PROMPT, done.token_ids])
                scores = checked_scores(await engine.score(text, top, "job"), len(text), top, 1024)
                np.testing.assert_allclose(scores.logprobs[len(PROMPT) :], done.logprobs, atol=1e-4)
                scored.append((text, scores))
        (one, first), (other, second) = scored
        common = len(PROMPT)
        np.testing.assert_array_equal(one[:common], other[:common])
        np.testing.assert_allclose(first.logprobs[:common], second.logprobs[:common], atol=1e-5)
        np.testing.assert_allclose(first.top_logprobs[:common], second.top_logprobs[:common], atol=1e-5)
        assert np.all(np.diff(first.top_logprobs[1:], axis=1) <= 0)
        async with engine_of(server, "vllm") as engine:
            with pytest.raises(EngineFailed, match="max allowed") as refused:
                await engine.score(text, 64, "job")
            assert refused.value.refused

    asyncio.run(test())


def test_both_dialects_give_the_likeliest_tokens_up_to_the_servers_limit(server: VllmServer) -> None:
    """The limit is found when an engine starts; masks and experts need a GPU here, and are refused."""

    async def test() -> None:
        found = []
        for api, limit in (("vllm", 19), ("completions", 20)):
            async with engine_of(server, api) as engine:
                assert engine.description.records == ("top_logprobs",)
                assert engine.description.top_limit == limit, "20 by default; the token API counts the drawn token"
                done = await engine.generate(PROMPT, Sampling(1.0, 40, seed=3), (), "job", Wanted(("top_logprobs:19",)))
                text = np.concatenate([PROMPT, done.token_ids])
                scores = checked_scores(await engine.score(text, 19, "job"), len(text), 19, 1024)
                np.testing.assert_allclose(
                    done.records["top_logprobs"], scores.top_logprobs[len(PROMPT) :], atol=1e-4, rtol=0
                )
                found.append((done.token_ids, done.records["top_ids"]))
                cut = Sampling(1.0, 20, seed=3, top_k=5)
                for record in (f"top_logprobs:{limit + 1}", "sampling_mask", "experts"):
                    with pytest.raises(EngineFailed) as refused:
                        await engine.generate(PROMPT, cut, (), "job", Wanted((record,)))
                    assert refused.value.refused
        for one, other in zip(*found, strict=True):
            np.testing.assert_array_equal(one, other)

    asyncio.run(test())
