"""`EngineCalls`: the unanswered calls of weight requests to engine hosts. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .weight_calls import EngineCall, address_of

if TYPE_CHECKING:
    from ...wire.messages.backends import Backend
    from .weight_calls import EngineAddress, UnderWay


class EngineCalls:
    def __init__(self) -> None:
        self._open: dict[str, tuple[EngineCall, UnderWay]] = {}
        """By request id."""
        self._unsent: list[EngineCall] = []

    def add(self, call: EngineCall, under_way: UnderWay, backend_id: str) -> None:
        """Send a call to a backend's host."""
        under_way.missing[call.request.request_id] = backend_id
        self._open[call.request.request_id] = (call, under_way)
        self._unsent.append(call)

    def pop(self, request_id: str) -> tuple[EngineCall, UnderWay, str] | None:
        """End a call; return it, its request, and the backend. None: it has ended before."""
        if request_id not in self._open:
            return None
        call, under_way = self._open.pop(request_id)
        return call, under_way, under_way.missing.pop(request_id)

    def drop(self, under_way: UnderWay) -> None:
        """End all calls of a request, without an outcome."""
        for request_id in tuple(under_way.missing):
            self.pop(request_id)

    def at(self, address: EngineAddress) -> list[str]:
        """Return the ids of the calls to an address."""
        return [key for key, (call, _) in self._open.items() if call.address == address]

    def resend(self, address: EngineAddress) -> None:
        """Send the calls to an address again."""
        self._unsent += [self._open[key][0] for key in self.at(address)]

    def redirect(self, backend: Backend) -> None:
        """Send a backend's calls to its new address if it has one."""
        address = address_of(backend)
        for request_id, (call, under_way) in self._open.items():
            if under_way.missing[request_id] == backend.backend_id and call.address != address:
                moved = EngineCall(address, call.request)
                self._open[request_id] = (moved, under_way)
                self._unsent.append(moved)

    def take(self) -> list[EngineCall]:
        """Return what is to be sent."""
        calls, self._unsent = self._unsent, []
        return calls

    def addresses(self) -> set[EngineAddress]:
        return {call.address for call, _ in self._open.values()}
