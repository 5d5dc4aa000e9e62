from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from aiohttp import web

from prorl_zmq.errors import ConfigError, EngineFailed, InvalidWeights
from prorl_zmq.inference.http import http_engine as module
from prorl_zmq.inference.http import pause
from prorl_zmq.inference.http.http_engine import HttpEngine
from prorl_zmq.inference.kv_figures import KvFigures
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.engines import VersionSpan
from prorl_zmq.wire.messages.jobs import Sampling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

PROMPT = np.array([1, 2, 3], np.int32)
FOUR = Sampling(max_tokens=4)
CHAT = ChatSettings("transformers", "tokenizer")


@asynccontextmanager
async def engine_of(server: Any, **options: Any) -> AsyncIterator[HttpEngine]:
    engine = await HttpEngine.start(server.url, **{"chat": CHAT, "retry_s": 0.3, "start_s": 5.0, **options})
    server.requests.clear()
    try:
        yield engine
    finally:
        await engine.close()
        assert not [task for task in asyncio.all_tasks() if "/http_engine.py" in repr(task)]


def test_a_prompt_is_continued(serving: Any, speech: Any) -> None:
    async def main() -> None:
        async with serving(speech) as server, engine_of(server, weight_version=3) as engine:
            generation = await engine.generate(PROMPT, FOUR, (9,), "job")
            assert generation.token_ids.tolist() == [4, 5, 6, 7]
            assert generation.logprobs.tolist() == [-0.5] * 4
            assert generation.spans == (VersionSpan(3, 0, 4),)
            assert engine.weight_version == 3
            assert engine.description.chat == CHAT
            assert engine.description.max_in_flight == 256

    asyncio.run(main())


@pytest.mark.few(1)
def test_five_hundred_at_once(serving: Any, speech: Any) -> None:
    async def main() -> None:
        async with serving(speech) as server, engine_of(server, connections=100) as engine:
            running = most = 0

            async def handle(body: Any) -> web.Response:
                nonlocal running, most
                running += 1
                most = max(most, running)
                await asyncio.sleep(0.01)
                running -= 1
                return speech.good(body)

            server.handlers[speech.path] = handle
            prompts = [np.array([1, n % 90], np.int32) for n in range(2000)]
            generations = await asyncio.gather(*(engine.generate(prompt, FOUR, (), "job") for prompt in prompts))
            for prompt, generation in zip(prompts, generations, strict=True):
                assert generation.token_ids.tolist() == [prompt[-1] + n for n in (1, 2, 3, 4)]
            assert 25 < most <= 100

    asyncio.run(main())


@pytest.mark.parametrize(
    ("ids", "logprobs", "words"),
    [
        ([4, 5, 6], [-1.0, -1.0], "log-probs"),
        ([4, 5], [-1.0, None], "not a logarithm"),
        ([4, 1000], [-1.0, -1.0], "vocabulary of 100"),
    ],
)
def test_a_bad_answer_fails_the_turn_only(
    serving: Any, speech: Any, weights: Callable[..., Path], ids: list[int], logprobs: list[float | None], words: str
) -> None:
    async def main() -> None:
        chat = ChatSettings("transformers", str(weights("model")))
        async with serving(speech) as server, engine_of(server, chat=chat) as engine:
            assert engine.description.vocabulary == 100
            server.handlers[speech.path] = lambda _: web.json_response(speech.answer(ids, logprobs))
            with pytest.raises(EngineFailed, match=words) as caught:
                await engine.generate(PROMPT, FOUR, (), "job")
            assert not caught.value.fields.get("fatal")
            server.handlers[speech.path] = lambda _: web.json_response(speech.text_only())
            with pytest.raises(EngineFailed, match="text only"):
                await engine.generate(PROMPT, FOUR, (), "job")
            server.handlers[speech.path] = lambda _: web.Response(text='{"choices": [{"tok')
            with pytest.raises(EngineFailed, match="not JSON"):
                await engine.generate(PROMPT, FOUR, (), "job")
            server.handlers[speech.path] = lambda _: web.json_response({"error": "out of memory"}, status=500)
            with pytest.raises(EngineFailed, match=r"500 .*out of memory") as caught:
                await engine.generate(PROMPT, FOUR, (), "job")
            assert not caught.value.refused
            server.handlers[speech.path] = lambda _: web.json_response({"error": "no such field"}, status=400)
            with pytest.raises(EngineFailed, match="no such field") as caught:
                await engine.generate(PROMPT, FOUR, (), "job")
            assert caught.value.refused, "another backend would say the same"
            server.handlers[speech.path] = lambda _: web.Response(status=429)
            with pytest.raises(EngineFailed, match="busy") as caught:
                await engine.generate(PROMPT, FOUR, (), "job")
            assert caught.value.unreachable
            server.handlers[speech.path] = speech.good
            assert (await engine.generate(PROMPT, FOUR, (), "job")).finish_reason in ("length", "stop")

    asyncio.run(main())


