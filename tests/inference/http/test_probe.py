from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from prorl_zmq.errors import ConfigError, EngineFailed
from prorl_zmq.inference.http import probe as module
from prorl_zmq.inference.http.connections import Connections
from prorl_zmq.inference.http.probe import Found, probe, vocabulary_of

if TYPE_CHECKING:
    from pathlib import Path

DISABLED = {"error": {"message": "Scale-out endpoints are disabled. Restart with --enable-scale-out.", "code": 403}}


async def probed(url: str, api: Any = "auto", start_s: float = 10.0, **options: Any) -> Found:
    connections = Connections(url, retry_s=0.2)
    try:
        return await probe(connections, api, initial_version=2, start_s=start_s, **options)
    finally:
        await connections.close()


def models(root: str = "/models/tiny", **more: Any) -> Any:
    card = {"id": "tiny", "root": root, "object": "model", "max_model_len": 2048}
    return lambda _: web.json_response({"object": "list", "data": [{**card, **more}]})


def test_each_dialect_is_found_out(serving: Any, speech: Any) -> None:
    async def main() -> None:
        async with serving(speech) as server:
            assert (await probed(server.url)).dialect.name == speech.name
            assert (await probed(server.url, speech.name)).dialect.name == speech.name
            with pytest.raises(EngineFailed, match="gives no token ids") as caught:
                await probed(server.url, "prorl" if speech.name == "vllm" else "vllm")
            assert "404" in str(caught.value) or "500" in str(caught.value)

    asyncio.run(main())


def test_the_exactest_dialect_is_taken(serving: Any, speeches: Any) -> None:
    async def main() -> None:
        async with serving(speeches["completions"]) as server:
            server.handlers["/inference/v1/generate"] = speeches["vllm"].good
            assert (await probed(server.url)).dialect.name == "vllm"
            assert (await probed(server.url, "completions")).dialect.name == "completions"

    asyncio.run(main())


def test_vllm_says_what_it_serves(serving: Any, speeches: Any) -> None:
    async def main() -> None:
        async with serving(speeches["vllm"]) as server:
            server.handlers["/v1/models"] = models()
            found = await probed(server.url)
            assert (found.model, found.context_tokens, found.weight_version) == ("/models/tiny", 2048, 2)
            answer = speeches["vllm"].answer
            server.handlers["/inference/v1/generate"] = lambda _: web.json_response(answer([4], [-1.0], version="31"))
            assert (await probed(server.url)).weight_version == 31

    asyncio.run(main())


def test_completions_are_told_the_models_name(serving: Any, speeches: Any) -> None:
    async def main() -> None:
        async with serving(speeches["completions"]) as server:
            server.handlers["/v1/models"] = models()
            server.handlers["/weight_info"] = lambda _: web.json_response({"weight_version": "7"})
            found = await probed(server.url)
            assert (found.model, found.context_tokens, found.weight_version) == ("/models/tiny", 2048, 7)
            assert server.asked("/v1/completions")[-1]["model"] == "tiny"

    asyncio.run(main())


@pytest.mark.parametrize("prefix", ["/get_", "/"])
def test_sglang_says_what_it_serves(serving: Any, speeches: Any, prefix: str) -> None:
    async def main() -> None:
        async with serving(speeches["sglang"]) as server:
            info = {"model_path": "/models/tiny", "is_generation": True, "weight_version": "7"}
            server.handlers[f"{prefix}model_info"] = lambda _: web.json_response(info)
            server.handlers[f"{prefix}server_info"] = lambda _: web.json_response({"context_length": 512, "tp": 1})
            found = await probed(server.url)
            assert (found.model, found.context_tokens, found.weight_version) == ("/models/tiny", 512, 7)

    asyncio.run(main())


def test_a_context_may_be_given_for_servers_that_do_not_say(serving: Any, speeches: Any) -> None:
    async def main() -> None:
        async with serving(speeches["prorl"]) as server:
            found = await probed(server.url, context_tokens=64)
            assert (found.model, found.context_tokens, found.weight_version) == ("", 64, 2)

    asyncio.run(main())


def test_the_likeliest_tokens_log_prob_tells_which_distribution_it_is_of(serving: Any, speech: Any) -> None:
    async def main() -> None:
        other = "tempered_logprobs" if speech.name == "sglang" else "raw_logprobs"
        async with serving(speech) as server:
            assert (await probed(server.url)).logprobs_mode == other
            answer = web.json_response
            server.handlers[speech.path] = lambda _: answer(speech.answer([4, 5, 6, 7], [0.0] * 4))
            assert (await probed(server.url)).logprobs_mode == "processed_logprobs"
            server.handlers[speech.path] = lambda _: answer(speech.answer([4, 5, 6, 7], [0.0, 0.0, -0.25, 0.0]))
            assert (await probed(server.url)).logprobs_mode == other

    asyncio.run(main())


def test_without_scale_out_vllms_completions_are_used(serving: Any, speeches: Any) -> None:
    async def main() -> None:
        async with serving(speeches["completions"]) as server:
            server.handlers["/inference/v1/generate"] = lambda _: web.json_response(DISABLED, status=403)
            assert (await probed(server.url)).dialect.name == "completions"
            with pytest.raises(EngineFailed, match=r"403 .*vLLM has it with --enable-scale-out"):
                await probed(server.url, "vllm")

    asyncio.run(main())


