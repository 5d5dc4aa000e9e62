"""A gateway's connection to the service: each request is one message, made and checked in the name of who sent it.

The gateway has no state of a session: what it is asked by HTTP it asks the brokers, and their answer is its own. So any
gateway can answer for any other, and one that was killed loses only the requests that it held open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..client.requests import read_reply
from ..errors import NotAllowed
from ..wire.messages.base import KeyRole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..client.asynchronous.connection import AsyncServiceConnection
    from ..client.requests import Received
    from ..security.rights import Sender


class GatewayConnection:
    """Asks the brokers what a sender may ask; each call raises what they refuse, or `RequestTimeout`."""

    def __init__(self, service: AsyncServiceConnection) -> None:
        self._service = service

    async def ask(self, sender: Sender, request: Any, payload: Sequence[bytes] = ()) -> Any:
        """Ask the front door, and return its reply."""
        return read_reply(await self.ask_frames(sender, request, payload))

    async def ask_frames(
        self, sender: Sender, request: Any, payload: Sequence[bytes] = (), held_s: float = 0.0
    ) -> Sequence[Received]:
        """Ask the front door, which may hold the reply for `held_s`, and return the reply's frames."""
        sender.check(request)
        return await self._service.ask_frames(request, self._service.until() + held_s, payload, held_s)

    async def ask_backend_broker(self, sender: Sender, request: Any) -> Any:
        sender.check(request)
        return await self._service.ask_backend_broker(request, self._service.until())

    async def job_limit_bytes(self) -> int:
        return (await self._service.hello(self._service.until())).job_limit_bytes


def session_of(sender: Sender) -> str:
    """Return the session of a bearer token, which has its name; without tokens there is one for all."""
    return f"http-{sender.name}" if sender.name else "http"


def job_owner(sender: Sender) -> str:
    """Return the session whose jobs a sender may look at and cancel; empty: an operator's are all."""
    return "" if sender.role == KeyRole.OPERATOR else session_of(sender)


def check_may(sender: Sender, *roles: KeyRole) -> None:
    """Raise `NotAllowed` unless a sender has one of these roles, or there are no keys."""
    if sender.role is not None and sender.role not in roles:
        raise NotAllowed(f"the {sender.role} token {sender.name} may not do this; it is for {' or '.join(roles)}")