def test_a_prompt_that_cannot_be_is_not_sent(serving: Any, speeches: Any, weights: Callable[..., Path]) -> None:
    async def main() -> None:
        chat = ChatSettings("transformers", str(weights("model")))
        async with (
            serving(speeches["prorl"]) as server,
            engine_of(server, chat=chat, api="prorl", context_tokens=6) as engine,
        ):
            for ids, words in (
                ([], "empty"),
                ([1, 100], "outside of 0 to 99"),
                ([-1], "outside of 0 to 99"),
                ([1] * 6, "leaves no room in a context of 6"),
            ):
                with pytest.raises(EngineFailed, match=words) as caught:
                    await engine.generate(np.array(ids, np.int32), FOUR, (), "job")
                assert caught.value.refused
            assert not server.requests
            generation = await engine.generate(PROMPT, Sampling(max_tokens=1000), (), "job")
            assert server.asked("/generate")[0]["max_tokens"] == 3
            assert (generation.token_ids.tolist(), generation.finish_reason) == ([4, 5, 6], "length")

    asyncio.run(main())


def test_cancelling_reaches_the_server(serving: Any, speech: Any) -> None:
    async def main() -> None:
        async with serving(speech) as server, engine_of(server) as engine:
            server.handlers[speech.path] = lambda _: asyncio.sleep(3600)
            task = asyncio.create_task(engine.generate(PROMPT, FOUR, (), "job"))
            await server.until(lambda: server.requests)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with asyncio.timeout(10):
                await server.cancelled.wait()

    asyncio.run(main())


def test_closing_fails_what_runs(serving: Any, speech: Any) -> None:
    async def main() -> None:
        async with serving(speech) as server, engine_of(server, connections=1) as engine:
            server.handlers[speech.path] = lambda _: asyncio.sleep(3600)
            tasks = [asyncio.create_task(engine.generate(PROMPT, FOUR, (), "job")) for _ in range(3)]
            await server.until(lambda: server.requests)
            await engine.close()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(outcome, EngineFailed)
                assert outcome.unreachable
            with pytest.raises(EngineFailed, match="closed"):
                await engine.generate(PROMPT, FOUR, (), "job")
            with pytest.raises(EngineFailed, match="closed"):
                await engine.check_health()

    asyncio.run(main())


def test_the_tokenizer_is_the_servers_model(serving: Any, speeches: Any, weights: Callable[..., Path]) -> None:
    async def main() -> None:
        model = str(weights("model"))
        async with serving(speeches["vllm"]) as server:
            card = {"id": "tiny", "root": model, "max_model_len": 2048}
            server.handlers["/v1/models"] = lambda _: web.json_response({"data": [card]})
            async with engine_of(server, chat=None) as engine:
                description = engine.description
                assert description.chat == ChatSettings("transformers", model)
                assert (description.model, description.context_tokens, description.vocabulary) == (model, 2048, 100)
            async with engine_of(server, chat=ChatSettings("transformers", history="append")) as engine:
                assert engine.description.chat == ChatSettings("transformers", model, history="append")
        async with serving(speeches["prorl"]) as server:
            with pytest.raises(ConfigError, match="does not say which model"):
                async with engine_of(server, chat=None):
                    pass

    asyncio.run(main())


# Health ---------------------------------------------------------------------------------------------------------------


KV_FIGURES = {
    "vllm": 'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:cache_config_info{kv_cache_size_tokens="4096"} 1.0\n',
    "sglang": 'sglang:token_usage{tp_rank="0"} 0.5\nsglang:max_total_num_tokens{tp_rank="0"} 4096.0\n',
}
KV_FIGURES["completions"] = KV_FIGURES["vllm"]


