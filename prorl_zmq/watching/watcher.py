"""`Watcher`: keeps the state of all brokers of a service up to date, for any number of viewers.

Once a second it asks each rollout broker for its status, its nodes and the jobs that have changed, and the backend
broker for its backends, so the brokers' load does not depend on the number of viewers. A broker that does not answer is
asked again; the others' part continues, and viewers see the problem. A slow viewer gets all changes since its last
update as one. Without viewers nothing is asked.

It runs on the caller's event loop. The caller closes the clients.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ..errors import ProrlError, UnknownBatch
from ..service.node_rows import losses, node_rows
from ..service.rollout_brokers import summed
from ..wire.messages.backends import ListBackends
from ..wire.messages.base import new_id
from ..wire.messages.watching import ROWS_LIMIT
from .job_mirror import JobMirror
from .overview import EndedSums, Overview, Update

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping

    from ..client.asynchronous.client import AsyncRolloutClient
    from ..wire.messages.backends import BackendList
    from ..wire.messages.front_door import ServiceStatus
    from ..wire.messages.nodes import NodeList
    from ..wire.messages.watching import BatchView, JobRow
    from .job_mirror import Answered

INTERVAL_S = 1.0
ANSWER_S = 3.0
"""A broker that takes longer counts as away."""
JOBS_LIMIT = 50_000
"""Jobs that are known at one time."""
FORGOTTEN_LIMIT = 10_000
"""A viewer that must forget more rows is sent all rows again."""
BACKEND_BROKER = "backend broker"


class Watcher:
    """Asks all rollout brokers and the backend broker of a service, while there are viewers.

    Args:
        clients: of its rollout brokers, by name, at least one; closing them is the caller's.
        interval_s: how often brokers are asked; a viewer gets no more updates.
    """

    def __init__(self, clients: Mapping[str, AsyncRolloutClient], interval_s: float = INTERVAL_S) -> None:
        self._clients = clients
        self._interval_s = interval_s
        self._mirrors = {name: JobMirror(JOBS_LIMIT // len(clients)) for name in clients}
        self._statuses: dict[str, ServiceStatus] = {}
        self._nodes: dict[str, NodeList] = {}
        self._backends: BackendList | None = None
        self._problems: dict[str, str] = {}
        self._ended = EndedSums()
        self._told: Overview | None = None
        """The overview for all viewers until there is news: making one of a large service takes milliseconds."""
        self._views: set[_View] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def batch(self, batch_id: str) -> BatchView:
        """Return the details of an open batch, from the rollout broker that has it.

        Raises:
            UnknownBatch: no broker that answers has such an open batch.
        """
        for name, status in self._statuses.items():
            if any(batch.batch_id == batch_id for batch in status.batches):
                return await self._clients[name].views.batch(batch_id, timeout_s=ANSWER_S)
        raise UnknownBatch(f"no batch {batch_id} is open", batch_id=batch_id)

    @asynccontextmanager
    async def viewer(self) -> AsyncIterator[AsyncIterator[Update]]:
        """Look: `async with watcher.viewer() as updates: async for update in updates`; the first one has all rows."""
        view = _View()
        self._views.add(view)
        if len(self._views) == 1:
            self._start()
        updates = self._updates(view)
        try:
            yield updates
        finally:
            await updates.aclose()
            self._views.discard(view)
            if not self._views:
                await self._stop()

    async def _updates(self, view: _View) -> AsyncGenerator[Update, None]:
        while True:
            await view.news.wait()
            for task in self._tasks:
                if task.done():
                    task.result()  # a fault of ours: its viewers have to know
            view.news.clear()
            self._told = self._told or self._overview()
            yield view.take(self._told, self._mirrors.values())
            await asyncio.sleep(self._interval_s)

    def _overview(self) -> Overview:
        at = time.time()
        return Overview(
            at=at,
            status=summed(self._statuses.values()) if self._statuses else None,
            brokers=dict(self._statuses),
            backends=self._backends,
            nodes=tuple(node_rows(self._nodes)),
            lost_nodes=tuple(losses(self._nodes.values())),
            ended_per_s=self._ended.per_s(at, max((one.uptime_s for one in self._statuses.values()), default=0.0)),
            ended=self._ended.ended(at),
            problems=dict(self._problems),
        )

    # Asking -----------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        asking = dict.fromkeys(self._clients, self._ask_broker) | {BACKEND_BROKER: self._ask_backend_broker}
        self._tasks = [asyncio.create_task(self._follow(name, ask)) for name, ask in asking.items()]
        for task in self._tasks:
            task.add_done_callback(lambda _: self._tell())

    async def _stop(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, name: str, ask: Callable[[str], Awaitable[None]]) -> None:
        while True:
            next_at = time.monotonic() + self._interval_s
            try:
                await ask(name)
            except ProrlError as error:
                self._problems[name] = error.message
                self._forget(name)
            else:
                self._problems.pop(name, None)
            # One call per interval: a viewer that was called just before the rows are here would see them an interval
            # later.
            if name != BACKEND_BROKER or not self._statuses:
                self._tell()
            await asyncio.sleep(max(0.0, next_at - time.monotonic()))

    async def _ask_broker(self, name: str) -> None:
        client, mirror = self._clients[name], self._mirrors[name]
        status = await client.status(timeout_s=ANSWER_S)
        self._nodes[name] = await client.nodes(timeout_s=ANSWER_S)
        self._statuses[name] = status
        for question in (mirror.news, mirror.gap):
            if (asked := question()) is not None:
                answer = await client.views.changes(*asked, ROWS_LIMIT, counts_ended=True, timeout_s=ANSWER_S)
                self._ended.take(name, answer.broker_id, answer.ended, time.time())
                answered = mirror.take(asked, answer)
                for view in self._views:
                    view.note(answered)

    async def _ask_backend_broker(self, _name: str) -> None:
        """Ask by the client of a rollout broker that answers, for it says where the backend broker is."""
        name = next(iter(self._statuses or self._clients))
        self._backends = await self._clients[name].backends.ask(ListBackends(new_id()), ANSWER_S)

    def _forget(self, name: str) -> None:
        """Drop the state of a broker that does not answer; its jobs stay."""
        if name == BACKEND_BROKER:
            self._backends = None
        self._statuses.pop(name, None)
        self._nodes.pop(name, None)

    def _tell(self) -> None:
        self._told = None
        for view in self._views:
            view.news.set()


class _View:
    """The changes that one viewer has not seen."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self._changed: dict[str, JobRow] = {}
        self._forgotten: set[str] = set()
        self._reset = True

    def note(self, answered: Answered) -> None:
        if self._reset:
            return
        self._changed.update((row.job_id, row) for row in answered.changed)
        for job_id in answered.forgotten:
            self._changed.pop(job_id, None)
            self._forgotten.add(job_id)
        if answered.reset or len(self._forgotten) > FORGOTTEN_LIMIT:
            self._reset = True

    def take(self, overview: Overview, mirrors: Iterable[JobMirror]) -> Update:
        rows = (row for mirror in mirrors for row in mirror.rows.values()) if self._reset else self._changed.values()
        update = Update(overview, tuple(rows), self._reset, tuple(self._forgotten) if not self._reset else ())
        self._changed, self._forgotten, self._reset = {}, set(), False
        return update
