# Generated from ../asynchronous/backends.py by `make client`; do not edit.
"""`Backends`: the inference backends of a service, as a trainer's client lists and changes them."""

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
    from ...wire.messages.backends import Backend, BackendStatus
    from .connection import ServiceConnection


class Backends:
    """The inference backends of a service: `RolloutClient.backends`.

    Each call raises `RequestTimeout` if the backend broker does not answer in the client's `timeout_s`.
    """

    def __init__(self, service: ServiceConnection) -> None:
        self._service = service

    def add(self, backend: Backend) -> None:
        """Register a backend that does not register itself; adding a draining one makes it ready.

        Raises:
            DuplicateBackend: another one has its id.
        """
        self.ask(AddBackend(new_id(), backend))

    def drain(self, backend_id: str) -> None:
        """Assign no more jobs to a backend; those that have it keep it.

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
        """Send any request to the backend broker and return its reply."""
        return self._service.ask_backend_broker(request, self._service.until(timeout_s))
