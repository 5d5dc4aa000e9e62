"""The think tool: a place for a thought between two actions, which stays in the trajectory and has no other effect."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .tool import Arguments, Tool


class ThinkArguments(Arguments, frozen=True):
    """What the think tool takes."""

    thought: Annotated[str, Meta(description="What to think about.")]


class ThinkTool(Tool[ThinkArguments]):
    """Takes a thought and changes nothing."""

    name = "think"
    description = "Writes down a thought, such as a plan or what a result means. It changes nothing and finds nothing."
    takes = ThinkArguments

    async def call(self, arguments: ThinkArguments, timeout_s: float) -> str:
        del arguments, timeout_s
        return "Noted."