@pytest.mark.parametrize("name", ["vllm", "completions", "sglang", "prorl"])
def test_a_server_is_asked_for_its_kv_cache_with_its_health(serving: Any, speeches: Any, name: str) -> None:
    async def main() -> None:
        async with serving(speeches[name]) as server:
            server.handlers["/metrics"] = lambda _: web.Response(text=KV_FIGURES.get(name, "some_metric 1.0\n"))
            async with engine_of(server) as engine:
                await engine.check_health()
                known = name in KV_FIGURES
                assert engine.description.kv == known
                assert len(server.asked("/metrics")) == known
                assert engine.kv_figures(0.0) == (KvFigures(4096, 0.5, 0, 0) if known else None)

    asyncio.run(main())


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_server_without_metrics_is_scheduled_by_its_slots_and_the_log_says_so(
    serving: Any, speeches: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with serving(speeches[name]) as server:
            server.handlers["/metrics"] = lambda _: web.Response(status=404, text="Not Found")
            async with engine_of(server) as engine:
                await engine.check_health()
                assert not engine.description.kv
                assert server.asked("/metrics") == []

    asyncio.run(main())
    assert "its slots alone limit its rollouts; SGLang does with --enable-metrics: GET /metrics: 404" in caplog.text


def test_health_is_the_servers(serving: Any, speeches: Any) -> None:
    async def main() -> None:
        async with serving(speeches["vllm"]) as server, engine_of(server) as engine:
            await engine.check_health()
            server.handlers["/health"] = lambda _: web.Response(status=503, text="engine dead")
            with pytest.raises(EngineFailed, match="503 engine dead") as caught:
                await engine.check_health()
            assert not caught.value.fields.get("fatal")
            server.handlers["/health"] = lambda _: web.Response()
            await engine.check_health()
            del server.handlers["/health"]
            await engine.check_health()
            await server.stop()
            with pytest.raises(EngineFailed, match="cannot be reached"):
                await engine.check_health()
            with pytest.raises(EngineFailed, match="cannot be reached") as caught:
                await engine.generate(PROMPT, FOUR, (), "job")
            assert caught.value.unreachable

    asyncio.run(main())


def test_a_silent_server_is_asked_for_its_health_once_at_a_time(
    serving: Any, speeches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEALTH_S", 0.3)

    async def main() -> None:
        async with serving(speeches["vllm"]) as server, engine_of(server) as engine:
            server.handlers["/health"] = lambda _: asyncio.sleep(3600)
            checks = await asyncio.gather(*(engine.check_health() for _ in range(5)), return_exceptions=True)
            assert all(isinstance(outcome, EngineFailed) for outcome in checks)
            assert len(server.asked("/health")) == 1
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await engine.check_health()
            with pytest.raises(EngineFailed, match="did not answer within"):
                await engine.check_health()
            assert len(server.asked("/health")) == 2

    asyncio.run(main())


# Weights --------------------------------------------------------------------------------------------------------------


class Updating:
    """A server whose generations end when the test says so, or are aborted, and that takes new weights."""

    def __init__(self, server: Any, speech: Any) -> None:
        self.server, self.speech = server, speech
        self.version = "default"
        self.load: Any = lambda: web.json_response({"success": True, "message": "well done"})
        self.ends: list[asyncio.Future[str]] = []
        server.handlers |= {
            speech.path: self.generate,
            "/is_paused": lambda _: web.json_response({"is_paused": False}),
            "/pause": self.pause,
            "/resume": lambda _: web.json_response({"status": "resumed"}),
            "/abort_request": self.pause,
            "/collective_rpc": lambda _: self.load(),
            "/update_weights_from_disk": self.update,
            "/update_weight_version": self.set_version,
        }

    async def generate(self, body: Any) -> web.Response:
        end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ends.append(end)
        version = self.version
        reason = await end
        prompt = self.speech.prompt(body)
        count = 2 if reason == "abort" else self.speech.max_tokens(body)
        ids = [prompt[-1] + 1 + n for n in range(count)]
        return web.json_response(self.speech.answer(ids, [-0.5] * count, reason, version))

    async def pause(self, _: Any) -> web.Response:
        for end in self.ends:
            if not end.done():
                end.set_result("abort")
        return web.json_response({})

    def set_version(self, body: Any) -> web.Response:
        self.version = body["new_version"]
        return web.json_response({})

    def update(self, body: Any) -> web.Response:
        answer = self.load()
        if answer.status == 200:
            self.version = body["weight_version"]
        return answer

    async def started(self, count: int) -> None:
        await self.server.until(lambda: len(self.ends) >= count)

    def paths(self) -> list[str]:
        return [path for path, _ in self.server.requests if path != self.speech.path]


@asynccontextmanager
async def updating(serving: Any, speech: Any) -> AsyncIterator[tuple[Updating, HttpEngine]]:
    async with serving(speech) as server, engine_of(server) as engine:
        yield Updating(server, speech), engine


def test_vllm_is_paused_as_the_mode_says(serving: Any, speeches: Any, weights: Callable[..., Path]) -> None:
    async def main() -> None:
        path = weights("new")
        async with updating(serving, speeches["vllm"]) as (server, engine):
            for version, (mode, word) in enumerate({"keep": "keep", "drain": "wait", "abort": "abort"}.items(), 5):
                server.server.requests.clear()
                await engine.update_weights(path, version, mode)
                assert server.server.requests == [
                    ("/is_paused", None),
                    (f"/pause?mode={word}", None),
                    ("/update_weight_version", {"new_version": "prorl-loading"}),
                    ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}),
                    ("/update_weight_version", {"new_version": str(version)}),
                    ("/resume", None),
                ]
                assert engine.weight_version == version

    asyncio.run(main())


