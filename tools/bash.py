"""The bash tool: one persistent shell, as the model sees it.

The model writes keys of a terminal among the text that it types: `yes<enter>`, `<ctrl-c>`, `<up>`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Protocol

from msgspec import Meta

from .tool import Arguments, Tool, ToolArgumentsInvalid

if TYPE_CHECKING:
    from .sessions.bash_session import BashResult

INPUT_WAIT_S = 1.0
"""How long a call with input waits by default: most programs that read input keep reading."""
KEYS = {
    "enter": b"\r",
    "tab": b"\t",
    "esc": b"\x1b",
    "space": b" ",
    "backspace": b"\x7f",
    "delete": b"\x1b[3~",
    "up": b"\x1b[A",
    "down": b"\x1b[B",
    "right": b"\x1b[C",
    "left": b"\x1b[D",
    "home": b"\x1b[H",
    "end": b"\x1b[F",
    "pageup": b"\x1b[5~",
    "pagedown": b"\x1b[6~",
    "lt": b"<",
    **{f"ctrl-{chr(code + 0x60)}": bytes((code,)) for code in range(1, 27)},
    "ctrl-\\": b"\x1c",
    "ctrl-]": b"\x1d",
}
"""What each key sends, by its name in angle brackets; `lt` is a plain `<`."""
_WRITTEN = re.compile("<(" + "|".join(map(re.escape, KEYS)) + ")>", re.IGNORECASE)


class Shell(Protocol):
    """What the tool needs of a `BashSession`, here or in an execution server; its methods are described there."""

    async def run(self, command: str, timeout_s: float, wait_s: float | None = None) -> BashResult: ...

    async def send(self, data: bytes, timeout_s: float, wait_s: float | None = None) -> BashResult: ...

    async def close(self) -> None: ...


class BashArguments(Arguments, frozen=True):
    command: Annotated[str | None, Meta(description="The bash command; it may have several lines.")] = None
    input: Annotated[
        str | None,
        Meta(
            description=(
                "Instead of a command: what to type to the command that is still running, exactly as it stands. Keys "
                "are written <enter>, <tab>, <esc>, <up>, <down>, <backspace>, <ctrl-c>, <ctrl-d> (end of input), "
                "<ctrl-z> and so on. An empty text types nothing and only waits."
            )
        ),
    ] = None
    wait_s: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description=(
                "Come back after this many seconds with the output so far, and leave the command running, so that you "
                "can give it input. Left out, a command is waited for until it ends or its time is over, and input "
                f"waits {INPUT_WAIT_S:g} s."
            ),
        ),
    ] = None


class BashTool(Tool[BashArguments]):
    name = "bash"
    description = (
        "Runs a command in a bash session that stays open: the working directory, variables and functions are kept "
        "from one call to the next. Gives what the terminal shows and the exit code if it is not 0. "
        "For a program that asks for input, give `wait_s` with the command, then answer it in calls with `input`. "
        "One command runs at a time."
    )
    takes = BashArguments

    def __init__(self, session: Shell) -> None:
        self._session = session

    async def call(self, arguments: BashArguments, timeout_s: float) -> str:
        command, text, wait_s = arguments.command, arguments.input, arguments.wait_s
        try:
            if command is not None and text is None:
                result = await self._session.run(command, timeout_s, wait_s)
            elif text is not None and not command:
                result = await self._session.send(typed(text), timeout_s, INPUT_WAIT_S if wait_s is None else wait_s)
            elif command is None:
                raise ValueError("give either `command`, or `input` for the command that is still running")
            else:
                raise ValueError(
                    "give `command` or `input`, not both; run the command with `wait_s` first, then give the input"
                )
        except ValueError as error:
            raise ToolArgumentsInvalid(f"wrong arguments for {self.name}: {error}") from error
        return render(result, timeout_s)

    async def close(self) -> None:
        await self._session.close()


def typed(text: str) -> bytes:
    """Return the bytes that a terminal sends for a text with keys in it; other angle brackets are literal."""
    pieces = _WRITTEN.split(text)
    # Every second piece is the name of a key.
    return b"".join(
        KEYS[piece.lower()] if index % 2 else piece.encode("utf-8", "replace") for index, piece in enumerate(pieces)
    )


def render(result: BashResult, timeout_s: float) -> str:
    """Return a result as the model reads it: the output, then a line in brackets for each notice."""
    notes = []
    if result.running:
        notes.append(
            "[still running; give it input with `input`, wait on with an empty `input`, or end it with <ctrl-c>]"
        )
    if result.not_sent:
        notes.append("[the command had ended before this input, which was not typed]")
    if result.timed_out:
        notes.append(f"[timed out after {timeout_s:g} s; the command and all it started were stopped]")
    elif result.exit_code:
        notes.append(f"[exit code {result.exit_code}]")
    if result.restarted:
        notes.append("[the shell was restarted; variables, functions and jobs are lost, directory and files are kept]")
    if result.background:
        notes.append(f"[before this command, jobs in the background wrote:]\n{result.background}")
    if not notes and not result.output:
        return "[no output]"
    output = result.output
    if notes and output and not output.endswith("\n"):
        output += "\n"
    return output + "\n".join(notes)
