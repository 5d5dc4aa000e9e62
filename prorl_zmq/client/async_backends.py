"""`AsyncBackends`: the inference backends of a service, as an asyncio client lists and changes them.

As `backends`, whose docstrings say more: a part of `AsyncRolloutClient`, on its line to the backend broker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..wire import codec
from ..wire.messages.backends import AddBackend, BackendList, ClearBackends, DrainBackend, ListBackends, RemoveBackend
from ..wire.messages.base import new_id

if TYPE_CHECKING:
    from ..wire.messages.backends import Backend, BackendStatus
    from .async_client import AsyncRolloutClient


class AsyncBackends:
    """The inference backends of a service; a part of `AsyncRolloutClient`. See `backends.Backends`."""

    def __init__(self, client: AsyncRolloutClient) -> None:
        self._client = client

    async def add(self, backend: Backend) -> None:
        """Register a backend that does not register itself; adding a draining one again makes it ready."""
        await self.ask(AddBackend(new_id(), backend))

    async def drain(self, backend_id: str) -> None:
        """Assign no more jobs to a backend; those that hold it keep it."""
        await self.ask(DrainBackend(new_id(), backend_id))

    async def remove(self, backend_id: str) -> None:
        """Forget a backend and the assignments on it."""
        await self.ask(RemoveBackend(new_id(), backend_id))

    async def clear(self) -> None:
        """Forget all backends."""
        await self.ask(ClearBackends(new_id()))

    async def list(self, *, timeout_s: float | None = None) -> tuple[BackendStatus, ...]:
        """Describe all backends: state, weight version, assignments in flight."""
        reply: BackendList = await self.ask(ListBackends(new_id()), timeout_s)
        return reply.backends

    async def ask(self, request: Any, timeout_s: float | None = None) -> Any:
        """Send any request to the backend broker and give its reply."""
        client = self._client
        until = client._until(timeout_s)  # noqa: SLF001 - a part of the client
        endpoint = (await client._hello(until)).backend_broker  # noqa: SLF001 - a part of the client
        line = client._line(endpoint)  # noqa: SLF001 - a part of the client
        return await line.ask([codec.encode(request)], request.request_id, until)
