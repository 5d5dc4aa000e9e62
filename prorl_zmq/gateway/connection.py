"""`GatewayConnection`: sends each HTTP request to the brokers as one message, with the rights of its sender.

A sender's session belongs to one rollout broker; requests about the whole service, and an operator's about jobs, go to
all brokers. The gateway stores no state of a session, so any gateway can answer for another, and a killed
one loses its open requests, and Tinker's kept replies.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..client.asynchronous.connection import AsyncServiceConnection
from ..client.requests import POLL_S, check_job_ids
from ..errors import NotAllowed, UnknownJob
from ..security.rights import ANYBODY
from ..service.rollout_brokers import ask_all, trace_in
from ..wire.messages.base import KeyRole, new_id
from ..wire.messages.front_door import Collected, Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..client.delivery import Delivery
    from ..security.keyring import Keyring
    from ..security.rights import Sender
    from ..service.rollout_brokers import Answers
    from ..wire.messages.batches import GroupGiven, NextGroup
    from ..wire.messages.front_door import Collect, JobTrace, Welcome
    from .settings import GatewayOptions

LOOK_S = 3.0
"""How long an answer of several rollout brokers waits for each."""


class GatewayConnection:
    """Each call raises what the broker refuses, or `RequestTimeout`."""

    def __init__(self, options: GatewayOptions, keyring: Keyring | None) -> None:
        door, folder, timeout_s = options.front_door, options.service, options.timeout_s
        self._broker_of: Callable[[str], str]
        """Returns the rollout broker to which a session belongs."""
        self._brokers: Mapping[str, AsyncServiceConnection]
        if folder is None:
            self._broker_of = lambda _session: door
            self._brokers = {door: AsyncServiceConnection(door, keyring, timeout_s)}
        else:
            self._broker_of = folder.broker_of
            self._brokers = {
                name: AsyncServiceConnection(None, keyring, timeout_s, folder, folder.session_of(name))
                for name in folder.rollout_brokers
            }
        self._look_s = timeout_s if len(self._brokers) == 1 else min(timeout_s, LOOK_S)

    async def ask(self, sender: Sender, request: Any, payload: Sequence[bytes] = ()) -> Any:
        """Ask the rollout broker of the sender's session, and return its reply."""
        sender.check(request)
        broker = self._own(sender)
        return await broker.ask(request, broker.until(), payload)

    async def ask_results(self, sender: Sender, request: Collect | NextGroup) -> Delivery:
        """Ask the session's broker for results, which it may hold back for `wait_s`.

        The wait is split into several requests, since a broker that dies or moves loses the requests that it holds.
        """
        until = time.monotonic() + request.wait_s
        while True:
            wait_s = max(0.0, min(POLL_S, until - time.monotonic()))
            asked_until = time.monotonic() + wait_s
            part = replace(request, request_id=new_id(), wait_s=wait_s)
            sender.check(part)
            broker = self._own(sender)
            delivery = await broker.ask_results(part, broker.until())
            if _has_something(delivery.reply) or not asked_until <= time.monotonic() < until:
                return delivery

    async def ask_all(self, sender: Sender, request: Any) -> Answers[Any]:
        sender.check(request)
        return await ask_all(self._brokers, lambda broker: broker.ask(request, broker.until(self._look_s)))

    async def ask_of_job(self, sender: Sender, request: Any) -> Answers[Any]:
        """Ask the rollout brokers that may have a job of the sender's: for an operator, all of them."""
        if not job_owner(sender):
            return await self.ask_all(sender, request)
        sender.check(request)
        name = self._broker_of(session_of(sender))
        return await ask_all({name: self._own(sender)}, lambda broker: broker.ask(request, broker.until()))

    async def trace(self, sender: Sender, job_id: str) -> JobTrace:
        """Return the trace of a job of the sender's; for an operator, of any job."""
        check_job_ids((job_id,))
        request = Trace(new_id(), job_id, job_owner(sender))
        return trace_in(await self.ask_of_job(sender, request), job_id)

    async def address_of(self, job_id: str, wait_s: float) -> JobTrace:
        """Return the trace of any rollout, once it has an address or has ended, or after `wait_s`.

        Raises:
            UnknownJob: no job has this id. The message has no other id, since callers may have no token.
        """
        request = Trace(new_id(), job_id, wait_s=wait_s)
        limit_s = self._look_s + wait_s
        answers = await ask_all(self._brokers, lambda broker: broker.ask(request, broker.until(limit_s), held_s=wait_s))
        try:
            return trace_in(answers, job_id)
        except UnknownJob:
            raise UnknownJob(f"no rollout {job_id}", job_id=job_id, matches=0) from None

    async def ask_backend_broker(self, sender: Sender, request: Any) -> Any:
        sender.check(request)
        welcomed = (broker for broker in self._brokers.values() if broker.welcome is not None)
        broker = next(welcomed, self._own(sender))  # any of them names it, even while ours is down
        return await broker.ask_backend_broker(request, broker.until())

    async def hello(self, sender: Sender = ANYBODY, timeout_s: float | None = None) -> Welcome:
        broker = self._own(sender)
        return await broker.hello(broker.until(timeout_s))

    def close(self) -> None:
        for broker in self._brokers.values():
            broker.close()

    def _own(self, sender: Sender) -> AsyncServiceConnection:
        return self._brokers[self._broker_of(session_of(sender))]


def _has_something(reply: Collected | GroupGiven) -> bool:
    return bool(reply.results if isinstance(reply, Collected) else reply.group_id or reply.ended)


def session_of(sender: Sender) -> str:
    """Return the session of a bearer token, named after it; without tokens all share one."""
    return f"http-{sender.name}" if sender.name else "http"


def job_owner(sender: Sender) -> str:
    """Return the session whose jobs a sender may see and cancel; empty: all sessions, for an operator."""
    return "" if sender.role == KeyRole.OPERATOR else session_of(sender)


def check_may(sender: Sender, *roles: KeyRole) -> None:
    """Raise `NotAllowed` unless a sender has one of these roles, or there are no keys."""
    if sender.role is not None and sender.role not in roles:
        raise NotAllowed(f"the {sender.role} token {sender.name} may not do this; it is for {' or '.join(roles)}")
