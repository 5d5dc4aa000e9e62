"""Searches over HTTP, against a server on the loopback."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from prorl_zmq.errors import ConfigError, InvalidEndpoint
from prorl_zmq.tools.http_search import TRIES, HttpSearchProvider
from prorl_zmq.tools.search import SearchAnswer, SearchArguments, SearchFailed, SearchResult

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]

KEY = "secret-key-1234"
QUERY = SearchArguments("what is it", 3, "news")
GOOD = {
    "query": "what is it",
    "answer": "It is this.",
    "images": [],
    "results": [
        {"title": "One", "url": "https://one", "content": "first", "score": 0.9, "raw_content": None},
        {"title": "Two", "url": "https://two", "content": None, "score": 0.1},
    ],
    "response_time": 1.5,
}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAVILY_API_KEY", f" {KEY}\n")


def search(answer: Answer, timeout_s: float = 20, **options: Any) -> SearchAnswer:
    """Ask a server that answers so."""

    async def main() -> SearchAnswer:
        application = web.Application()
        application.router.add_post("/search", answer)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        provider = HttpSearchProvider(f"http://{host}:{port}/", **options)
        try:
            return await provider.search(QUERY, timeout_s)
        finally:
            await provider.close()
            await provider.close()
            await runner.cleanup()

    return asyncio.run(main())


def failure(answer: Answer, timeout_s: float = 20, **options: Any) -> str:
    with pytest.raises(SearchFailed) as caught:
        search(answer, timeout_s, **options)
    return str(caught.value)


def status(code: int, **headers: str) -> Answer:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"detail": {"error": f"no, {KEY}"}}, status=code, headers=headers)

    return answer


def test_a_search() -> None:
    asked: dict[str, Any] = {}

    async def answer(request: web.Request) -> web.Response:
        asked.update(await request.json(), authorization=request.headers["Authorization"])
        return web.json_response(GOOD)

    found = search(answer, search_depth="advanced", include_answer=True)
    assert found == SearchAnswer(
        [SearchResult("One", "https://one", "first"), SearchResult("Two", "https://two", None)], "It is this."
    )
    assert asked == {
        "query": "what is it",
        "max_results": 3,
        "search_depth": "advanced",
        "topic": "news",
        "include_answer": True,
        "authorization": f"Bearer {KEY}",
    }


def test_nothing_found() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"results": [], "answer": None})

    assert search(answer) == SearchAnswer([])


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (400, "does not take this query"),
        (401, "does not let us in"),
        (403, "does not let us in"),
        (432, "limit for us is used up"),
        (433, "limit for us is used up"),
        (500, r"failed \(status 500\)"),
        (204, r"failed \(status 204\)"),
    ],
)
def test_refusals_are_told_without_the_key(code: int, said: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(SearchFailed, match=said) as caught:
        search(status(code))
    assert KEY not in str(caught.value)
    assert KEY not in caplog.text
    assert f"status {code}" in caplog.text


def test_the_key_does_not_follow_a_redirection() -> None:
    assert "status 307" in failure(status(307, Location="http://127.0.0.1:9/search"))


def test_too_many_requests_are_tried_again_when_the_service_says() -> None:
    tries = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal tries
        tries += 1
        return web.json_response(GOOD) if tries == TRIES else await status(429, **{"Retry-After": "0"})(request)

    assert len(search(answer).results) == 2
    assert tries == TRIES


@pytest.mark.parametrize("after", ["0", "3600", "Wed, 21 Oct 2015 07:28:00 GMT", "-1", "9" * 400])
def test_too_many_requests(after: str) -> None:
    tries = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal tries
        tries += 1
        return await status(429, **{"Retry-After": after})(request)

    assert "too many requests" in failure(answer)
    assert tries == (TRIES if after == "0" else 1)


def test_the_time_limit_holds_for_the_waits_too() -> None:
    assert "did not answer within 0.2 s" in failure(status(429, **{"Retry-After": "9"}), timeout_s=0.2)


def test_a_slow_service() -> None:
    async def silent(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async def dripping(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"{")
        await asyncio.Event().wait()
        return response

    for answer in (silent, dripping):
        assert "did not answer within 0.2 s" in failure(answer, timeout_s=0.2)


@pytest.mark.parametrize("declared", [True, False])
def test_an_answer_that_is_too_large(declared: bool) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if declared:
            response.content_length = 10**8
        await response.prepare(request)
        try:
            for _ in range(100):
                await response.write(b" " * 10**6)
        except (ConnectionError, aiohttp.ClientConnectionError):
            pass
        return response

    assert "too large" in failure(answer)


def test_a_packed_answer_is_not_unpacked() -> None:
    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Accept-Encoding"] == "identity"
        response = web.json_response(GOOD)
        response.enable_compression(web.ContentCoding.gzip)
        return response

    assert "cannot be read" in failure(answer)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"<html>", b"[]", b'{"results": 3}', b'{"results": [{"title": 3}]}', b"\xff" * 100, b"[" * 10**5],
)
def test_an_answer_of_another_form(body: bytes) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    assert "cannot be read" in failure(answer)


def test_a_connection_that_breaks() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = 1000
        await response.prepare(request)
        await response.write(json.dumps(GOOD).encode()[:10])
        assert request.transport is not None
        request.transport.abort()
        return response

    assert "cannot be reached" in failure(answer)


def test_no_service_there() -> None:
    async def main() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        provider = HttpSearchProvider(f"http://127.0.0.1:{port}")
        try:
            with pytest.raises(SearchFailed, match="cannot be reached"):
                await provider.search(QUERY, 20)
        finally:
            await provider.close()

    asyncio.run(main())


def test_wrong_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidEndpoint):
        HttpSearchProvider("api.example.org")
    for value in ("", "two\nlines", "schlüssel"):
        monkeypatch.setenv("SEARCH_KEY", value)
        with pytest.raises(ConfigError, match="SEARCH_KEY") as caught:
            HttpSearchProvider(key_variable="SEARCH_KEY")
        assert not value or value not in str(caught.value)
