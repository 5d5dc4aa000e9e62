"""The finish tool: the policy says that its work is done, and the episode ends with that call."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .tool import Arguments, Tool


class FinishArguments(Arguments, frozen=True):
    """What the finish tool takes."""

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
