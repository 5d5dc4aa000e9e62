"""`AsyncServiceConnection`: an asyncio client's connections to the brokers of one service."""

from __future__ import annotations

import time
import warnings
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from ...errors import Closed, RequestTimeout
from ...wire.messages.base import new_id
from ...wire.messages.front_door import Hello, RelayBlocks
from ...wire.sockets import check_endpoint
from ..block_fetcher import BlockFetcher
from ..delivery import Delivery
from ..requests import read_reply
from .transport import AsyncRequestConnection, in_thread, sleep

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...security.keyring import Keyring
    from ...service.service_folder import ServiceFolder
    from ...wire.messages.batches import NextGroup
    from ...wire.messages.front_door import Collect, Welcome
    from ..requests import Received

FIND_S = 0.2
"""Interval in seconds at which to look for a broker that has not been announced."""


class AsyncServiceConnection:
    """A client's connections to one service: to its front door, and to the backend broker that the front door names.

    Each is opened by the first request. `timeout_s` is the default limit of calls. With a service's `folder`, the
    folder says where the session's broker and the backend broker are, also after a move.
    """

    def __init__(
        self,
        endpoint: str | None,
        keyring: Keyring | None,
        timeout_s: float,
        folder: ServiceFolder | None = None,
        session: str = "",
    ) -> None:
        self.find = None if folder is None else partial(folder.front_door, session)
        """Returns the front door's current endpoint; None: it does not move."""
        self._folder = folder
        self._session = session
        self.endpoint = check_endpoint(endpoint) if endpoint is not None else ""
        self.keyring = keyring
        self.timeout_s = timeout_s
        self.welcome: Welcome | None = None
        """The front door's answer to the first `Hello`."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connections: dict[str, AsyncRequestConnection] = {}
        # Keeps the sockets alive: collected after their context, they would block forever.
        self._fetcher = BlockFetcher(keyring)
        self._dropped = weakref.finalize(self, _drop, self.endpoint, self._context, self._connections, self._fetcher)
        self._dropped.atexit = False

    @property
    def closed(self) -> bool:
        return bool(self._context.closed)

    def until(self, timeout_s: float | None = None) -> float:
        """Return the deadline of a call that begins now."""
        return time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)

    async def hello(self, until: float) -> Welcome:
        """Request, once, the backend broker's endpoint and the size limit of jobs from the front door."""
        if self.welcome is None:
            await self._find_first(until)
            request = Hello(new_id(), session=self._session)
            self.welcome = read_reply(await self._front_door().ask_frames(request, until, warns=True))
        return self.welcome

    async def ask(self, request: Any, until: float, payload: Sequence[bytes] = (), held_s: float = 0.0) -> Any:
        """Send a request to the front door and return the reply; see `AsyncRequestConnection.ask_frames`."""
        return read_reply(await self.ask_frames(request, until, payload, held_s))

    async def ask_frames(
        self, request: Any, until: float, payload: Sequence[bytes] = (), held_s: float = 0.0, *, warns: bool = False
    ) -> Sequence[Received]:
        """Send a request to the front door; see `AsyncRequestConnection.ask_frames`."""
        await self.hello(until)
        return await self._front_door().ask_frames(request, until, payload, held_s, warns=warns)

    async def ask_results(self, request: Collect | NextGroup, until: float) -> Delivery:
        """Send a request for results, which the front door may hold for its `wait_s`; return them with their blocks.

        A late reply is logged. Blocks that nodes keep are fetched. Results whose blocks cannot be fetched are omitted,
        and delivered again after the broker has fetched their blocks.
        """
        frames = await self.ask_frames(request, until + request.wait_s, held_s=request.wait_s, warns=True)
        delivery = Delivery(request, frames)
        if handles := delivery.handles:
            lacking = delivery.fill(await in_thread(self._fetcher.fetch, handles))
            if lacking:
                await self.ask(RelayBlocks(new_id(), request.session, tuple(lacking)), until + request.wait_s)
        return delivery

    async def ask_backend_broker(self, request: Any, until: float) -> Any:
        """Send a request to the backend broker and return the reply; see `AsyncRequestConnection.ask_frames`."""
        endpoint, _, find = await self.backend_broker_place(until)
        return read_reply(await self._connection(endpoint, find).ask_frames(request, until))

    async def backend_broker_place(self, until: float) -> tuple[str, Keyring | None, Callable[[], str] | None]:
        """Return the backend broker's endpoint, the client's keys, and what finds it again (None: it is fixed)."""
        find = None if self._folder is None else self._folder.backend_broker
        return (await self.hello(until)).backend_broker, self.keyring, find

    def close(self) -> None:
        self._dropped.detach()
        _close(self._context, self._connections, self._fetcher)

    def _front_door(self) -> AsyncRequestConnection:
        return self._connection(self.endpoint, self.find)

    def _connection(self, endpoint: str, find: Callable[[], str] | None) -> AsyncRequestConnection:
        if self.closed:
            raise Closed("the client was closed")
        if endpoint not in self._connections:
            self._connections[endpoint] = AsyncRequestConnection(self._context, endpoint, self.keyring, find)
        return self._connections[endpoint]

    async def _find_first(self, until: float) -> None:
        """Wait until the session's broker is announced for the first time."""
        folder, started = self._folder, time.monotonic()
        while not self.endpoint and folder is not None:
            if place := folder.front_door(self._session):
                self.endpoint = check_endpoint(place)
            elif time.monotonic() >= until:
                waited = time.monotonic() - started
                name = folder.broker_of(self._session)
                raise RequestTimeout(folder.not_announced(name, waited), timeout_s=waited)
            else:
                await sleep(FIND_S)


def _close(
    context: zmq.Context[zmq.Socket[bytes]], connections: dict[str, AsyncRequestConnection], fetcher: BlockFetcher
) -> None:
    fetcher.close()
    for connection in connections.values():
        connection.close()
    context.destroy(linger=0)


def _drop(
    endpoint: str,
    context: zmq.Context[zmq.Socket[bytes]],
    connections: dict[str, AsyncRequestConnection],
    fetcher: BlockFetcher,
) -> None:
    """Close the sockets of a client that was collected without `close`."""
    _close(context, connections, fetcher)
    warnings.warn(f"a client of {endpoint} was not closed: use `with`, or call `close`", ResourceWarning, stacklevel=2)
