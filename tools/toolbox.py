"""The tools of one job, by their names: INIT starts the sessions in its sandbox, RUN makes the tools on them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..errors import SandboxFailed
from .bash import BashTool
from .editor_tool import EditorTool
from .ipython import IPythonTool, JupyterTool
from .think_and_finish import FinishTool, ThinkTool

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from .execution.client import RemoteSession
    from .sandbox.sandbox import Sandbox
    from .tool import Tool

ToolName = Literal["bash", "ipython", "jupyter", "str_replace_editor", "think", "finish"]
KNOWN: tuple[ToolName, ...] = get_args(ToolName)


class Toolbox:
    """Makes tools.

    Args:
        sandbox: what they act in.
        names: which, of `ToolName`.
        kernel: the command line of the kernel of `jupyter`, as `argv` in a kernel spec, `{connection_file}` included;
            empty: the image's ipykernel.

    Raises:
        SandboxFailed: the job has no sandbox.
        ValueError: a name is not a tool's.
    """

    def __init__(self, sandbox: Sandbox | None, names: Sequence[ToolName], kernel: Sequence[str] = ()) -> None:
        if sandbox is None:
            raise SandboxFailed("tools need a sandbox, and this job has none: call phase.create_sandbox in init")
        if unknown := [names] if isinstance(names, str) else [name for name in names if name not in KNOWN]:
            raise ValueError(f"unknown tools: {', '.join(map(repr, unknown))}; names is a list of {', '.join(KNOWN)}")
        self._sandbox = sandbox
        self._names = tuple(dict.fromkeys(names))
        self._kernel = tuple(kernel)

    async def start(self) -> dict[str, int]:
        """Start the sessions that the tools need; return their numbers by the tools' names, for `tools`.

        Raises:
            SandboxFailed: a session did not start: the image has no bash, no Python, or no such kernel.
        """
        starts: dict[str, Callable[[], Awaitable[RemoteSession]]] = {
            "bash": self._sandbox.bash,
            "ipython": self._sandbox.ipython,
            "jupyter": partial(self._sandbox.kernel, self._kernel),
        }
        wanted = [name for name in self._names if name in starts]
        sessions = await asyncio.gather(*(starts[name]() for name in wanted))
        return {name: session.number for name, session in zip(wanted, sessions, strict=True)}

    def tools(self, sessions: Mapping[str, int]) -> list[Tool[Any]]:
        """Make the tools on sessions that `start` returned, in this process or another one."""
        return [self._tool(name, sessions) for name in self._names]

    def _tool(self, name: ToolName, sessions: Mapping[str, int]) -> Tool[Any]:
        try:
            match name:
                case "bash":
                    return BashTool(self._sandbox.bash_session(sessions["bash"]))
                case "ipython":
                    return IPythonTool(self._sandbox.cell_session(sessions["ipython"]))
                case "jupyter":
                    return JupyterTool(self._sandbox.cell_session(sessions["jupyter"]))
                case "str_replace_editor":
                    return EditorTool(self._sandbox)
                case "think":
                    return ThinkTool()
                case "finish":
                    return FinishTool()
        except KeyError:
            raise ValueError(f"the session of {name} is not among {dict(sessions)}: give what `start` gave") from None