def test_a_server_that_returns_text_only_is_told_what_it_lacks(serving: Any, speech: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            server.handlers[speech.path] = lambda _: web.json_response(speech.text_only())
            with pytest.raises(EngineFailed, match="text only") as caught:
                await probed(server.url)
            if speech.name == "completions":
                assert "vLLM 0.10.2 or later" in str(caught.value)

    asyncio.run(main())


def test_all_that_was_tried_is_named(serving: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            server.handlers["/generate"] = lambda _: web.Response(status=500, text="Internal Server Error")
            server.handlers["/v1/completions"] = lambda _: web.Response(status=401)
            with pytest.raises(EngineFailed) as caught:
                await probed(server.url)
            lines = str(caught.value).splitlines()
            assert "gives no token ids" in lines[0]
            assert "vllm: POST /inference/v1/generate: 404" in lines[1]
            assert "sglang: POST /generate: 500 Internal Server Error" in lines[2]
            assert "completions: POST /v1/completions: 401" in lines[3]
            assert "API key" in lines[3]
            assert "prorl: POST /generate: 500" in lines[4]

    asyncio.run(main())


def test_a_server_may_come_late(serving: Any, speeches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)

    async def main() -> None:
        async with serving() as other:
            port = int(other.url.rpartition(":")[2])
        async with serving(speeches["vllm"]) as server:
            loading = [503, 503, 200]
            server.handlers["/health"] = lambda _: web.Response(status=loading.pop(0) if len(loading) > 1 else 200)
            task = asyncio.create_task(probed(server.url))
            await server.until(lambda: len(server.asked("/health")) >= 2)
            assert not server.asked("/inference/v1/generate")
            assert (await task).dialect.name == "vllm"
            assert len(server.asked("/health")) == 3
            task = asyncio.create_task(probed(f"http://127.0.0.1:{port}"))
            await asyncio.sleep(0.05)
            assert not task.done()
            server.handlers["/health"] = lambda _: web.Response()
            await server.start(port)
            assert (await task).dialect.name == "vllm"

    asyncio.run(main())


def test_a_server_that_never_comes_is_not_waited_for_forever(serving: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            url = server.url
            server.handlers["/health"] = lambda _: web.Response(status=503, text="loading")
            with pytest.raises(EngineFailed, match=r"503 loading; it was given 0.2 s"):
                await probed(url, start_s=0.2)
        with pytest.raises(EngineFailed, match=r"cannot be reached: .*; it was given 0.2 s"):
            await probed(url, start_s=0.2)

    asyncio.run(main())


def test_what_is_waited_for_is_said(
    serving: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    monkeypatch.setattr(module, "SAY_S", 0.05)

    async def main() -> None:
        async with serving() as server:
            server.handlers["/health"] = lambda _: web.Response(status=503, text="<html>loading</html>")
            with caplog.at_level("INFO", "prorl.engine"), pytest.raises(EngineFailed):
                await probed(server.url, start_s=0.3)

    asyncio.run(main())
    assert 2 <= len(caplog.messages) <= 6
    assert all("waiting for the server" in said and "503 (a page of HTML)" in said for said in caplog.messages)


def test_a_server_without_tls_is_not_waited_for(serving: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            with pytest.raises(EngineFailed, match="no TLS with https://"):
                await probed(server.url.replace("http://", "https://"), start_s=60)

    asyncio.run(main())


def test_an_address_that_ends_with_v1(serving: Any, speeches: Any) -> None:
    async def main() -> None:
        async with serving(speeches["vllm"]) as server:
            with pytest.raises(EngineFailed, match="its address ends before /v1:"):
                await probed(f"{server.url}/v1")

    asyncio.run(main())


def test_a_server_that_accepts_and_closes(scripted: Any) -> None:
    async def main() -> None:
        async with scripted(b"") as (url, _):
            with pytest.raises(EngineFailed, match=r"given 0.2 s"):
                await probed(url, start_s=0.2)

    asyncio.run(main())


def test_a_server_that_never_answers_is_asked_once(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GENERATE_S", 0.2)

    async def main() -> None:
        async with serving() as server:
            for path in ("/inference/v1/generate", "/generate", "/v1/completions"):
                server.handlers[path] = lambda _: asyncio.sleep(3600)
            with pytest.raises(EngineFailed, match=r"vllm: POST /inference/v1/generate: no answer within 0.2 s"):
                await probed(server.url)
            assert not server.asked("/generate")

    asyncio.run(main())


def test_an_unknown_dialect_is_refused(serving: Any) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="'grpc' is not one of auto, vllm"):
            await probed("http://127.0.0.1:1", "grpc")

    asyncio.run(main())


def test_the_vocabulary_is_read_from_the_first_folder_that_has_it(tmp_path: Path) -> None:
    for name, text in {
        "a": "{",
        "b": "[]",
        "c": '{"text_config": {"vocab_size": 9}}',
        "d": '{"vocab_size": 7}',
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    folders = {name: str(tmp_path / name) for name in "abcd"}
    assert vocabulary_of("", "no/such", folders["a"], folders["b"]) == 0
    assert vocabulary_of(folders["a"], folders["c"], folders["d"]) == 9
    assert vocabulary_of(folders["d"], folders["c"]) == 7