@pytest.mark.parametrize("name", ["completions", "sglang"])
def test_keep_goes_on_where_the_old_weights_were_aborted(
    serving: Any, speeches: Any, weights: Callable[..., Path], name: str
) -> None:
    async def main() -> None:
        path = weights("new")
        async with updating(serving, speeches[name]) as (server, engine):
            turn = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=6, seed=5), (), "job"))
            await server.started(1)
            update = asyncio.create_task(engine.update_weights(path, 8, "keep"))
            await server.started(2)
            await update
            later = server.server.asked(server.speech.path)[1]
            assert server.speech.prompt(later) == [1, 2, 3, 4, 5]
            assert server.speech.max_tokens(later) == 4
            server.ends[1].set_result("length")
            generation = await turn
            assert generation.token_ids.tolist() == [4, 5, 6, 7, 8, 9]
            assert generation.spans == (VersionSpan(0, 0, 2), VersionSpan(8, 2, 6))
            assert len(generation.logprobs) == 6
            assert generation.finish_reason == "length"
            assert engine.weight_version == 8

    asyncio.run(main())


@pytest.mark.parametrize("name", ["completions", "sglang"])
def test_abort_gives_back_what_the_old_weights_made(
    serving: Any, speeches: Any, weights: Callable[..., Path], name: str
) -> None:
    async def main() -> None:
        path = weights("new")
        async with updating(serving, speeches[name]) as (server, engine):
            turn = asyncio.create_task(engine.generate(PROMPT, FOUR, (), "job"))
            await server.started(1)
            await engine.update_weights(path, 8, "abort")
            generation = await turn
            assert (generation.token_ids.tolist(), generation.finish_reason) == ([4, 5], "abort")
            assert generation.spans == (VersionSpan(0, 0, 2),)

    asyncio.run(main())


@pytest.mark.parametrize("name", ["completions", "sglang"])
def test_drain_lets_the_old_end_and_the_new_wait(
    serving: Any, speeches: Any, weights: Callable[..., Path], name: str
) -> None:
    async def main() -> None:
        path = weights("new")
        async with updating(serving, speeches[name]) as (server, engine):
            old = asyncio.create_task(engine.generate(PROMPT, FOUR, (), "job"))
            await server.started(1)
            update = asyncio.create_task(engine.update_weights(path, 8, "drain"))
            await asyncio.sleep(0.1)
            new = asyncio.create_task(engine.generate(PROMPT, FOUR, (), "job"))
            await asyncio.sleep(0.1)
            assert len(server.ends) == 1
            assert not any("weights" in path or "rpc" in path for path in server.paths())
            server.ends[0].set_result("length")
            await update
            await server.started(2)
            server.ends[1].set_result("length")
            assert (await old).spans == (VersionSpan(0, 0, 4),)
            assert (await new).spans == (VersionSpan(8, 0, 4),)

    asyncio.run(main())


def test_generations_on_their_way_to_the_server_are_aborted_too(
    serving: Any, speeches: Any, weights: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pause, "ABORT_INTERVAL_S", 0.05)

    async def main() -> None:
        path = weights("new")
        async with serving(speeches["sglang"]) as server, engine_of(server, connections=1) as engine:
            state = Updating(server, speeches["sglang"])
            turns = [asyncio.create_task(engine.generate(PROMPT, FOUR, (), "job")) for _ in range(3)]
            await state.started(1)
            await engine.update_weights(path, 8, "abort")
            for generation in await asyncio.gather(*turns):
                assert generation.spans == (VersionSpan(0, 0, 2),)
            assert len(server.asked("/abort_request")) >= 3

    asyncio.run(main())


@pytest.mark.parametrize("name", ["vllm", "completions", "sglang", "prorl"])
@pytest.mark.parametrize("kind", ["missing", "empty", "cut"])
def test_wrong_weights_never_reach_the_server(
    serving: Any, speeches: Any, weights: Callable[..., Path], tmp_path: Path, name: str, kind: str
) -> None:
    async def main() -> None:
        path = tmp_path / kind
        if kind == "empty":
            path.mkdir()
        if kind == "cut":
            file = weights(kind) / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-4])
        async with updating(serving, speeches[name]) as (server, engine):
            with pytest.raises(InvalidWeights if name != "prorl" else EngineFailed):
                await engine.update_weights(path, 8, "keep")
            assert server.paths() == []
            assert engine.weight_version == 0

    asyncio.run(main())


def test_weights_of_another_model_never_reach_the_server(
    serving: Any, speeches: Any, weights: Callable[..., Path]
) -> None:
    async def main() -> None:
        model, other, same = weights("model"), weights("other", 4), weights("same")
        async with serving(speeches["vllm"]) as server:
            card = {"id": "tiny", "root": str(model), "max_model_len": 99}
            server.handlers["/v1/models"] = lambda _: web.json_response({"data": [card]})
            async with engine_of(server) as engine:
                state = Updating(server, speeches["vllm"])
                with pytest.raises(InvalidWeights, match="differs from the model"):
                    await engine.update_weights(other, 8, "keep")
                assert state.paths() == []
                await engine.update_weights(same, 8, "keep")
                assert engine.weight_version == 8

    asyncio.run(main())


