"""`McpSession`: a session with one MCP server: requests, their answers, and the server's own messages.

    initialize → notifications/initialized → tools/list, once a page → tools/call …

The client is our own, because that of the SDK (`mcp` 2.3) costs 1.5 CPU s and 52 MB in each stage process and brings 30
packages, starts servers on the host only, and bounds neither the size nor the number of a server's messages.

It has no capabilities: requests for sampling, elicitation or roots are refused. A server that ends, floods, or breaks
the protocol is lost: all calls raise `ToolSessionLost`. Messages are read only while a request waits, so a server that
writes between calls waits for room in its pipe.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ...errors import ToolSessionLost
from ...system.pauses import wait_running

if TYPE_CHECKING:
    from collections.abc import Sequence

PROTOCOL = "2025-06-18"
PROTOCOLS = ("2024-11-05", "2025-03-26", PROTOCOL, "2025-11-25")
"""Versions in which all that is used here is the same."""
MESSAGE_LIMIT_BYTES = 8 * 2**20
"""Largest message that is read."""
UNASKED_LIMIT = 10_000
"""Most messages between two answers that answer nothing: logs, progress, requests, prints."""
UNASKED_LIMIT_BYTES = 64 * 2**20
"""Most bytes of such messages, and of those that are too long."""
TOOLS_LIMIT = 512
"""Most tools of one server."""
PAGES_LIMIT = 64
METHOD_NOT_FOUND, INVALID_PARAMS = -32601, -32602

T = TypeVar("T")
encode = msgspec.json.Encoder().encode


class McpError(Exception):
    """The server refused a request (`code` is JSON-RPC's); the text is the server's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class AnswerTooLong(Exception):
    """The answer was longer than `MESSAGE_LIMIT_BYTES`, and was dropped."""


class _Error(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


class _Message(msgspec.Struct, frozen=True):
    id: int | str | float | None = None
    method: str = ""
    result: msgspec.Raw = msgspec.Raw()
    error: _Error | None = None


class _Initialized(msgspec.Struct, frozen=True, rename="camel"):
    protocol_version: str
    capabilities: dict[str, Any] = {}


class ListedTool(msgspec.Struct, frozen=True, rename="camel"):
    """A tool as its server describes it."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] = {}


class _Page(msgspec.Struct, frozen=True, rename="camel"):
    tools: list[ListedTool]
    next_cursor: str | None = None


class Resource(msgspec.Struct, frozen=True, rename="camel"):
    uri: str = ""
    mime_type: str | None = None
    text: str | None = None
    blob: str | None = None


class Content(msgspec.Struct, frozen=True, rename="camel"):
    """A part of a tool's answer; `type` says which fields it has."""

    type: str
    text: str = ""
    data: str = ""
    mime_type: str | None = None
    resource: Resource | None = None
    uri: str = ""
    name: str = ""


class CallResult(msgspec.Struct, frozen=True, rename="camel"):
    content: list[Content] = []
    is_error: bool = False
    structured_content: Any = None


_decode = msgspec.json.Decoder(_Message).decode


class Link(ABC):
    """The connection to one server. It calls `received`, `too_long` and `lost` of the session that opened it."""

    session: McpSession
    killed = False
    """A process of the sandbox ended the server with a signal; known after `last_words`."""

    @abstractmethod
    async def open(self) -> None:
        """Start or reach the server.

        Raises:
            ToolSessionLost: that failed.
            SandboxFailed: the sandbox has no such program, or is gone.
        """

    @abstractmethod
    def send(self, message: bytes, number: int | None) -> None:
        """Send a message; `number` is that of a request."""

    @abstractmethod
    def listen(self, *, on: bool) -> None:
        """Start or stop reading messages."""

    def forget(self, number: int) -> None:  # noqa: B027 - the default for what has one stream
        """Stop reading the answer to a request."""

    def agreed(self, protocol: str) -> None:  # noqa: B027 - the default for what need not know
        """Note the version of the protocol; the session is about to begin."""

    async def last_words(self) -> str:
        """Return how the server ended, for an error message; empty: the reason in `lost` has it.

        Raises:
            SandboxFailed, SandboxLimitExceeded: it ended with its sandbox.
        """
        return ""

    @abstractmethod
    async def close(self) -> None:
        """End the server or the session with it; may be called again."""


class McpSession:
    """`start` it, `call` tools, `close` it.

    Args:
        name: the server's, for error messages.
        link: the connection to it, which the session owns.
    """

    def __init__(self, name: str, link: Link) -> None:
        self.name = name
        self.changed = False
        """The server has said that its tools changed, since the last `tools`."""
        self._link = link
        link.session = self
        self._number = 0
        self._waiting: dict[int, asyncio.Future[_Message]] = {}
        self._unasked, self._unasked_bytes = 0, 0
        self._problem = ""
        self._closed = False

    async def start(self, timeout_s: float) -> list[ListedTool]:
        """Start the server, and return its tools.

        Raises:
            ToolSessionLost: it did not start in time, has no tools, or is lost.
            SandboxFailed: the sandbox has no such program, or is gone.
        """
        starting = asyncio.ensure_future(self._started(timeout_s))
        try:
            if not await wait_running(starting, timeout_s):
                raise TimeoutError
            return starting.result()
        except TimeoutError:
            self._lose(f"did not start within {timeout_s:g} s: it left initialize or tools/list unanswered")
        except McpError as error:
            self._lose(f"refused to start: {error}")
        except AnswerTooLong:
            self._lose(f"sent a message of more than {MESSAGE_LIMIT_BYTES >> 20} MiB")
        finally:
            starting.cancel()
            await asyncio.wait((starting,))
        raise await self._error()

    async def _started(self, timeout_s: float) -> list[ListedTool]:
        await self._link.open()
        about = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": {"name": "prorl_zmq", "version": ""}}
        answer = await self._request("initialize", about, timeout_s, _Initialized)
        if answer.protocol_version not in PROTOCOLS:
            self._lose(f"speaks version {answer.protocol_version:.32} of MCP; supported are {', '.join(PROTOCOLS)}")
        if "tools" not in answer.capabilities:
            self._lose("offers no tools")
        if self._problem:
            raise await self._error()
        self._link.agreed(answer.protocol_version)
        self._notify("notifications/initialized", {})
        return await self.tools(timeout_s)

    async def tools(self, timeout_s: float) -> list[ListedTool]:
        """Return the server's tools, of all pages; of two with one name the first.

        Raises:
            TimeoutError, McpError, AnswerTooLong, ToolSessionLost: as for `call`.
        """
        self.changed = False
        found: dict[str, ListedTool] = {}
        cursor: str | None = None
        seen: set[str] = set()
        while True:
            params = {} if cursor is None else {"cursor": cursor}
            page = await self._request("tools/list", params, timeout_s, _Page)
            for tool in page.tools:
                found.setdefault(tool.name, tool)
            cursor = page.next_cursor
            if cursor is None and len(found) <= TOOLS_LIMIT:
                return list(found.values())
            if cursor is None or len(found) > TOOLS_LIMIT or len(seen) >= PAGES_LIMIT or cursor in seen:
                self._lose(f"lists its tools without end, or more than {TOOLS_LIMIT}")
                raise await self._error()
            seen.add(cursor)

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> CallResult:
        """Call a tool. At the time limit, and when this call is cancelled, the server gets `notifications/cancelled`.

        Raises:
            TimeoutError: the answer did not come in time.
            McpError: the server refused the call.
            AnswerTooLong: the answer was dropped.
            ToolSessionLost: the server is lost.
        """
        return await self._request("tools/call", {"name": tool, "arguments": arguments}, timeout_s, CallResult)

    async def close(self) -> None:
        """End the session; may be called again."""
        self._closed = True
        self._lose("was closed")
        await self._link.close()

    # What the link calls ----------------------------------------------------------------------------------------------

    def received(self, content: bytes) -> None:
        """Take one message of the server."""
        try:
            message = _decode(content)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            self._count(len(content))  # a print
            return
        waiting = self._waiting.get(message.id) if isinstance(message.id, int) and not message.method else None
        if waiting is not None:
            self._unasked = self._unasked_bytes = 0
            if not waiting.done():
                waiting.set_result(message)
            return
        self._count(len(content))
        if message.method == "notifications/tools/list_changed":
            self.changed = True
        elif message.method and message.id is not None and not self._problem:
            self._answer(message.id, message.method)

    def too_long(self, size_bytes: int) -> None:
        """Drop a message that is too long: it may be the answer to any request that waits."""
        self._count(size_bytes)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(AnswerTooLong())

    def dropped(self, size_bytes: int) -> None:
        """Count more bytes of a message that is too long."""
        self._unasked -= 1
        self._count(size_bytes)

    def waits_for(self, number: int) -> bool:
        """Return whether a request has no answer yet."""
        return number in self._waiting and not self._waiting[number].done()

    def lost(self, problem: str) -> None:
        """Note that the server will send no more messages."""
        self._lose(problem)

    # ------------------------------------------------------------------------------------------------------------------

    def _answer(self, number: float | str, method: str) -> None:
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": number}
        if method == "ping":
            answer["result"] = {}
        else:
            answer["error"] = {"code": METHOD_NOT_FOUND, "message": f"this client does not support {method:.100}"}
        self._link.send(encode(answer), None)

    def _count(self, size_bytes: int) -> None:
        self._unasked += 1
        self._unasked_bytes += size_bytes
        if self._unasked > UNASKED_LIMIT or self._unasked_bytes > UNASKED_LIMIT_BYTES:
            self._lose(
                f"floods: it sent {self._unasked} messages and {self._unasked_bytes >> 20} MiB that answer no request"
            )

    def _lose(self, problem: str) -> None:
        self._problem = self._problem or problem
        self._link.listen(on=False)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(_Lost())

    async def _error(self) -> ToolSessionLost:
        words = await self._link.last_words() if not self._closed else ""
        problem = f"the MCP server {self.name} {self._problem}{f': {words}' if words else ''}"
        return ToolSessionLost(problem, server=self.name, reason="killed" if self._link.killed else "server")

    def _notify(self, method: str, params: dict[str, Any]) -> None:
        if not self._problem:
            self._link.send(encode({"jsonrpc": "2.0", "method": method, "params": params}), None)

    async def _request(self, method: str, params: dict[str, Any], timeout_s: float, returns: type[T]) -> T:
        if self._problem:
            raise await self._error()
        self._number += 1
        number = self._number
        answer: asyncio.Future[_Message] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._unasked = self._unasked_bytes = 0
        self._link.listen(on=True)
        try:
            self._link.send(encode({"jsonrpc": "2.0", "id": number, "method": method, "params": params}), number)
            in_time = await wait_running(answer, timeout_s)
        except asyncio.CancelledError:
            self._cancel(number, method, "the rollout ended")
            raise
        finally:
            del self._waiting[number]
            if answer.done():
                answer.exception()  # seen
            if not self._waiting:
                self._link.listen(on=False)
        if not in_time:
            self._cancel(number, method, f"it took longer than {timeout_s:g} s")
            raise TimeoutError
        try:
            message = answer.result()
        except _Lost:
            raise await self._error() from None
        if message.error is not None:
            raise McpError(message.error.code, message.error.message)
        try:
            return msgspec.json.decode(message.result, type=returns)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            self._lose(f"sent an answer to {method} that breaks the protocol: {error}")
        raise await self._error()

    def _cancel(self, number: int, method: str, reason: str) -> None:
        if method != "initialize":
            self._notify("notifications/cancelled", {"requestId": number, "reason": reason})
        self._link.forget(number)


class _Lost(Exception):
    """The server is lost; `_problem` says why."""


def names_of(tools: Sequence[ListedTool]) -> str:
    return ", ".join(tool.name for tool in tools) or "none"
