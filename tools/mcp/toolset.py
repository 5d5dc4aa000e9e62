"""`McpTools`: the tools of all MCP servers of one rollout, under names that are unique.

A tool keeps its name unless the rollout has another of that name; then it is `SERVER_NAME`. A chat template describes
the tools once, so later changes are described in the text of a call; the policy can call new tools from then on.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import InvalidJob, SandboxFailed
from ..processes.output import OUTPUT_LIMIT_BYTES, HeadTail
from ..tool import AnyTool, ToolArgumentsInvalid, function_schema
from .pipes import ProgramLink
from .session import INVALID_PARAMS, MESSAGE_LIMIT_BYTES, AnswerTooLong, McpError, McpSession, names_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ...wire.messages.jobs import McpServer
    from ..sandbox.sandbox import Sandbox
    from .session import CallResult, Content, Link, ListedTool

NAME_LIMIT = 64
"""Most characters of a tool's name: what most chat templates and servers of models take."""
LIST_LIMIT_S = 10.0
"""Longest time of listing tools that have changed."""
CHANGES_LIMIT_BYTES = 8 * 1024
"""Longest text about changed tools."""
EMPTY_SCHEMA: Mapping[str, Any] = {"type": "object", "properties": {}}
LINKS = re.compile(r"\s*For further information visit https?://\S+")
"""What pydantic puts behind each error."""


class McpTool(AnyTool):
    """One tool of a server."""

    def __init__(self, tools: McpTools, session: McpSession, listed: ListedTool, name: str) -> None:
        self.name = name
        self.listed = listed
        self.session = session
        self._tools = tools

    def schema(self) -> dict[str, Any]:
        schema = {**EMPTY_SCHEMA, **self.listed.input_schema}
        return function_schema(self.name, self.listed.description or "", schema)

    async def __call__(self, arguments: dict[str, Any], timeout_s: float) -> str:
        try:
            msgspec.json.encode(arguments)
        except (UnicodeError, OverflowError, ValueError, TypeError, RecursionError) as error:
            raise ToolArgumentsInvalid(f"the arguments for {self.name} cannot be sent: {error}") from error
        try:
            text = text_of(await self.session.call(self.listed.name, arguments, timeout_s))
        except McpError as error:
            if error.code == INVALID_PARAMS:
                raise ToolArgumentsInvalid(f"{self.name} refused the call: {error}") from error
            text = f"Error: {error}"
        except AnswerTooLong:
            text = f"[the answer has more than {MESSAGE_LIMIT_BYTES >> 20} MiB and was left out; ask for less]"
        except TimeoutError:
            text = f"[{self.name} did not answer within {timeout_s:g} s; the call was cancelled]"
        text = cut(text, self._tools.output_limit_bytes)
        if self.session.changed:
            text += await self._tools.changes(self.session)
        return text


