"""MCP servers in a sandbox, or at an address, while a test uses their tools."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.sandboxes import main_kind

from prorl_zmq.tools.containers.specification import Bind, SandboxSpec
from prorl_zmq.tools.mcp.toolset import McpTools
from prorl_zmq.wire.messages.jobs import McpServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.sandboxes import SharedSandboxes

    from prorl_zmq.tools.sandbox.sandbox import Sandbox
    from prorl_zmq.tools.tool import AnyTool

TESTS = Path(__file__).parent
SMALL, FAST = TESTS / "small_mcp_server.py", TESTS / "fast_mcp_server.py"


def served(
    sandboxes_of: SharedSandboxes,
    server: McpServer,
    use: Callable[[dict[str, AnyTool], Sandbox], Awaitable[Any]],
    *binds: Bind,
    url_key: str = "",
) -> Any:
    """Open a server in a sandbox that has the test servers, use its tools, and close it."""

    async def whole() -> Any:
        sandbox = await sandboxes_of(main_kind()).create("job.1", SandboxSpec(binds=binds))
        try:
            await sandbox.write_files({path.name: path.read_bytes() for path in (SMALL, FAST)})
            tools = McpTools([server], sandbox, {server.url: url_key})
            await tools.open()
            try:
                return await use(tools.tools, sandbox)
            finally:
                await tools.close()
        finally:
            await sandbox.close()

    return asyncio.run(whole())


def small(mode: str, **more: Any) -> McpServer:
    return McpServer(name="shop", command=("python3", "small_mcp_server.py", mode), **more)


async def add(tools: dict[str, AnyTool], sandbox: Sandbox, limit_s: float = 10.0) -> str:
    del sandbox
    return await tools["add"]({"a": 1, "b": 2}, limit_s)