def test_a_prorl_server_is_updated_by_its_trainer(serving: Any, speeches: Any, weights: Callable[..., Path]) -> None:
    async def main() -> None:
        path = weights("new")
        async with updating(serving, speeches["prorl"]) as (_, engine):
            with pytest.raises(EngineFailed, match=r"between client.begin_weights and end_weights"):
                await engine.update_weights(path, 8, "keep")

    asyncio.run(main())


@pytest.mark.parametrize(("device", "experts", "refused"), [("cpu", 16, True), ("cpu", 0, False), ("cuda", 16, False)])
def test_new_weights_of_a_mixture_are_refused_on_a_cpu(
    serving: Any, speeches: Any, weights: Callable[..., Path], device: str, experts: int, refused: bool
) -> None:
    """vLLM's CPU build would keep the old weights of its experts."""

    async def main() -> None:
        path = weights("model")
        shape = {"num_experts": experts, "num_experts_per_tok": 2, "num_hidden_layers": 2}
        (path / "config.json").write_text(json.dumps({"vocab_size": 100, **shape}))
        async with serving(speeches["vllm"]) as server:
            server.handlers["/v1/models"] = lambda _: web.json_response({"data": [{"id": "m", "root": str(path)}]})
            config = f"model='m', device_config={device}, seed=0"
            server.handlers["/server_info"] = lambda _: web.json_response({"vllm_config": config, "vllm_env": {}})
            async with engine_of(server) as engine:
                Updating(server, speeches["vllm"])
                if not refused:
                    await engine.update_weights(path, 8, "keep")
                    assert engine.weight_version == 8
                    return
                for update in (engine.update_weights(path, 8, "keep"), engine.begin_update("abort")):
                    with pytest.raises(EngineFailed, match=rf"mixture {path} takes no new weights .* CPU") as caught:
                        await update
                    assert caught.value.refused
                assert {called for called, _ in server.requests} == set(), "nothing is paused or loaded"
                assert engine.weight_version == 0

    asyncio.run(main())


@pytest.mark.parametrize("name", ["vllm", "completions"])
def test_vllm_without_development_mode_is_left_alone(
    serving: Any, speeches: Any, weights: Callable[..., Path], name: str
) -> None:
    async def main() -> None:
        path = weights("new")
        async with serving(speeches[name]) as server, engine_of(server) as engine:
            with pytest.raises(EngineFailed, match="VLLM_SERVER_DEV_MODE=1"):
                await engine.update_weights(path, 8, "keep")
            assert [path for path, _ in server.requests] == ["/is_paused"]
            assert (await engine.generate(PROMPT, FOUR, (), "job")).spans == (VersionSpan(0, 0, 4),)

    asyncio.run(main())


@pytest.mark.parametrize("name", ["vllm", "completions"])
def test_nothing_is_generated_with_weights_that_nobody_knows(
    serving: Any, speeches: Any, weights: Callable[..., Path], name: str
) -> None:
    async def main() -> None:
        path = weights("new")
        async with updating(serving, speeches[name]) as (server, engine):
            server.load = lambda: web.json_response({"error": "no such tensor"}, status=500)
            with pytest.raises(EngineFailed, match="no such tensor"):
                await engine.update_weights(path, 8, "abort")
            assert server.paths()[-1] == "/resume"
            with pytest.raises(EngineFailed, match="in the middle of taking the weights") as caught:
                await engine.generate(PROMPT, FOUR, (), "job")
            assert caught.value.unreachable
            with pytest.raises(EngineFailed, match="in the middle"):
                await engine.check_health()
            server.load = lambda: web.json_response({"results": [None]})
            await engine.update_weights(path, 9, "abort")
            await engine.check_health()
            turn = asyncio.create_task(engine.generate(PROMPT, FOUR, (), "job"))
            await server.started(1)
            server.ends[0].set_result("length")
            assert (await turn).spans == (VersionSpan(9, 0, 4),)

    asyncio.run(main())


def test_sglang_keeps_the_old_weights_when_it_refuses_new_ones(
    serving: Any, speeches: Any, weights: Callable[..., Path]
) -> None:
    async def main() -> None:
        path = weights("new")
        async with updating(serving, speeches["sglang"]) as (server, engine):
            refusal = {"success": False, "message": "Rolling back to original weights."}
            server.load = lambda: web.json_response(refusal, status=400)
            with pytest.raises(InvalidWeights, match="Rolling back"):
                await engine.update_weights(path, 8, "keep")
            assert engine.weight_version == 0
            await engine.check_health()
            server.load = lambda: web.Response(status=500)
            with pytest.raises(EngineFailed, match="500"):
                await engine.update_weights(path, 8, "keep")
            with pytest.raises(EngineFailed, match="in the middle"):
                await engine.generate(PROMPT, FOUR, (), "job")

    asyncio.run(main())


