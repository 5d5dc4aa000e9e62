"""The tools of MCP servers: their names, their texts, and what changes. The servers alone are scripted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from support.scripted_link import TOOL, ScriptedLink, tool

from prorl_zmq.errors import InvalidJob, SandboxFailed
from prorl_zmq.tools.mcp.session import CallResult, Content, Resource
from prorl_zmq.tools.mcp.toolset import McpTools, text_of
from prorl_zmq.tools.tool import ToolArgumentsInvalid
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.jobs import McpServer

if TYPE_CHECKING:
    from collections.abc import Callable


class Servers(McpTools):
    """Tools of scripted servers, by the servers' names."""

    def __init__(self, *servers: McpServer, links: dict[str, ScriptedLink], taken: tuple[str, ...] = ()) -> None:
        super().__init__(servers, None, {}, taken)
        self.links = links

    def _link(self, server: McpServer) -> ScriptedLink:
        return self.links[server.name]


def server(name: str, **more: Any) -> McpServer:
    return McpServer(name=name, **{"command": ("serve",), **more})


def opened(tools: McpTools, use: Callable[[], Any] | None = None) -> Any:
    """Open servers, use their tools, close them; return the names of the tools, or what `use` returns."""

    async def whole() -> Any:
        await tools.open()
        try:
            return await use() if use is not None else list(tools.tools)
        finally:
            await tools.close()

    return asyncio.run(whole())


def call(link: ScriptedLink, arguments: dict[str, Any] | None = None, limit_s: float = 1.0) -> str:
    tools = Servers(server("shop"), links={"shop": link})
    text: str = opened(tools, lambda: tools.tools["add"](arguments or {}, limit_s))
    return text


def test_names_are_prefixed_only_where_they_collide() -> None:
    links = {
        "a": ScriptedLink([tool("search"), tool("buy"), tool("bash")]),
        "b": ScriptedLink([tool("search"), tool("sell")]),
    }
    names = opened(Servers(server("a"), server("b"), links=links, taken=("bash", "think")))
    assert names == ["a_search", "buy", "a_bash", "b_search", "sell"]


def test_names_are_those_that_models_can_write() -> None:
    link = ScriptedLink([tool("files/read.all"), tool("x" * 100), tool("x" * 101), tool("")])
    names = opened(Servers(server("a"), links={"a": link}))
    assert names == ["files_read_all", "x" * 64, f"a_{'x' * 62}", "tool"]


def test_a_call_uses_the_servers_own_name_and_its_schema_is_the_servers() -> None:
    link = ScriptedLink([tool("search")])
    tools = Servers(server("a"), links={"a": link}, taken=("search",))
    assert opened(tools, lambda: tools.tools["a_search"]({"a": 2}, 1)) == '{"a": 2}'
    assert link.seen[-1]["params"] == {"name": "search", "arguments": {"a": 2}}
    function = tools.tools["a_search"].schema()["function"]
    assert function == {"name": "a_search", "description": "Adds.", "parameters": TOOL["inputSchema"]}


def test_a_tool_without_a_schema_takes_nothing() -> None:
    tools = Servers(server("a"), links={"a": ScriptedLink([{"name": "now"}])})
    opened(tools)
    assert tools.tools["now"].schema()["function"]["parameters"] == {"type": "object", "properties": {}}


def test_only_named_tools_are_offered() -> None:
    link = ScriptedLink([tool("a"), tool("b")])
    assert opened(Servers(server("s", tools=("b",)), links={"s": link})) == ["b"]
    with pytest.raises(InvalidJob, match="the MCP server s has no tool c, d; it has a, b"):
        opened(Servers(server("s", tools=("b", "c", "d")), links={"s": link}))
    assert link.closed


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (CallResult([Content("text", "a"), Content("text", "b")]), "a\nb"),
        (CallResult([Content("text", "seven")], structured_content={"result": 7}), "seven"),
        (CallResult(structured_content={"result": 7}), '{"result":7}'),
        (CallResult(), ""),
        (CallResult([Content("text", "boo")], is_error=True), "Error: boo"),
        (CallResult([Content("text", "Error calling tool 'x': boo")], is_error=True), "Error calling tool 'x': boo"),
        (CallResult(is_error=True), "Error"),
        (CallResult([Content("image", data="AAAA", mime_type="image/png")]), "[image/png, 3 bytes, not shown]"),
        (CallResult([Content("audio", data="AAAA")]), "[audio, 3 bytes, not shown]"),
        (CallResult([Content("resource", resource=Resource("file:///a", text="words"))]), "words"),
        (
            CallResult([Content("resource", resource=Resource("file:///a", "application/zip", blob="AAAA"))]),
            "[application/zip at file:///a, 3 bytes, not shown]",
        ),
        (CallResult([Content("resource_link", uri="file:///a", name="a")]), "[a: file:///a]"),
        (
            CallResult(
                [Content("text", "1 error\n    For further information visit https://errors.pydantic.dev/2/v/x\nb")]
            ),
            "1 error\nb",
        ),
    ],
)
def test_texts_of_answers(result: CallResult, text: str) -> None:
    assert text_of(result) == text


