"""An MCP server as users write them, with the real package; over HTTP if there is a port."""

import asyncio
import os
import sys

from fastmcp import Context, FastMCP
from mcp_types import ToolListChangedNotification

mcp = FastMCP("test")


@mcp.tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@mcp.tool
def fail(text: str) -> str:
    raise ValueError(text)


@mcp.tool
async def sleep(seconds: float) -> str:
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        mcp.cancelled = True
        raise
    return "slept"


@mcp.tool
def was_cancelled() -> bool:
    return getattr(mcp, "cancelled", False)


@mcp.tool
async def grow(ctx: Context) -> str:
    def extra(text: str) -> str:
        """Shouts."""
        return text.upper()

    mcp.tool(extra)
    await ctx.send_notification(ToolListChangedNotification())
    return "grown"


@mcp.tool
async def elicit(ctx: Context) -> str:
    try:
        return str(await ctx.elicit("Who are you?", response_type=str))
    except Exception as error:  # noqa: BLE001 - the refusal is what the test looks at
        return f"refused: {error}"


@mcp.tool
def die() -> str:
    os._exit(3)


if __name__ == "__main__":
    if sys.argv[1:]:
        mcp.run(transport="http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        mcp.run()