def test_an_update_goes_on_when_its_caller_leaves(serving: Any, speeches: Any, weights: Callable[..., Path]) -> None:
    async def main() -> None:
        path = weights("new")
        async with updating(serving, speeches["vllm"]) as (server, engine):
            go = asyncio.Event()

            async def load() -> web.Response:
                await go.wait()
                return web.json_response({})

            server.load = load
            update = asyncio.create_task(engine.update_weights(path, 8, "keep"))
            await server.server.until(lambda: "/collective_rpc" in server.paths())
            update.cancel()
            with pytest.raises(asyncio.CancelledError):
                await update
            go.set()
            await server.server.until(lambda: "/resume" in server.paths())
            await engine.update_weights(path, 9, "keep")
            assert [body["new_version"] for body in server.server.asked("/update_weight_version")] == [
                "prorl-loading",
                "8",
                "prorl-loading",
                "9",
            ]

    asyncio.run(main())


def test_closing_in_the_middle_of_an_update_does_not_resume_the_server(
    serving: Any, speeches: Any, weights: Callable[..., Path]
) -> None:
    async def main() -> None:
        path = weights("new")
        async with updating(serving, speeches["vllm"]) as (server, engine):
            server.load = lambda: asyncio.sleep(3600)
            update = asyncio.create_task(engine.update_weights(path, 8, "keep"))
            await server.server.until(lambda: "/collective_rpc" in server.paths())
            await engine.close()
            with pytest.raises(EngineFailed, match="the engine was closed"):
                await update
            assert server.paths()[-1] == "/collective_rpc"
            assert server.version == "prorl-loading"

    asyncio.run(main())


@pytest.mark.parametrize("name", ["vllm", "completions"])
def test_weights_that_another_host_left_in_the_middle_have_no_version(
    serving: Any, speeches: Any, weights: Callable[..., Path], name: str
) -> None:
    async def main() -> None:
        path = weights("new")
        async with serving(speeches[name]) as server:
            state = Updating(server, speeches[name])
            state.version, paused = "prorl-loading", [True]

            def resume(_: Any) -> web.Response:
                paused[0] = False
                server.handlers[speeches[name].path] = lambda body: web.json_response(
                    speeches[name].answer([4] * 4, [-0.5] * 4, version=state.version)
                )
                return web.json_response({})

            server.handlers["/is_paused"] = lambda _: web.json_response({"is_paused": paused[0]})
            server.handlers["/weight_info"] = lambda _: web.json_response({"weight_version": state.version})
            server.handlers["/resume"] = resume
            async with engine_of(server, weight_version=3, api=name) as engine:
                assert not paused[0]
                for ask in (engine.check_health, lambda: engine.generate(PROMPT, FOUR, (), "job")):
                    with pytest.raises(EngineFailed, match="in the middle of taking the weights") as caught:
                        await ask()
                    assert caught.value.unreachable
                await engine.update_weights(path, 5, "drain")
                await engine.check_health()
                assert (await engine.generate(PROMPT, FOUR, (), "job")).spans == (VersionSpan(5, 0, 4),)

    asyncio.run(main())


def test_a_server_that_says_numbers_and_then_a_word_was_started_again(
    serving: Any, speeches: Any, weights: Callable[..., Path]
) -> None:
    async def main() -> None:
        path = weights("new")
        async with updating(serving, speeches["vllm"]) as (server, engine):

            async def spans() -> Any:
                begun = len(server.ends)
                turn = asyncio.create_task(engine.generate(PROMPT, FOUR, (), "job"))
                await server.started(begun + 1)
                server.ends[-1].set_result("length")
                return (await turn).spans

            assert await spans() == (VersionSpan(0, 0, 4),)
            for word in ("default", "step-8", "2147483648"):
                await engine.update_weights(path, 5, "keep")
                assert await spans() == (VersionSpan(5, 0, 4),)
                server.version = word
                with pytest.raises(EngineFailed, match="started again") as caught:
                    await spans()
                assert caught.value.unreachable
                with pytest.raises(EngineFailed, match="started again"):
                    await engine.check_health()
            await engine.set_weight_version(6)
            await engine.check_health()
            assert await spans() == (VersionSpan(6, 0, 4),)

    asyncio.run(main())


