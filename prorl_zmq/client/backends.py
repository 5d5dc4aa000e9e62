"""`Backends`: the inference backends of a service, as a trainer's client lists and changes them.

A part of `RolloutClient`, whose timeouts and keys it uses; its line to the backend broker is opened with the first
request, and ends with the client.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..errors import NoBackend, ProrlError, RequestTimeout
from ..wire import codec
from ..wire.messages.backends import AddBackend, BackendList, ClearBackends, DrainBackend, ListBackends, RemoveBackend
from ..wire.messages.base import new_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..wire.messages.backends import Backend, BackendStatus
    from ..wire.messages.engines import EngineRequest
    from .client import RolloutClient
    from .request_connection import RequestConnection


NO_BACKEND = "no backend is registered, so none has taken the weights; see `prorl backends list`"


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

    def tell_engines(self, request: Callable[[], EngineRequest], until: float) -> dict[str, ProrlError | None]:
        """Ask the engine hosts of all backends the same at one time.

        Args:
            request: makes one host's request.
            until: when, by `time.monotonic`, to wait no longer.

        Returns:
            For each backend's id None, or why it was not done there; that error names it.

        Raises:
            NoBackend: there is none.
            RequestTimeout: the backend broker did not answer.
        """
        backends = {status.backend.backend_id: status.backend for status in self.list(timeout_s=left_s(until))}
        if not backends:
            raise NoBackend(NO_BACKEND)
        requests = {backend_id: request() for backend_id in backends}
        lines: dict[str, RequestConnection] = {}
        outcomes: dict[str, ProrlError | None] = dict.fromkeys(backends)
        try:
            for backend_id, backend in backends.items():
                try:
                    lines[backend_id] = self._client._engine_line(backend)  # noqa: SLF001 - a part of the client
                    lines[backend_id].send([codec.encode(requests[backend_id])])
                except ProrlError as error:
                    outcomes[backend_id] = named(error, backend_id)
            for backend_id, line in lines.items():
                try:
                    if line.reply(requests[backend_id].request_id, until) is None:
                        late = RequestTimeout("its engine host did not answer in time")
                        outcomes[backend_id] = named(late, backend_id)
                except ProrlError as error:
                    outcomes[backend_id] = named(error, backend_id)
        finally:
            for line in lines.values():
                line.close()
        return outcomes


def left_s(until: float) -> float:
    """Give the seconds until a time of `time.monotonic`; 0 if it has passed."""
    return max(0.0, until - time.monotonic())


def named(error: ProrlError, backend_id: str) -> ProrlError:
    """Give an error that names the backend where it came up."""
    error.fields["backend"] = backend_id
    error.message = f"backend {backend_id}: {error.message}"
    error.args = (error.message,)
    return error
