"""The session with an MCP server: pages, limits, and servers that break the protocol. The server alone is scripted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.scripted_link import ScriptedLink, run, tool

from prorl_zmq.errors import ToolSessionLost
from prorl_zmq.tools.mcp.session import (
    MESSAGE_LIMIT_BYTES,
    PAGES_LIMIT,
    TOOLS_LIMIT,
    UNASKED_LIMIT,
    AnswerTooLong,
    McpError,
    McpSession,
)


async def names(session: McpSession) -> list[str]:
    return [each.name for each in await session.tools(1)]


async def add(session: McpSession) -> str:
    return (await session.call("add", {"a": 1}, 1)).content[0].text


def test_the_handshake_comes_first_and_all_pages_are_read() -> None:
    link = ScriptedLink([tool("a"), tool("b")], [tool("c"), tool("a", description="again")])
    assert run(link, names) == ["a", "b", "c"]
    assert link.methods()[:4] == ["initialize", "notifications/initialized", "tools/list", "tools/list"]
    assert link.seen[0]["params"]["capabilities"] == {}
    assert run(ScriptedLink(), add) == '{"a": 1}'


@pytest.mark.parametrize(
    "pages",
    [[[tool(f"t{n}")] for n in range(PAGES_LIMIT + 2)], [[tool(str(n)) for n in range(TOOLS_LIMIT + 1)]]],
    ids=["pages", "tools"],
)
def test_tools_without_end_are_refused(pages: Any) -> None:
    with pytest.raises(ToolSessionLost, match=r"shop lists its tools without end, or more than 512"):
        run(ScriptedLink(*pages), names)


def test_the_same_page_for_ever_is_refused() -> None:
    link = ScriptedLink(answers={"tools/list": {"tools": [tool("a")], "nextCursor": "x"}})
    with pytest.raises(ToolSessionLost, match="without end"):
        run(link, names)
    assert link.methods().count("tools/list") == 2


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"initialize": None}, r"did not start within 0.05 s: it left initialize or tools/list unanswered"),
        ({"tools/list": None}, r"did not start within 0.05 s"),
        ({"initialize": {"error": {"code": -32600, "message": "no"}}}, "refused to start: no"),
        ({"initialize": {"protocolVersion": "2031-01-01", "capabilities": {"tools": {}}}}, "speaks version 2031-01-01"),
        ({"initialize": {"protocolVersion": "2025-06-18", "capabilities": {}}}, "offers no tools"),
        ({"initialize": {"capabilities": {}}}, "breaks the protocol"),
        ({"tools/list": {"tools": [{"name": 3}]}}, r"breaks the protocol: .*tools\[0\]\.name"),
        ({"tools/list": {"tools": [{"name": "a", "inputSchema": []}]}}, "breaks the protocol"),
    ],
)
def test_a_start_that_fails_says_how(answers: dict[str, Any], words: str) -> None:
    with pytest.raises(ToolSessionLost, match=f"the MCP server shop .*{words}") as caught:
        run(ScriptedLink(answers=answers), names, start_s=0.05)
    assert caught.value.fields == {"server": "shop", "reason": "server"}


def test_requests_of_the_server_are_refused_but_for_pings() -> None:
    asked = [
        {"jsonrpc": "2.0", "id": 7, "method": "ping"},
        {"jsonrpc": "2.0", "id": "s", "method": "sampling/createMessage", "params": {}},
        {"jsonrpc": "2.0", "id": 8, "method": "elicitation/create", "params": {}},
        {"jsonrpc": "2.0", "id": 9, "method": "roots/list"},
    ]
    link = ScriptedLink(before={"tools/call": asked})
    assert run(link, add) == '{"a": 1}'
    answers = [message for message in link.seen if "method" not in message]
    assert answers[0] == {"jsonrpc": "2.0", "id": 7, "result": {}}
    assert [(each["id"], each["error"]["code"]) for each in answers[1:]] == [("s", -32601), (8, -32601), (9, -32601)]
    assert answers[1]["error"]["message"] == "this client does not support sampling/createMessage"


def test_prints_and_answers_that_nobody_waits_for_are_skipped() -> None:
    noise = [
        b"Starting up...",
        b"[1, 2]",
        b"\xff\xfe",
        b"null",
        {"id": 999, "result": {}},
        {"id": "1", "result": {}},
        {},
    ]
    assert run(ScriptedLink(before={"tools/call": noise, "initialize": noise}), add) == '{"a": 1}'


def test_a_flood_loses_the_server() -> None:
    log = b'{"jsonrpc": "2.0", "method": "notifications/message", "params": {}}'
    assert run(ScriptedLink(before={"tools/call": [log] * UNASKED_LIMIT}), add) == '{"a": 1}'

    async def call_twice(session: McpSession) -> None:
        with pytest.raises(ToolSessionLost, match=r"shop floods: it sent 10001 messages"):
            await session.call("add", {}, 1)
        with pytest.raises(ToolSessionLost, match="floods"):
            await session.call("add", {}, 1)

    link = ScriptedLink(before={"tools/call": [log] * (UNASKED_LIMIT + 1)})
    run(link, call_twice)
    assert link.methods().count("tools/call") == 1


def test_nothing_is_read_between_calls() -> None:
    link = ScriptedLink()

    async def watch(session: McpSession) -> list[bool]:
        seen = [link.listening]
        calling = asyncio.ensure_future(session.call("add", {}, 1))
        await asyncio.sleep(0)
        seen.append(link.listening)
        await calling
        return [*seen, link.listening]

    assert run(link, watch) == [False, True, False]


def test_the_server_learns_of_a_call_that_took_too_long_and_its_answer_is_dropped() -> None:
    link = ScriptedLink()

    async def late(session: McpSession) -> str:
        usual, link.answers["tools/call"] = link.answers["tools/call"], None
        with pytest.raises(TimeoutError):
            await session.call("add", {"a": 2}, 0.01)
        link.answers["tools/call"] = usual
        session.received(b'{"jsonrpc": "2.0", "id": 3, "result": {"content": []}}')
        return (await session.call("add", {"a": 3}, 1)).content[0].text

    assert run(link, late) == '{"a": 3}'
    cancelled = next(message for message in link.seen if message.get("method") == "notifications/cancelled")
    assert cancelled["params"] == {"requestId": 3, "reason": "it took longer than 0.01 s"}


def test_the_server_learns_of_a_cancelled_call() -> None:
    link = ScriptedLink(answers={"tools/call": None})

    async def cancel(session: McpSession) -> None:
        calling = asyncio.ensure_future(session.call("add", {}, 5))
        await asyncio.sleep(0)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling

    run(link, cancel)
    assert link.seen[-1]["method"] == "notifications/cancelled"


def test_errors_of_json_rpc_and_answers_of_another_form() -> None:
    with pytest.raises(McpError, match="no such tool") as caught:
        run(ScriptedLink(answers={"tools/call": {"error": {"code": -32602, "message": "no such tool"}}}), add)
    assert caught.value.code == -32602
    with pytest.raises(ToolSessionLost, match=r"an answer to tools/call that breaks the protocol: .*content"):
        run(ScriptedLink(answers={"tools/call": {"content": "text"}}), add)


def test_answers_that_are_too_long_are_dropped_and_the_session_lives() -> None:
    link = ScriptedLink(answers={"tools/call": None})

    async def use(session: McpSession) -> str:
        asyncio.get_running_loop().call_later(0.01, session.too_long, MESSAGE_LIMIT_BYTES)
        with pytest.raises(AnswerTooLong):
            await session.call("add", {}, 5)
        link.answers["tools/call"] = {"content": [{"type": "text", "text": "short"}]}
        return await add(session)

    assert run(link, use) == "short"


def test_a_server_that_ends_loses_all_calls() -> None:
    link = ScriptedLink(answers={"tools/call": None})

    async def use(session: McpSession) -> None:
        calls = [asyncio.ensure_future(session.call("add", {}, 5)) for _ in range(3)]
        await asyncio.sleep(0)
        session.lost("ended")
        for call in calls:
            with pytest.raises(ToolSessionLost, match="the MCP server shop ended"):
                await call

    run(link, use)