@pytest.mark.parametrize("name", ["completions", "prorl"])
def test_after_an_outage_a_server_that_says_nothing_may_have_other_weights(
    serving: Any, speeches: Any, name: str
) -> None:
    async def main() -> None:
        async with serving(speeches[name]) as server, engine_of(server) as engine:

            async def outage() -> None:
                server.handlers["/health"] = lambda _: web.Response(status=503)
                with pytest.raises(EngineFailed, match="not well"):
                    await engine.check_health()
                server.handlers["/health"] = lambda _: web.Response()

            await outage()
            await engine.check_health()
            await engine.set_weight_version(4)
            await outage()
            for ask in (engine.check_health, lambda: engine.generate(PROMPT, FOUR, (), "job")):
                with pytest.raises(EngineFailed, match="may have been started again") as caught:
                    await ask()
                assert caught.value.unreachable
            await engine.set_weight_version(5)
            await engine.check_health()
            assert (await engine.generate(PROMPT, FOUR, (), "job")).spans == (VersionSpan(5, 0, 4),)

    asyncio.run(main())


def test_a_paused_server_is_not_waited_for(serving: Any, speeches: Any) -> None:
    async def main() -> None:
        async with serving(speeches["vllm"]) as server:
            server.handlers["/is_paused"] = lambda _: web.json_response({"is_paused": True})
            with pytest.raises(EngineFailed, match="is paused"):
                async with engine_of(server):
                    pass
            assert not server.asked("/inference/v1/generate")

    asyncio.run(main())


@pytest.mark.parametrize("name", ["vllm", "completions", "sglang"])
def test_an_abort_that_nobody_asked_for_is_a_failure(serving: Any, speeches: Any, name: str) -> None:
    async def main() -> None:
        speech = speeches[name]
        async with serving(speech) as server, engine_of(server) as engine:
            answer = {**speech.answer([], [], "abort"), "message": "too long"}
            server.handlers[speech.path] = lambda _: web.json_response(answer)
            with pytest.raises(EngineFailed, match=r"without being asked: 200 .*too long"):
                await engine.generate(PROMPT, FOUR, (), "job")
            assert len(server.asked(speech.path)) == 1

    asyncio.run(main())


def test_an_answer_is_no_longer_than_what_was_asked_for(serving: Any, speech: Any) -> None:
    async def main() -> None:
        async with serving(speech) as server, engine_of(server) as engine:
            server.handlers[speech.path] = lambda _: web.Response(body=b" " * 2**21)
            with pytest.raises(EngineFailed, match="answers with more than"):
                await engine.generate(PROMPT, FOUR, (), "job")

    asyncio.run(main())


def test_a_server_that_others_update_tells_its_version(serving: Any, speeches: Any) -> None:
    async def main() -> None:
        async with updating(serving, speeches["vllm"]) as (server, engine):
            old = asyncio.create_task(engine.generate(PROMPT, FOUR, (), "job"))
            await server.started(1)
            server.version = "4"
            new = asyncio.create_task(engine.generate(PROMPT, FOUR, (), "job"))
            await server.started(2)
            server.ends[1].set_result("length")
            assert (await new).spans == (VersionSpan(4, 0, 4),)
            assert engine.weight_version == 4
            server.ends[0].set_result("length")
            assert (await old).spans == (VersionSpan(0, 0, 4),)
            assert engine.weight_version == 4

    asyncio.run(main())


def test_weights_that_others_changed_have_the_version_that_is_told(serving: Any, speech: Any) -> None:
    async def main() -> None:
        async with serving(speech) as server, engine_of(server, weight_version=3) as engine:
            told: list[str] = []

            def note(body: Any) -> web.Response:
                told.append(body["new_version"])
                return web.json_response({})

            server.handlers["/update_weight_version"] = note
            await engine.set_weight_version(5)
            assert engine.weight_version == 5
            if speech.name == "vllm":
                answer = speech.answer([4] * 4, [-0.5] * 4, version="5")
                server.handlers[speech.path] = lambda _: web.json_response(answer)
            generation = await engine.generate(PROMPT, FOUR, (), "job")
            assert {span.weight_version for span in generation.spans} == {5}
            assert told == (["5"] if speech.name != "prorl" else [])

    asyncio.run(main())


# The two halves -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vllm", "completions", "sglang"])
def test_a_trainer_moves_the_weights_between_the_halves(serving: Any, speeches: Any, name: str) -> None:
    async def main() -> None:
        async with updating(serving, speeches[name]) as (server, engine):
            early = asyncio.create_task(engine.generate(PROMPT, FOUR, (), "job"))
            await server.started(1)
            await engine.begin_update("abort")
            assert (await early).finish_reason == "abort"
            begun = list(server.server.requests)
            await engine.begin_update("keep")
            late = asyncio.create_task(engine.generate(PROMPT, FOUR, (), "job")) if name != "vllm" else None
            await asyncio.sleep(0.05)
            assert len(server.ends) == 1, "what comes, waits here; at a server that is paused, there"
            await engine.end_update(8)
            late = late or asyncio.create_task(engine.generate(PROMPT, FOUR, (), "job"))
            await server.started(2)
            server.ends[1].set_result("length")
            assert engine.weight_version == 8
            assert (await late).spans == (VersionSpan(8, 0, 4),)
            paths = [path for path, _ in begun[1:]]
            expected = {
                "vllm": ["/pause?mode=abort", "/update_weight_version"],
                "completions": ["/pause?mode=abort", "/resume", "/pause?mode=wait", "/update_weight_version"],
                "sglang": ["/abort_request"],
            }[name]
            assert [path for path in paths if path not in ("/is_paused", server.speech.path)] == expected
            words = [body["new_version"] for body in server.server.asked("/update_weight_version")]
            assert words == (["8"] if name == "sglang" else ["prorl-loading", "8"])
            assert server.paths()[-1] == ("/update_weight_version" if name == "sglang" else "/resume")

    asyncio.run(main())


