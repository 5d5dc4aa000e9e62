from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import threading
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from scripted_model import ScriptedModel, served, turn
from support.waiting import WAIT_S, until_async

from prorl_zmq.model_proxy import server
from prorl_zmq.model_proxy.calls import CallRefused, Problem

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
GEMINI = "/v1beta/models/m:streamGenerateContent?alt=sse"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "stream": True},
    RESPONSES: {"input": "hi", "stream": True},
    MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stream": True},
    GEMINI: {"contents": [{"parts": [{"text": "hi"}]}]},
}
Client = aiohttp.ClientSession


def run(model: ScriptedModel, talk: Callable[[Client], Coroutine[Any, Any, None]], keep_alive_s: float = 15.0) -> None:
    async def main() -> None:
        async with served(model, keep_alive_s=keep_alive_s) as url, Client(url) as client:
            await talk(client)

    asyncio.run(main())


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[len(b"data: ") :])


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models", 200),
        ("HEAD", "/api/hello", 200),
        ("GET", RESPONSES, 426),
        ("GET", CHAT, 405),
        ("POST", "/v1/embeddings", 404),
    ],
)
def test_what_is_no_call(method: str, path: str, status: int) -> None:
    async def talk(client: Client) -> None:
        async with client.request(method, path) as response:
            assert response.status == status
            if status == 404:
                assert "POST /chat/completions" in (await response.json())["error"]["message"]

    run(ScriptedModel(), talk)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("body", "headers", "words"),
    [
        (b'{"messages": [', {}, "not JSON"),
        (b'{"temperature": NaN}', {}, "not JSON"),
        (b"[1]", {}, "must be a JSON object"),
        (b"\xff\xfe", {}, "not JSON"),
        (b"[" * 100_000, {}, "not JSON"),
        (b"no gzip", {"Content-Encoding": "gzip"}, "cannot be read"),
    ],
)
def test_a_broken_body_is_refused(path: str, body: bytes, headers: dict[str, str], words: str) -> None:
    async def talk(client: Client) -> None:
        async with client.post(path, data=body, headers=headers) as response:
            assert response.status == 400
            assert words in (await response.json())["error"]["message"]

    run(ScriptedModel(), talk)


@pytest.mark.parametrize("path", BODIES)
def test_depth_is_no_fault_of_the_proxy(path: str) -> None:
    async def talk(client: Client) -> None:
        body = json.dumps(BODIES[path])[:-1].encode() + b', "unknown": ' + b"[" * 900 + b"]" * 900 + b"}"
        async with client.post(path, data=body) as response:
            assert response.status in {200, 400}

    run(ScriptedModel(turn("hi")), talk)


def test_a_text_that_javascript_cut_within_a_character_is_read() -> None:
    model = ScriptedModel(turn("hi"))

    async def talk(client: Client) -> None:
        body = rb'{"messages": [{"role": "user", "content": "cut \ud83d"}]}'
        async with client.post(CHAT, data=body) as response:
            assert response.status == 200

    run(model, talk)
    assert model.requests[0].messages[0].text == "cut ?"


def test_a_compressed_body_is_read() -> None:
    async def talk(client: Client) -> None:
        body = gzip.compress(json.dumps(BODIES[MESSAGES] | {"stream": False}).encode())
        async with client.post(MESSAGES, data=body, headers={"Content-Encoding": "gzip"}) as response:
            assert (await response.json())["content"] == [{"type": "text", "text": "hi"}]

    run(ScriptedModel(turn("hi")), talk)


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["known length", "chunked", "compressed"])
def test_a_body_of_100_mb_is_refused(how: str) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 10**6

    async def talk(client: Client) -> None:
        whole = b" " * 10**8
        headers = {"Content-Encoding": "gzip"} if how == "compressed" else {}
        data = chunks() if how == "chunked" else gzip.compress(whole, 1) if how == "compressed" else io.BytesIO(whole)
        async with client.post(MESSAGES, data=data, headers=headers) as response:
            assert response.status == 413
            assert (await response.json())["error"]["type"] == "request_too_large"

    run(ScriptedModel(), talk)


HOSTILE = {
    "lists": b"[]," * 300_000 + b"1",
    "texts": b'"",' * 300_000 + b"1",
    "half a surrogate": b"[]," * 300_000 + rb'"\ud83d"',
    "calls": b'{"functionCall":{"name":"a"}},' * 100_000 + b"1",
}


