"""The tool sessions of an execution server, as a stage process has them: each call is a request to the server."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...errors import InvalidToolCall, SandboxFailed
from . import messages

if TYPE_CHECKING:
    from ..sessions.bash_session import BashResult
    from ..sessions.cell_session import CellResult
    from .client import ExecutionClient


class RemoteSession:
    """Base of both. The caller that started the session closes it, or the sandbox does."""

    def __init__(self, client: ExecutionClient, number: int) -> None:
        self._client = client
        self.number = number

    async def _ask(self, request: messages.Request) -> Any:
        try:
            return await self._client.ask(request)
        except InvalidToolCall as error:
            raise ValueError(error.message) from error

    async def close(self) -> None:
        """End it with all that it started; may be called again."""
        with suppress(SandboxFailed):  # it ended with its sandbox
            await self._client.ask(messages.CloseSession(self.number))


class RemoteBash(RemoteSession):
    """A bash (see `bash_session.BashSession`)."""

    async def run(self, command: str, timeout_s: float, wait_s: float | None = None) -> BashResult:
        result: BashResult = await self._ask(messages.RunBash(self.number, command, timeout_s, wait_s))
        return result

    async def send(self, data: bytes, timeout_s: float, wait_s: float | None = None) -> BashResult:
        result: BashResult = await self._ask(messages.SendBash(self.number, data, timeout_s, wait_s))
        return result


class RemoteCells(RemoteSession):
    """A Python, or another kernel (see `cell_session.CellSession`)."""

    async def run(self, code: str, timeout_s: float) -> CellResult:
        result: CellResult = await self._ask(messages.RunCell(self.number, code, timeout_s))
        return result