@pytest.mark.parametrize("name", ["vllm", "completions", "prorl"])
@pytest.mark.parametrize("mode", ["keep", "abort", "drain"])
def test_a_server_that_can_not_be_paused_is_let_go(serving: Any, speeches: Any, name: str, mode: Any) -> None:
    """Nothing that it says of a turn that was under way is read: the turn is asked for again, of the new weights."""

    async def main() -> None:
        speech = speeches[name]
        async with serving(speech) as server, engine_of(server) as engine:
            state = Updating(server, speech)
            for path in ("/is_paused", "/pause", "/resume", "/abort_request", "/update_weight_version"):
                del server.handlers[path]
            early = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=4, seed=3), (), "job"))
            await state.started(1)
            beginning = asyncio.create_task(engine.begin_update(mode))
            if mode == "drain":
                await asyncio.sleep(0.05)
                assert not beginning.done()
                state.ends[0].set_result("length")
            await beginning
            late = asyncio.create_task(engine.generate(PROMPT, FOUR, (), "job"))
            await asyncio.sleep(0.05)
            assert len(state.ends) == 1
            if mode != "drain":
                await asyncio.wait_for(server.cancelled.wait(), 20)
            await engine.end_update(8)
            await state.started(3 if mode == "keep" else 2)
            for end in state.ends[1:]:
                end.set_result("length")
            assert (await late).spans == (VersionSpan(8, 0, 4),)
            done = await early
            if mode == "keep":
                assert done.spans == (VersionSpan(8, 0, 4),)
                bodies = server.asked(speech.path)
                assert bodies[0] in bodies[1:], "with its seed: nobody has seen what is lost"
            elif mode == "abort":
                assert (len(done.token_ids), done.finish_reason) == (0, "abort")
            else:
                assert done.spans == (VersionSpan(0, 0, 4),)

    asyncio.run(main())


@pytest.mark.parametrize("name", ["vllm", "completions", "sglang", "prorl"])
def test_an_update_that_is_taken_back_leaves_the_version_as_it_was(
    serving: Any, speeches: Any, tmp_path: Path, name: str
) -> None:
    async def main() -> None:
        async with updating(serving, speeches[name]) as (server, engine):
            await engine.set_weight_version(3)
            for wrong in (False, True):
                await engine.begin_update("keep")
                if wrong:
                    with pytest.raises((InvalidWeights, EngineFailed)):
                        await engine.update_weights(tmp_path / "nothing", 4, "keep")
                else:
                    await engine.end_update(None)
                turn = asyncio.create_task(engine.generate(PROMPT, FOUR, (), "job"))
                await server.started(1 + wrong)
                server.ends[-1].set_result("length")
                assert (await turn).spans == (VersionSpan(3, 0, 4),)
            assert engine.weight_version == 3
            if name in ("vllm", "completions"):
                assert server.paths()[-1] == "/resume"
                assert server.version == "3"

    asyncio.run(main())


@pytest.mark.parametrize("name", ["vllm", "completions"])
def test_a_half_that_the_server_failed_in_may_be_tried_again(serving: Any, speeches: Any, name: str) -> None:
    async def main() -> None:
        async with updating(serving, speeches[name]) as (server, engine):
            well = server.server.handlers["/update_weight_version"]
            server.server.handlers["/update_weight_version"] = lambda _: web.Response(status=500)
            with pytest.raises(EngineFailed, match="update_weight_version failed"):
                await engine.begin_update("keep")
            assert server.paths()[-1] == "/resume", "it goes on as before"
            server.server.handlers["/update_weight_version"] = well
            await engine.begin_update("keep")
            resume = server.server.handlers["/resume"]
            server.server.handlers["/resume"] = lambda _: web.Response(status=500)
            with pytest.raises(EngineFailed, match="resume failed"):
                await engine.end_update(8)
            server.server.handlers["/resume"] = resume
            await engine.end_update(8)
            turn = asyncio.create_task(engine.generate(PROMPT, FOUR, (), "job"))
            await server.started(1)
            server.ends[0].set_result("length")
            assert (await turn).spans == (VersionSpan(8, 0, 4),)

    asyncio.run(main())
