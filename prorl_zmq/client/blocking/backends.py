# Generated from ../asynchronous/backends.py by `make client`; do not edit.
"""`Backends`: lists and changes the inference backends of a service."""

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
    from .connection import ServiceConnection


class Backends:
    """The inference backends of a service: `RolloutClient.backends`.

    Each call raises `RequestTimeout` if the backend broker does not answer within the client's `timeout_s`.
    """

    def __init__(self, service: ServiceConnection) -> None:
        self._service = service

    def add(self, backend: Backend) -> None:
        """Register a backend that does not register itself; adding a draining one makes it ready.

        Raises:
            DuplicateBackend: another backend has its id.
        """
        self.ask(AddBackend(new_id(), backend))

    def drain(self, backend_id: str) -> None:
        """Assign no more jobs to a backend; existing assignments stay.

        Raises:
            UnknownBackend: no backend has that id.
        """
        self.ask(DrainBackend(new_id(), backend_id))

    def remove(self, backend_id: str) -> None:
        """Remove a backend and its assignments.

        Raises:
            UnknownBackend: no backend has that id.
        """
        self.ask(RemoveBackend(new_id(), backend_id))

    def clear(self) -> None:
        """Remove all backends."""
        self.ask(ClearBackends(new_id()))

    def list(self, *, timeout_s: float | None = None) -> tuple[BackendStatus, ...]:
        """Return all backends: state, weight version, assignments in flight."""
        reply: BackendList = self.ask(ListBackends(new_id()), timeout_s)
        return reply.backends

    @property
    def keyring(self) -> Keyring | None:
        """The client's keys; None: it has none."""
        return self._service.keyring

    def ask(self, request: Any, timeout_s: float | None = None) -> Any:
        """Send any request to the backend broker and return the reply."""
        return self._service.ask_backend_broker(request, self._service.until(timeout_s))
