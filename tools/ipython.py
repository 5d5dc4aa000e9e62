"""The tools ipython and jupyter: one persistent Python, or one kernel of any language, as the model sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Protocol

from msgspec import Meta

from .sessions.cell_session import png_dimensions
from .tool import Arguments, Tool, ToolArgumentsInvalid

if TYPE_CHECKING:
    from .sessions.cell_session import CellResult


class IPythonArguments(Arguments, frozen=True):
    code: Annotated[str, Meta(description="Python code; it may have several lines.")]


class JupyterArguments(IPythonArguments, frozen=True):
    code: Annotated[str, Meta(description="Code in the kernel's language; it may have several lines.")]


class Cells(Protocol):
    """A session that runs cells, in this process or another one."""

    async def run(self, code: str, timeout_s: float) -> CellResult: ...

    async def close(self) -> None: ...


class IPythonTool(Tool[IPythonArguments]):
    name = "ipython"
    runs: ClassVar[str] = "Python"
    """What the results call the process that runs the code."""
    description = (
        "Runs Python code in a session that stays open: variables, imports and functions are kept from one call to "
        "the next. Gives what the code writes, the value of its last expression, and tracebacks. "
        "There is no input: input() fails."
    )
    takes = IPythonArguments

    def __init__(self, session: Cells) -> None:
        self._session = session

    async def call(self, arguments: IPythonArguments, timeout_s: float) -> str:
        try:
            result = await self._session.run(arguments.code, timeout_s)
        except ValueError as error:
            raise ToolArgumentsInvalid(f"wrong arguments for {self.name}: {error}") from error
        return render(result, timeout_s, self.runs)

    async def close(self) -> None:
        await self._session.close()


class JupyterTool(IPythonTool):
    name = "jupyter"
    runs = "kernel"
    description = (
        "Runs code in a Jupyter kernel that stays open: what a cell defines is kept for the next call. Gives what the "
        "code writes, the value of its last expression, and errors. There is no input."
    )
    takes = JupyterArguments


def render(result: CellResult, timeout_s: float, runs: str = IPythonTool.runs) -> str:
    """Return a result as the model reads it: the text, then a line in brackets for each notice."""
    notes = []
    for image in result.images:
        width, height = png_dimensions(image) or (0, 0)
        notes.append(f"[image: PNG, {width}x{height}, {max(1, round(len(image) / 1000))} kB]")
    if result.dropped_images:
        notes.append(f"[images left out: {result.dropped_images}]")
    if result.timed_out:
        notes.append(f"[timed out after {timeout_s:g} s; the code was stopped]")
    if result.ended and not result.timed_out:
        notes.append(f"[the {runs} process ended: {result.ended}]")
    if result.restarted:
        subject = runs if runs == IPythonTool.runs else f"the {runs}"
        notes.append(f"[{subject} was restarted; variables and imports are lost, files are kept]")
    if not notes and not result.text:
        return f"[{result.error}]" if result.error else "[no output]"
    text = result.text
    if notes and text and not text.endswith("\n"):
        text += "\n"
    return text + "\n".join(notes)
