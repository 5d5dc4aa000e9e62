"""A backend broker's request handler, without sockets, for tests of requests about weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prorl_zmq.brokers.backends.request_handler import BackendRequestHandler
from prorl_zmq.wire.messages.backends import AddBackend, Backend, BackendList, ListBackends
from prorl_zmq.wire.messages.base import Refused
from prorl_zmq.wire.messages.engines import EngineReady, UpdateTimes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prorl_zmq.brokers.backends.weight_calls import EngineCall
    from prorl_zmq.errors import ProrlError


class Service:
    """A request handler with backends, and what it sent to clients and engine hosts."""

    def __init__(self, names: Iterable[str] = "xy") -> None:
        self.handler = BackendRequestHandler(lease_s=1e9)
        self.now = 0.0
        self.replies: list[tuple[bytes, Any]] = []
        for name in names:
            self.add(name)

    def add(self, name: str, key: str = "") -> None:
        self.ask(AddBackend("add", Backend(backend_id=name, endpoint=f"ipc://{name}", curve_key=key)))
        self.replies.clear()

    def ask(self, request: Any, client: bytes = b"client") -> None:
        self.tell(self.handler.handle([client, b""], request, self.now))

    def tell(self, answers: Any) -> None:
        self.replies += [(bytes(envelope[0]), reply) for envelope, reply in answers]

    def calls(self, *, fetches: bool = False) -> dict[str, EngineCall]:
        """What is sent to the engine hosts now, by the names of their backends.

        Unless it is about `fetches`, these are answered, and followed by what comes after them.
        """
        calls = self.handler.weights.take_calls()
        for call in calls if not fetches else ():
            if call.request.step == "fetch":
                self.answer(call)
        if not fetches:
            calls = [one for one in calls if one.request.step != "fetch"] + self.handler.weights.take_calls()
        return {call.address.endpoint.removeprefix("ipc://"): call for call in calls}

    def answer(self, call: EngineCall, error: ProrlError | None = None, times: UpdateTimes | None = None) -> None:
        ready = None if error is not None else EngineReady(call.request.request_id, 0, times=times)
        self.tell(self.handler.engine_answered(call.request.request_id, error, self.now, ready))

    def tick(self, now: float) -> None:
        self.now = now
        self.tell(self.handler.tick(now))

    def reply(self) -> Any:
        ((client, reply),) = self.replies
        assert client == b"client"
        self.replies.clear()
        return reply

    def refusal(self) -> tuple[str, str]:
        reply = self.reply()
        assert isinstance(reply, Refused)
        assert isinstance(reply.error.fields["backend"], str)
        assert reply.error.message.startswith(f"backend {reply.error.fields['backend']}: ")
        return reply.error.code, reply.error.fields["backend"]

    def states(self) -> dict[str, tuple[str, int]]:
        ((_, reply),) = self.handler.handle([b"look", b""], ListBackends("list"), self.now)
        assert isinstance(reply, BackendList)
        return {one.backend.backend_id: (one.state, one.backend.weight_version) for one in reply.backends}