def test_long_texts_lose_their_middle() -> None:
    text = call(ScriptedLink(answers={"tools/call": {"content": [{"type": "text", "text": "ab" * 100_000}]}}))
    assert len(text) < 66_000
    assert "[... 134464 bytes left out ...]" in text
    assert text.startswith("abab")
    assert text.endswith("abab")


def test_refusals_and_limits_are_texts_for_the_model() -> None:
    with pytest.raises(ToolArgumentsInvalid, match="add refused the call: a is missing"):
        call(ScriptedLink(answers={"tools/call": {"error": {"code": -32602, "message": "a is missing"}}}))
    assert call(ScriptedLink(answers={"tools/call": {"error": {"code": 1, "message": "busy"}}})) == "Error: busy"
    late = call(ScriptedLink(answers={"tools/call": None}), limit_s=0.01)
    assert late == "[add did not answer within 0.01 s; the call was cancelled]"
    with pytest.raises(ToolArgumentsInvalid, match="cannot be sent"):
        call(ScriptedLink(), {"a": "\ud800"})


def test_tools_that_change_are_told_with_the_next_answer_and_new_ones_can_be_called() -> None:
    changed = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}
    link = ScriptedLink([tool("add"), tool("old"), tool("same")], before={"tools/call": [changed]})
    tools = Servers(server("shop"), links={"shop": link}, taken=("new",))

    async def use() -> tuple[str, str, str]:
        link.pages = [[tool("add", description="Adds better."), tool("same"), tool("new", description="Is new.")]]
        first = await tools.tools["add"]({"a": 1}, 1)
        link.before = {}
        return first, await tools.tools["shop_new"]({}, 1), await tools.tools["add"]({}, 1)

    first, second, third = opened(tools, use)
    schema = '{"type":"object","properties":{"a":{"type":"integer"}}}'
    assert first.splitlines() == [
        '{"a": 1}',
        f"[Changed tool: add: Adds better. Its arguments: {schema}]",
        f"[New tool: shop_new: Is new. Its arguments: {schema}]",
        "[Tool that is gone: old]",
    ]
    assert (second, third) == ("{}", "{}")
    assert [*tools.tools] == ["add", "same", "shop_new"]


def test_a_server_whose_tools_always_change_has_no_more_than_it_lists() -> None:
    changed = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}
    link = ScriptedLink([tool("add")], before={"tools/call": [changed], "tools/list": [changed]})
    tools = Servers(server("shop"), links={"shop": link})

    async def use() -> list[str]:
        for number in range(5):
            link.pages = [[tool("add"), *(tool(f"tool_{number}_{n}") for n in range(100))]]
            assert len(await tools.tools["add"]({}, 1)) < 10_000
        return [*tools.tools]

    assert opened(tools, use) == ["add", *(f"tool_4_{n}" for n in range(100))]


def test_one_server_that_fails_ends_the_others() -> None:
    links = {"a": ScriptedLink(), "b": ScriptedLink(answers={"initialize": {"error": {"code": 1, "message": "no"}}})}
    with pytest.raises(Exception, match="the MCP server b refused to start: no"):
        opened(Servers(server("a"), server("b"), links=links))
    assert links["a"].closed
    assert links["b"].closed


def test_what_a_job_may_not_name() -> None:
    url = "http://127.0.0.1:1/mcp"
    with pytest.raises(InvalidJob, match="two MCP servers have one name: a, a"):
        opened(McpTools([server("a"), server("a")], None, {}))
    with pytest.raises(InvalidJob, match=rf"{url} is not among the service's \[\[mcp\]\] addresses: http://known/mcp"):
        opened(McpTools([McpServer(name="a", url=url)], None, {"http://known/mcp": ""}))
    with pytest.raises(SandboxFailed, match="the MCP server a needs a sandbox, and the job has none"):
        opened(McpTools([server("a")], None, {}))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "a"}, "MCP server a: give one of command and url"),
        ({"name": "a", "command": ["x"], "url": "http://x"}, "give one of command and url"),
        ({"name": "a", "url": "http://x", "environment": {"A": "b"}}, "environment and directory are for a command"),
        ({"name": "a b", "command": ["x"]}, "name"),
        ({"name": "a", "command": ["x"], "toolz": []}, "toolz"),
        ({"name": "a", "command": "x"}, "command"),
    ],
)
def test_wrong_servers_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words):
        codec.convert(fields, McpServer)
