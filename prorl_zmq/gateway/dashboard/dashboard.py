"""`Dashboard`: the page's part of a gateway. It owns the watcher and its connections to all brokers of the service.

Nothing is asked of a broker until somebody looks. The connections have the gateway's own key: where brokers ask for
one, it has to be an operator's (in a service's folder, `keys/operator` is).
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ...client.asynchronous.client import AsyncRolloutClient
from ...service.rollout_brokers import clients_of
from ...watching.watcher import Watcher
from .dashboard_api import DashboardApi
from .job_views import JobViews
from .run_list import RunList
from .watch_stream import WatchStreams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ..loaded_texts import LoadedTexts
    from ..settings import GatewayOptions


class Dashboard:
    def __init__(self, options: GatewayOptions, texts: LoadedTexts) -> None:
        self._clients = _clients(options)
        self._watcher = Watcher(self._clients)
        self.streams = WatchStreams(self._watcher)
        self.endpoints = DashboardApi(
            self._clients, self._watcher, JobViews(texts), RunList(options.runs), read_only=options.read_only
        ).endpoints

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self.streams.end()
            for client in self._clients.values():
                await client.close()


def _clients(options: GatewayOptions) -> dict[str, AsyncRolloutClient]:
    if options.metrics_only:
        return {}
    if options.service is not None:
        return clients_of(options.service.path, options.timeout_s, options.service.keys("operator"))
    keys = options.keys if options.keyring() is not None else None
    return {"rollout broker": AsyncRolloutClient(options.front_door, timeout_s=options.timeout_s, keys=keys)}
