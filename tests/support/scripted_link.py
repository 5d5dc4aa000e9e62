"""An MCP server in this process, behind a `Link`: what it answers is a function of the message."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from prorl_zmq.tools.mcp.session import Link, McpSession

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Answers = dict[str, Any]
TOOL = {
    "name": "add",
    "description": "Adds.",
    "inputSchema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


def tool(name: str, **more: Any) -> dict[str, Any]:
    """Describe a tool as a server lists it."""
    return {**TOOL, "name": name, **more}


class ScriptedLink(Link):
    """Answers requests by their method.

    Args:
        tools: what `tools/list` returns, in pages.
        answers: results by method, or functions of the parameters that return one; None: no answer at all. A JSON-RPC
            error is `{"error": …}`. They replace the usual ones.
        before: messages that come before the answer of a method.
    """

    def __init__(
        self,
        *pages: Sequence[dict[str, Any]],
        answers: Answers | None = None,
        before: dict[str, Sequence[Any]] | None = None,
    ) -> None:
        self.pages = list(pages) or [[TOOL]]
        self.answers: Answers = {
            "initialize": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {}},
            "tools/list": self._page,
            "tools/call": lambda params: {"content": [{"type": "text", "text": json.dumps(params["arguments"])}]},
            **(answers or {}),
        }
        self.before = before or {}
        self.seen: list[dict[str, Any]] = []
        """All that was sent."""
        self.listening = False
        self.closed = False

    async def open(self) -> None:
        pass

    def send(self, message: bytes, number: int | None) -> None:
        read = json.loads(message)
        self.seen.append(read)
        if number is not None:
            asyncio.get_running_loop().call_soon(self._answer, read)

    def listen(self, *, on: bool) -> None:
        self.listening = on

    async def close(self) -> None:
        self.closed = True

    def methods(self) -> list[str]:
        return [message.get("method", "answer") for message in self.seen]

    def _page(self, params: dict[str, Any]) -> dict[str, Any]:
        at = int(params.get("cursor", 0))
        more = {"nextCursor": str(at + 1)} if at + 1 < len(self.pages) else {}
        return {"tools": self.pages[at], **more}

    def _answer(self, message: dict[str, Any]) -> None:
        method = message["method"]
        for each in self.before.get(method, ()):
            self.session.received(each if isinstance(each, bytes) else json.dumps(each).encode())
        answer = self.answers[method]
        result = answer(message["params"]) if callable(answer) else answer
        if result is not None:
            body = result if "error" in result else {"result": result}
            self.session.received(json.dumps({"jsonrpc": "2.0", "id": message["id"], **body}).encode())


def run(link: ScriptedLink, use: Callable[[McpSession], Any], start_s: float = 5.0) -> Any:
    """Start a session, use it, and close it; return what `use` returns."""

    async def whole() -> Any:
        session = McpSession("shop", link)
        try:
            await session.start(start_s)
            return await use(session)
        finally:
            await session.close()
            assert link.closed
            assert not link.listening

    return asyncio.run(whole())
