"""The tools that act only on the episode.

think: a place for a thought between two actions, which stays in the trajectory and has no other effect. finish: the
policy declares its work done, and the episode ends with that call.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .tool import Arguments, Tool


class ThinkArguments(Arguments, frozen=True):
    thought: Annotated[str, Meta(description="What to think about.")]


class ThinkTool(Tool[ThinkArguments]):
    name = "think"
    description = "Writes down a thought, such as a plan or what a result means. It changes nothing and finds nothing."
    takes = ThinkArguments

    async def call(self, arguments: ThinkArguments, timeout_s: float) -> str:
        del arguments, timeout_s
        return "Noted."


class FinishArguments(Arguments, frozen=True):
    message: Annotated[str, Meta(description="The answer, or what was done and what is left to do.")]


class FinishTool(Tool[FinishArguments]):
    """Ends the episode; its message is the episode's `final_message`."""

    name = "finish"
    description = "Ends the work. Call it once, when the task is done or cannot be done; calls after it are not done."
    takes = FinishArguments
    ends_episode = True

    async def call(self, arguments: FinishArguments, timeout_s: float) -> str:
        del timeout_s
        return arguments.message
