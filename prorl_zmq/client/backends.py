"""`Backends`: the inference backends of a service, as a trainer's client lists and changes them.

A part of `RolloutClient`, whose timeouts and keys it uses; its line to the backend broker is opened with the first
request, and ends with the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..wire import codec
from ..wire.messages.backends import AddBackend, BackendList, ClearBackends, DrainBackend, ListBackends, RemoveBackend
from ..wire.messages.base import new_id

if TYPE_CHECKING:
    from ..wire.messages.backends import Backend, BackendStatus
    from .client import RolloutClient
    from .request_connection import RequestConnection


class Backends:
    """The inference backends of a service; a part of `RolloutClient`.

    Each call raises `RequestTimeout` if the backend broker does not answer.
    """

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._line: RequestConnection | None = None

    def add(self, backend: Backend) -> None:
        """Register a backend that does not register itself; adding a draining one again makes it ready.

        Raises:
            DuplicateBackend: another one has its id.
        """
        self.ask(AddBackend(new_id(), backend))

    def drain(self, backend_id: str) -> None:
        """Assign no more jobs to a backend; those that hold it keep it.

        Raises:
            UnknownBackend: there is none of that id.
        """
        self.ask(DrainBackend(new_id(), backend_id))

    def remove(self, backend_id: str) -> None:
        """Forget a backend and the assignments on it.

        Raises:
            UnknownBackend: there is none of that id.
        """
        self.ask(RemoveBackend(new_id(), backend_id))

    def clear(self) -> None:
        """Forget all backends."""
        self.ask(ClearBackends(new_id()))

    def list(self, *, timeout_s: float | None = None) -> tuple[BackendStatus, ...]:
        """Describe all backends: state, weight version, assignments in flight."""
        reply: BackendList = self.ask(ListBackends(new_id()), timeout_s)
        return reply.backends

    def ask(self, request: Any, timeout_s: float | None = None) -> Any:
        """Send any request to the backend broker and give its reply."""
        until = self._client._until(timeout_s)  # noqa: SLF001 - a part of the client
        if self._line is None:
            self._line = self._client._backend_broker(until)  # noqa: SLF001 - a part of the client
        return self._line.ask([codec.encode(request)], request.request_id, until)
