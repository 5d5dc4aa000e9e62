"""The bash tool: one persistent shell, as the model sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from .tool import Arguments, Tool, ToolArgumentsInvalid

if TYPE_CHECKING:
    from .bash_session import BashResult, BashSession


class BashArguments(Arguments, frozen=True):
    """What the bash tool takes."""

    command: Annotated[str, Meta(description="The bash command; it may have several lines.")]


class BashTool(Tool[BashArguments]):
    """Runs commands in a bash session, and owns that session.

    Args:
        session: closed with the tool.
    """

    name = "bash"
    description = (
        "Runs a command in a bash session that stays open: the working directory, variables and functions are kept "
        "from one call to the next. Gives what the terminal shows and the exit code if it is not 0. "
        "There is no input: use commands that ask nothing."
    )
    takes = BashArguments

    def __init__(self, session: BashSession) -> None:
        self._session = session

    async def call(self, arguments: BashArguments, timeout_s: float) -> str:
        """Run the command and describe what came of it (see `Tool.__call__`)."""
        try:
            result = await self._session.run(arguments.command, timeout_s)
        except ValueError as error:
            raise ToolArgumentsInvalid(f"wrong arguments for {self.name}: {error}") from error
        return render(result, timeout_s)

    async def close(self) -> None:
        """End the session (see `Tool.close`)."""
        await self._session.close()


def render(result: BashResult, timeout_s: float) -> str:
    """Give a result as the model reads it: the output, then a line in brackets for each thing to know."""
    notes = []
    if result.timed_out:
        notes.append(f"[timed out after {timeout_s:g} s; the command was stopped]")
    elif result.exit_code:
        notes.append(f"[exit code {result.exit_code}]")
    if result.restarted:
        notes.append("[the shell was restarted; variables, functions and jobs are lost, directory and files are kept]")
    if not notes and not result.output:
        return "[no output]"
    output = result.output
    if notes and output and not output.endswith("\n"):
        output += "\n"
    return output + "\n".join(notes)