class McpTools:
    """The servers of one rollout: `open` them, give `tools` to the agent loop, `close` them.

    Args:
        servers: the job's.
        sandbox: where servers with a command run; None: the job has none.
        allowed: the addresses that the operator allows, and the key for each (empty: none).
        taken: the names of the rollout's other tools.
    """

    def __init__(
        self,
        servers: Sequence[McpServer],
        sandbox: Sandbox | None,
        allowed: Mapping[str, str],
        taken: Collection[str] = (),
    ) -> None:
        self._servers, self._sandbox, self._allowed = servers, sandbox, allowed
        self._taken = set(taken)
        self._sessions: dict[McpSession, McpServer] = {}
        self.tools: dict[str, AnyTool] = {}
        """By the names that the policy calls; it changes when a server adds or removes tools."""
        self._made: list[McpTool] = []
        self.output_limit_bytes = sandbox.spec.output_limit_bytes if sandbox is not None else OUTPUT_LIMIT_BYTES

    async def open(self) -> None:
        """Start all servers at once; if one fails, end the others.

        Raises:
            InvalidJob: two servers have one name, an address is not allowed, or a server lacks a named tool.
            ToolSessionLost: a server did not start.
            SandboxFailed: the sandbox has no such program, or there is no sandbox.
        """
        names = [server.name for server in self._servers]
        if len(set(names)) < len(names):
            raise InvalidJob(f"two MCP servers have one name: {', '.join(names)}", field="mcp")
        self._sessions = {McpSession(server.name, self._link(server)): server for server in self._servers}
        starts = [session.start(server.start_s) for session, server in self._sessions.items()]
        try:
            listed = await _all(starts)
            found = [
                (session, tool)
                for (session, server), tools in zip(self._sessions.items(), listed, strict=True)
                for tool in _chosen(server, tools)
            ]
        except BaseException:
            await self.close()
            raise
        offered = [tool.name for _, tool in found]
        self._taken |= {name for name in offered if offered.count(name) > 1}
        for session, tool in found:
            self._add(session, tool)

    async def changes(self, session: McpSession) -> str:
        """List a server's tools again; return a text about what is new and what is gone."""
        before = {tool.listed.name: tool for tool in self._made if tool.session is session}
        try:
            listed = _chosen(self._sessions[session], await session.tools(LIST_LIMIT_S), strict=False)
        except (TimeoutError, McpError, AnswerTooLong):
            return ""  # the tools stay as they were known
        now = {tool.name: tool for tool in listed}
        lines = []
        for tool in listed:
            known = before.get(tool.name)
            if known is None:
                lines.append(f"New tool: {_described(self._add(session, tool))}")
            elif known.listed != tool:
                known.listed = tool
                lines.append(f"Changed tool: {_described(known)}")
        for gone in (tool for name, tool in before.items() if name not in now):
            del self.tools[gone.name]
            self._made.remove(gone)
            lines.append(f"Tool that is gone: {gone.name}")
        return cut("".join(f"\n[{line}]" for line in lines), CHANGES_LIMIT_BYTES)

    async def close(self) -> None:
        """End all servers and sessions; may be called again."""
        await asyncio.gather(*(session.close() for session in self._sessions))

    def _link(self, server: McpServer) -> Link:
        if server.command:
            if self._sandbox is None:
                raise SandboxFailed(f"the MCP server {server.name} needs a sandbox, and the job has none")
            return ProgramLink(server, self._sandbox)
        if server.url not in self._allowed:
            known = ", ".join(self._allowed) or "none"
            words = (
                f"the MCP server {server.name}: {server.url} is not among the service's [[mcp]] addresses: {known}; "
                "add it to the topology file, or give the server a command"
            )
            raise InvalidJob(words, field="mcp")
        from .http import HttpLink  # imports aiohttp, which takes half of a process's start

        return HttpLink(server.url, self._allowed[server.url])

    def _add(self, session: McpSession, listed: ListedTool) -> McpTool:
        name = re.sub(r"[^A-Za-z0-9_-]", "_", listed.name)[:NAME_LIMIT] or "tool"
        if name in self._taken or name in self.tools:
            name = f"{session.name}_{name}"[:NAME_LIMIT]
        base, number = name, 1
        while name in self._taken or name in self.tools:
            number += 1
            name = f"{base[: NAME_LIMIT - 4]}_{number}"
        tool = self.tools[name] = McpTool(self, session, listed, name)
        self._made.append(tool)
        return tool


def text_of(result: CallResult) -> str:
    """Return a tool's answer as the policy reads it."""
    parts = [_part(content) for content in result.content]
    if not parts and result.structured_content is not None:
        parts = [msgspec.json.encode(result.structured_content).decode()]
    text = LINKS.sub("", "\n".join(parts))
    if result.is_error and not text.lower().startswith("error"):
        text = f"Error: {text}" if text else "Error"
    return text


def cut(text: str, limit_bytes: int) -> str:
    """Return a text without its middle if it is longer than a limit."""
    kept = HeadTail(limit_bytes)
    kept.append(text.encode("utf-8", "replace"))
    return kept.take(more=False)[0]


def _part(content: Content) -> str:
    if content.type == "text":
        return content.text
    if content.type == "resource" and content.resource is not None:
        resource = content.resource
        if resource.text is not None:
            return resource.text
        return (
            f"[{resource.mime_type or 'data'} at {resource.uri}, {len(resource.blob or '') * 3 // 4} bytes, not shown]"
        )
    if content.type == "resource_link":
        return f"[{content.name}: {content.uri}]"
    return f"[{content.mime_type or content.type}, {len(content.data) * 3 // 4} bytes, not shown]"


def _described(tool: McpTool) -> str:
    schema = msgspec.json.encode(tool.listed.input_schema).decode()
    return f"{tool.name}: {tool.listed.description or ''} Its arguments: {schema}"


def _chosen(server: McpServer, listed: list[ListedTool], *, strict: bool = True) -> list[ListedTool]:
    """Return the tools that a job asks for.

    Raises:
        InvalidJob: the server does not have one of them.
    """
    if not server.tools:
        return listed
    there = {tool.name: tool for tool in listed}
    if strict and (missing := [name for name in server.tools if name not in there]):
        words = f"the MCP server {server.name} has no tool {', '.join(missing)}; it has {names_of(listed)}"
        raise InvalidJob(words, field="mcp")
    return [there[name] for name in server.tools if name in there]


async def _all(starts: Sequence[Any]) -> list[Any]:
    """Run coroutines at once; if one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
