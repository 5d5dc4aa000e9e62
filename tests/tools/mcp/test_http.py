"""MCP servers over HTTP that are hostile: what they send is scripted, byte by byte."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from support.waiting import until_async

from prorl_zmq.errors import ToolSessionLost
from prorl_zmq.tools.mcp.http import HttpLink
from prorl_zmq.tools.mcp.session import MESSAGE_LIMIT_BYTES, AnswerTooLong, McpError, McpSession

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Answer = Callable[["Server", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]

KEY = "sk-very-secret"
TOOLS = {"tools": [{"name": "add"}]}
BEGUN = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}


class Server:
    """Answers `tools/call` as a test wants, and all else as a server should.

    Args:
        call: answers a call.
        begin: answers `initialize`; None: as usual.
    """

    def __init__(self, call: Answer, begin: Answer | None = None) -> None:
        self._call, self._begin = call, begin
        self.open_streams = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            return web.Response(status=405)
        message = await request.json()
        if "id" not in message:
            return web.Response(status=202)
        if message["method"] == "tools/call":
            return await self._call(self, request, message)
        if message["method"] == "initialize" and self._begin is not None:
            return await self._begin(self, request, message)
        result = BEGUN if message["method"] == "initialize" else TOOLS
        return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": result})

    async def stream(self, request: web.Request, *pieces: bytes, ends: bool = True) -> web.StreamResponse:
        """Send the pieces of a stream of events, one by one, and keep it open."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.open_streams += 1
        with suppress(ConnectionError):  # the client left
            for piece in pieces:
                await response.write(piece)
                await asyncio.sleep(0)
            while not ends:
                await response.write(b": still here\n\n")
                await asyncio.sleep(0.05)
        self.open_streams -= 1
        return response


def answer_to(message: dict[str, Any], text: str = "3") -> bytes:
    result = {"content": [{"type": "text", "text": text}]}
    return json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode()


def session_with(server: Server, use: Callable[[McpSession], Awaitable[Any]]) -> Any:
    """Start a session with a server on a port of this machine, use it, and close it."""

    async def whole() -> Any:
        app = web.Application()
        app.router.add_route("*", "/mcp", server.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        session = McpSession("shop", HttpLink(f"http://127.0.0.1:{port}/mcp", KEY))
        try:
            await session.start(5)
            return await use(session)
        finally:
            await session.close()
            await runner.cleanup()

    return asyncio.run(asyncio.wait_for(whole(), 60))


async def add(session: McpSession) -> str:
    return (await session.call("add", {}, 5)).content[0].text


def test_streams_that_never_end_are_left_with_the_answer() -> None:
    async def call(server: Server, request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        return await server.stream(request, b"data: " + answer_to(message) + b"\n\n", ends=False)

    server = Server(call)

    async def use(session: McpSession) -> None:
        for _ in range(120):  # more than the connections of a session
            assert await add(session) == "3"

        async def left() -> bool:  # the server sees at its next word that the client has left
            return server.open_streams == 0

        await until_async(left, "the streams are left")

    session_with(server, use)


def test_events_may_be_cut_anywhere_and_end_their_lines_as_they_like() -> None:
    async def call(server: Server, request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        answer = answer_to(message).replace(b", ", b",\r\ndata:")  # one message in several lines
        whole = b": hello\r\n\r\nevent: message\r\ndata: " + answer + b"\r\n\r\n"
        return await server.stream(request, *(bytes([each]) for each in whole))

    assert session_with(Server(call), add) == "3"


def test_a_long_answer_in_small_pieces_takes_time_linear_in_its_length() -> None:
    async def call(server: Server, request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        whole = b"data: " + answer_to(message, "x" * (MESSAGE_LIMIT_BYTES - 200)) + b"\n\n"
        return await server.stream(request, *(whole[at : at + 2048] for at in range(0, len(whole), 2048)))

    async def use(session: McpSession) -> float:
        began = time.process_time()
        assert len((await session.call("add", {}, 50)).content[0].text) > MESSAGE_LIMIT_BYTES - 300
        return time.process_time() - began

    assert session_with(Server(call), use) < 5


def test_an_event_that_is_too_long_is_dropped_and_the_next_call_is_answered() -> None:
    async def call(server: Server, request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        if message["params"]["arguments"]:
            return await server.stream(request, b"data: ", *[b"x" * 2**20] * 9, b"\n\n", ends=False)
        return await server.stream(request, b"data: " + answer_to(message) + b"\n\n")

    async def use(session: McpSession) -> str:
        with pytest.raises(AnswerTooLong):
            await session.call("add", {"a": 1}, 5)
        return await add(session)

    assert session_with(Server(call), use) == "3"


def test_a_redirect_is_not_followed() -> None:
    async def call(server: Server, request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect("http://127.0.0.1:1/elsewhere")

    with pytest.raises(ToolSessionLost, match=r"shop answered with status 307, to http://127\.0\.0\.1:1/elsewhere"):
        session_with(Server(call), add)


async def quotes_as_refusal(server: Server, request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    return web.Response(status=401, text=f"no such key: {request.headers['Authorization']}")


async def quotes_as_error(server: Server, request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    error = {"code": 1, "message": f"no such key: {request.headers['Authorization']}"}
    return web.json_response({"jsonrpc": "2.0", "id": message["id"], "error": error})


async def quotes_as_place(server: Server, request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    raise web.HTTPFound(f"http://127.0.0.1:1/?key={request.headers['Authorization'].removeprefix('Bearer ')}")


async def quotes_in_a_stream(server: Server, request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    answer = answer_to(message, f"you are {request.headers['Authorization']}")
    return await server.stream(request, b"data: " + answer + b"\n\n")


@pytest.mark.parametrize("quotes", [quotes_as_refusal, quotes_as_error, quotes_as_place])
@pytest.mark.parametrize("at_start", [True, False])
def test_a_key_that_the_server_quotes_is_in_no_error(quotes: Answer, *, at_start: bool) -> None:
    server = Server(quotes, quotes) if at_start else Server(quotes)
    with pytest.raises((ToolSessionLost, McpError)) as caught:
        session_with(server, add)
    assert "[secret]" in str(caught.value)
    assert KEY not in str(caught.value)


def test_a_key_that_the_server_quotes_is_not_shown_to_the_policy() -> None:
    assert session_with(Server(quotes_in_a_stream), add) == "you are Bearer [secret]"
