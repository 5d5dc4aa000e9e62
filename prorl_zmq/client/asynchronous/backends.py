"""`AsyncBackends`: lists and changes the inference backends of a service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...wire.messages.backends import (
    AddBackend,
    BackendList,
    ClearBackends,
    DrainBackend,
    ListBackends,
    RemoveBackend,
)
from ...wire.messages.base import new_id

if TYPE_CHECKING:
    from ...security.keyring import Keyring
    from ...wire.messages.backends import Backend, BackendStatus
    from .connection import AsyncServiceConnection


class AsyncBackends:
    """The inference backends of a service: `AsyncRolloutClient.backends`.

    Each call raises `RequestTimeout` if the backend broker does not answer within the client's `timeout_s`.
    """

    def __init__(self, service: AsyncServiceConnection) -> None:
        self._service = service

    async def add(self, backend: Backend) -> None:
        """Register a backend that does not register itself; adding a draining one makes it ready.

        Raises:
            DuplicateBackend: another backend has its id.
        """
        await self.ask(AddBackend(new_id(), backend))

    async def drain(self, backend_id: str) -> None:
        """Assign no more jobs to a backend; existing assignments stay.

        Raises:
            UnknownBackend: no backend has that id.
        """
        await self.ask(DrainBackend(new_id(), backend_id))

    async def remove(self, backend_id: str) -> None:
        """Remove a backend and its assignments.

        Raises:
            UnknownBackend: no backend has that id.
        """
        await self.ask(RemoveBackend(new_id(), backend_id))

    async def clear(self) -> None:
        """Remove all backends."""
        await self.ask(ClearBackends(new_id()))

    async def list(self, *, timeout_s: float | None = None) -> tuple[BackendStatus, ...]:
        """Return all backends: state, weight version, assignments in flight."""
        reply: BackendList = await self.ask(ListBackends(new_id()), timeout_s)
        return reply.backends

    @property
    def keyring(self) -> Keyring | None:
        """The client's keys; None: it has none."""
        return self._service.keyring

    async def ask(self, request: Any, timeout_s: float | None = None) -> Any:
        """Send any request to the backend broker and return the reply."""
        return await self._service.ask_backend_broker(request, self._service.until(timeout_s))
