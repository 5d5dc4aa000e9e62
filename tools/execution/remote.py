"""The tool sessions of an execution server, as a stage process has them: each call is a request to the server."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ...errors import SandboxFailed
from . import messages

if TYPE_CHECKING:
    from ..bash_session import BashResult
    from ..cell import CellResult
    from .client import ExecutionClient


class RemoteSession:
    """Base of both. Whoever started it closes it, or the sandbox does.

    Args:
        client: the line to the server.
        number: the session's, on the server: another process may go on with it.
    """

    def __init__(self, client: ExecutionClient, number: int) -> None:
        self._client = client
        self.number = number

    async def close(self) -> None:
        """End it with all that it started; may be called again."""
        with suppress(SandboxFailed):  # it ended with its sandbox
            await self._client.ask(messages.CloseSession(self.number))


class RemoteBash(RemoteSession):
    """A bash (see `bash_session.BashSession`)."""

    async def run(self, command: str, timeout_s: float) -> BashResult:
        """Run one command (see `BashSession.run`)."""
        result: BashResult = await self._client.ask(messages.RunBash(self.number, command, timeout_s))
        return result


class RemoteCells(RemoteSession):
    """A Python, or another kernel (see `cell_session.CellSession`)."""

    async def run(self, code: str, timeout_s: float) -> CellResult:
        """Run one cell (see `CellSession.run`)."""
        result: CellResult = await self._client.ask(messages.RunCell(self.number, code, timeout_s))
        return result