@pytest.mark.few(4)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("values", HOSTILE.values(), ids=HOSTILE)
def test_a_body_of_more_values_than_a_conversation_has_is_never_decoded(
    path: str, values: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    monkeypatch.setattr(server, "_decoded", lambda data: decoded.append(len(data)))
    model = ScriptedModel()

    async def talk(client: Client) -> None:
        async with client.post(path, data=io.BytesIO(b'{"messages": [' + values + b"]}")) as response:
            assert response.status == 413
            assert "more than 200000 values" in await response.text()

    run(model, talk)
    assert decoded == []
    assert model.charged[0] > server.VALUE_COST * server.VALUES_LIMIT


@pytest.mark.parametrize("size", [100, server.ASIDE_COST])
def test_a_body_is_charged_before_it_is_decoded_and_a_large_one_is_decoded_aside(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ScriptedModel(turn("hi"))
    decoded: list[tuple[bool, int]] = []
    decode = server._decoded

    def decoding(data: bytearray) -> Any:
        decoded.append((threading.current_thread() is threading.main_thread(), len(model.charged)))
        return decode(data)

    monkeypatch.setattr(server, "_decoded", decoding)

    async def talk(client: Client) -> None:
        body = {"messages": [{"role": "user", "content": "x, [y] " * (size // 7)}]}
        async with client.post(CHAT, json=body) as response:
            assert response.status == 200

    run(model, talk)
    assert decoded == [(size == 100, 1)]
    assert size < model.charged[0] < size + 100 + 20 * server.VALUE_COST


def test_failures_of_the_proxy_are_logged_a_few_times(caplog: pytest.LogCaptureFixture) -> None:
    async def talk(client: Client) -> None:
        for _ in range(10):
            async with client.post(CHAT, json=BODIES[CHAT]) as response:
                assert response.status == 500

    run(ScriptedModel(*[ValueError("secret")] * 10), talk)
    assert len(caplog.records) == server.LOGGED_FAILURES
    assert "further failures of this rollout are not logged" in caplog.text


@pytest.mark.parametrize("path", BODIES)
def test_a_number_that_is_too_large_is_refused(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async def talk(client: Client) -> None:
        number = "1" + "0" * 400
        config = f'"generationConfig": {{"temperature": {number}}}' if path == GEMINI else f'"temperature": {number}'
        body = json.dumps(BODIES[path])[:-1] + f", {config}}}"
        async with client.post(path, data=body.encode()) as response:
            assert response.status == 400
            assert "temperature" in await response.text()

    run(ScriptedModel(), talk)
    assert not caplog.records


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_says_that_it_is_alive_before_and_after_the_call_is_taken(path: str) -> None:
    model = ScriptedModel(turn("hi"))
    model.may_open.clear()
    model.may_reply.clear()

    async def talk(client: Client) -> None:
        async with client.post(path, json=BODIES[path]) as response:
            assert response.status == 200
            coming = events(response)
            waiting = [await anext(coming) for _ in range(3)]
            model.may_open.set()
            await model.replying.wait()
            async for event in coming:  # until the call was taken, and one more
                waiting.append(event)
                if "message_start" in event.get("type", "") or len(waiting) > 5:
                    break
            waiting.append(await anext(coming))
            model.may_reply.set()
            rest = [event async for event in coming]
        said = [json.dumps(event) for event in waiting]
        assert not [event for event in said if '"hi"' in event]
        assert [event for event in rest if '"hi"' in json.dumps(event)]
        kinds = {
            CHAT: lambda event: event["choices"][0]["delta"].get("content", "") == "",
            RESPONSES: lambda event: event["type"] in {"response.created", "response.in_progress"},
            MESSAGES: lambda event: event["type"] in {"ping", "message_start"},
            GEMINI: lambda event: event["candidates"][0]["content"]["parts"] == [{"text": ""}],
        }
        assert all(kinds[path](event) for event in waiting)

    run(model, talk, keep_alive_s=0.01)
    assert model.delivered == [True]


@pytest.mark.xdist_group("SDKs of models")
def test_the_sdks_take_streams_that_begin_late() -> None:
    import anthropic
    import openai

    async def main() -> None:
        model = ScriptedModel(turn("hi"), turn("hi"), turn("hi"))

        def late() -> None:
            model.may_open.clear()
            asyncio.get_running_loop().call_later(0.1, model.may_open.set)

        async with (
            served(model, keep_alive_s=0.01) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client,
            anthropic.AsyncAnthropic(base_url=url, api_key="any") as claude,
        ):
            late()
            async with client.responses.stream(model="m", input="hi") as stream:
                assert (await stream.get_final_response()).output_text == "hi"
            late()
            async with client.chat.completions.stream(model="m", messages=BODIES[CHAT]["messages"]) as chat:
                assert (await chat.get_final_completion()).choices[0].message.content == "hi"
            late()
            async with claude.messages.stream(model="m", messages=BODIES[MESSAGES]["messages"], max_tokens=9) as events:
                assert await events.get_final_text() == "hi"

    asyncio.run(main())


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("when", ["opening", "generating", "whole"])
def test_a_harness_that_leaves_cancels_its_call(path: str, when: str) -> None:
    if when == "whole":
        path = path.replace("streamGenerateContent?alt=sse", "generateContent")
    model = ScriptedModel(turn("hi"))
    (model.may_open if when == "opening" else model.may_reply).clear()

    async def talk(client: Client) -> None:
        body = BODIES.get(path, BODIES[GEMINI]) | {"stream": when != "whole"}
        asking = asyncio.create_task(client.post(path, json=body))
        if when == "opening":
            await model.opening.wait()
        else:
            await model.replying.wait()
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            (await asking).close()
        await (model.given_up if when == "opening" else model.closed).wait()

    run(model, talk)
    assert model.delivered == ([] if when == "opening" else [False])


@pytest.mark.parametrize("path", BODIES)
def test_an_error_within_a_stream_is_an_event(path: str) -> None:
    model = ScriptedModel(CallRefused(Problem.FAILED, "the engine is gone"))
    model.may_reply.clear()

    async def talk(client: Client) -> None:
        async with client.post(path, json=BODIES[path]) as response:
            await model.replying.wait()
            model.may_reply.set()
            assert "the engine is gone" in json.dumps([event async for event in events(response)][-1])

    run(model, talk, keep_alive_s=0.05)
    assert model.delivered == [False]


@pytest.mark.parametrize("path", BODIES)
def test_an_engine_that_fails_soon_is_told_by_the_status(path: str) -> None:
    """Most harnesses try again at a status, and give up at an event."""

    async def talk(client: Client) -> None:
        async with client.post(path, json=BODIES[path]) as response:
            assert response.status in {503, 529}
            assert "the engine is gone" in await response.text()

    run(ScriptedModel(CallRefused(Problem.FAILED, "the engine is gone")), talk)


@pytest.mark.parametrize("path", BODIES)
def test_an_error_before_a_stream_has_a_status(path: str) -> None:
    async def talk(client: Client) -> None:
        async with client.post(path, json=BODIES[path]) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
        async with client.post(path, json=BODIES[path]) as response:
            assert response.status == 500
            assert "secret" not in await response.text()

    run(ScriptedModel(CallRefused(Problem.BUSY, "too many"), ValueError("secret")), talk)


@pytest.mark.xdist_group("SDKs of models")
def test_the_sdks_raise_errors_of_streams() -> None:
    import anthropic
    import openai

    async def main() -> None:
        model = ScriptedModel(*(CallRefused(Problem.FAILED, "the engine is gone") for _ in range(2)))
        model.may_reply.clear()
        async with (
            served(model, keep_alive_s=0.05) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
            anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as claude,
        ):
            chunks = await client.chat.completions.create(model="m", **BODIES[CHAT])
            model.may_reply.set()
            with pytest.raises(openai.APIError, match="the engine is gone"):
                [chunk async for chunk in chunks]
            model.may_reply.clear()
            messages = await claude.messages.create(model="m", **BODIES[MESSAGES])
            model.may_reply.set()
            with pytest.raises(anthropic.APIStatusError, match="the engine is gone"):
                [event async for event in messages]

    asyncio.run(main())


def test_closing_ends_idle_connections_at_once() -> None:
    async def main() -> None:
        async with Client() as client:
            async with served(ScriptedModel()) as url, client.get(url + "/v1/models") as response:
                assert (await response.json())["data"][0]["id"] == "policy"
            with pytest.raises(aiohttp.ClientConnectorError):
                await client.get(url + "/v1/models")

    asyncio.run(main())


@pytest.mark.parametrize("stuck", ["generation", "reader"])
def test_closing_ends_calls_under_way_in_time(stuck: str) -> None:
    model = ScriptedModel(turn("x" * 2**25))
    if stuck == "generation":
        model.may_reply.clear()

    async def main() -> None:
        async with Client() as client, asyncio.timeout(None) as limit:
            async with served(model, keep_alive_s=0.05) as url:
                asking = asyncio.create_task(client.post(url + CHAT, json=BODIES[CHAT]))
                await model.replying.wait()
                limit.reschedule(asyncio.get_running_loop().time() + WAIT_S)  # neither would end by itself
            (await asking).close()

    asyncio.run(main())
    assert model.delivered == [False]


def test_more_connections_than_a_harness_needs_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a descriptor of a process that has other rollouts too."""
    monkeypatch.setattr("prorl_zmq.model_proxy.server.CONNECTIONS", 3)

    async def main() -> None:
        async with served(ScriptedModel(turn("x"))) as url:
            host, port = url.removeprefix("http://").split(":")
            held = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
            reader, writer = await asyncio.open_connection(host, int(port))
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
            held.pop()[1].close()
            async with Client(url) as client:
                for _ in range(100):  # until the closed one is noticed
                    try:
                        async with client.get("/v1/models") as response:
                            assert response.status == 200
                            break
                    except ConnectionError:
                        await asyncio.sleep(0.01)
            for _, writer in held:
                writer.close()

    asyncio.run(main())


@pytest.mark.parametrize("leaves", [True, False])
def test_a_body_that_does_not_come_whole_is_charged(leaves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_S", 0.5)
    model = ScriptedModel()

    async def charged() -> bool:
        return bool(model.charged)

    async def main() -> None:
        async with served(model) as url:
            reader, writer = await asyncio.open_connection(*url.removeprefix("http://").rstrip("/").split(":"))
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n")
            writer.write(bytes(1_000_000))
            await writer.drain()
            if not leaves:
                assert b" 400 " in await asyncio.wait_for(reader.readline(), WAIT_S)
            writer.close()
            await until_async(charged, "the charge")

    asyncio.run(main())
    assert 0 < model.charged[0] <= 1_000_000
