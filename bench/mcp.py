"""MCP: a call of a tool through the agent loop's tools, against the SDK's own client on the same server.

The server is one of the real package (`make mcp`), over standard input and output: ours runs in a sandbox of kind
`process`, the SDK's client starts it itself. Both are started before the first call and take turns, so that what else
runs on the machine slows both.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from harness import Incomplete, Row, main, quantiles

from prorl_zmq.tools.mcp.toolset import McpTools
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes
from prorl_zmq.wire.messages.jobs import McpServer

if TYPE_CHECKING:
    from prorl_zmq.tools.tool import AnyTool

ROOT = Path(__file__).parent.parent
SERVER = """
from mcp.server.mcpserver import MCPServer
server = MCPServer("bench")
@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b
server.run("stdio")
"""
PEER = """
import asyncio, json, sys, time
from mcp import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client

async def main():
    async with stdio_client(StdioServerParameters(command=sys.executable, args=["-c", sys.argv[1]])) as streams:
        async with ClientSession(*streams) as session:
            await session.initialize()
            await session.list_tools()
            print("ready", flush=True)
            loop = asyncio.get_running_loop()
            while calls := int(await loop.run_in_executor(None, sys.stdin.readline) or 0):
                seconds = []
                for number in range(calls):
                    began = time.perf_counter()
                    result = await session.call_tool("add", {"a": number, "b": 1})
                    seconds.append(time.perf_counter() - began)
                    assert result.content[0].text == str(number + 1)
                print(json.dumps(seconds), flush=True)
asyncio.run(main())
"""
TARGET = 1.2
CALL_LIMIT_S = 30.0
BATCH = 50
WARM = 50


async def our_calls(add: AnyTool, calls: int) -> list[float]:
    """Give the seconds of each call."""
    seconds = []
    for number in range(calls):
        began = time.perf_counter()
        text = await add({"a": number, "b": 1}, CALL_LIMIT_S)
        seconds.append(time.perf_counter() - began)
        assert text == str(number + 1), text
    return seconds


def their_client(python: str, folder: str) -> subprocess.Popen[str]:
    """Start it in a folder without this file, which has the package's name."""
    command = [python, "-c", PEER, SERVER]
    return subprocess.Popen(
        command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def their_calls(peer: subprocess.Popen[str], calls: int) -> list[float]:
    assert peer.stdin is not None
    assert peer.stdout is not None
    peer.stdin.write(f"{calls}\n")
    peer.stdin.flush()
    seconds: list[float] = json.loads(peer.stdout.readline())
    return seconds


async def compared(python: str, rounds: int) -> tuple[list[float], list[float]]:
    """Give the seconds of our calls, and of those of the SDK's client."""
    ours: list[float] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        sandboxes = Sandboxes("process", Path(folder) / "sandboxes")
        peer = their_client(python, folder)
        try:
            sandbox = await sandboxes.create("bench")
            tools = McpTools([McpServer(name="bench", command=(python, "-c", SERVER))], sandbox, {})
            await tools.open()
            assert peer.stdout is not None
            assert await asyncio.to_thread(peer.stdout.readline) == "ready\n"
            add = tools.tools["add"]
            await our_calls(add, WARM)
            their_calls(peer, WARM)
            for _ in range(rounds):
                ours += await our_calls(add, BATCH)
                theirs += their_calls(peer, BATCH)
            await tools.close()
            await sandbox.close()
        finally:
            peer.kill()
            peer.wait()
            sandboxes.close(5)
    return ours, theirs


def measure(quick: bool) -> list[Row]:
    python = os.environ.get("PRORL_MCP_PYTHON", str(ROOT / ".mcp" / "bin" / "python"))
    if not Path(python).exists():
        raise Incomplete("there is no Python with the package mcp: run make mcp", [])
    ours, theirs = uvloop.run(compared(python, 6 if quick else 40))
    found: list[Any] = [quantiles(ours), quantiles(theirs)]
    ratio = found[0][0] / found[1][0]
    against = f"the SDK's client and server, {found[1][0] * 1e3:.2f} ms"
    return [
        Row("call, p50", found[0][0] * 1e3, "ms", against, ratio, f"≤ {TARGET:g}×", ratio <= TARGET),
        Row("call, p95", found[0][1] * 1e3, "ms", f"the same, {found[1][1] * 1e3:.2f} ms", found[0][1] / found[1][1]),
        Row("the SDK's client, p50", found[1][0] * 1e3, "ms"),
    ]


if __name__ == "__main__":
    main("mcp", "a call of an MCP server's tool, against the SDK's own client", measure)
