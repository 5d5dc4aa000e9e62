"""`prorl top`: the state of a service in the terminal, live."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .options import Config, Connect, Keys, Service, broker_clients

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..client.asynchronous.client import AsyncRolloutClient


def top(connect: Connect = None, config: Config = None, keys: Keys = None, service: Service = None) -> None:
    """Watch a service: stages, backends, batches, nodes, and its jobs as they come and end.

    1 to 5 choose what is shown: the overview, jobs, backends, nodes, batches. Among jobs, f chooses which (all, under
    way, ended, not completed), / searches in all of their columns, and Escape ends that. q quits. A broker that does
    not answer is named, and asked again. With keys, it takes one of role operator.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("prorl top needs a terminal; `prorl status` prints the same once, also into a pipe")
    asyncio.run(_run(broker_clients(connect, config, keys, service)))


async def _run(clients: Mapping[str, AsyncRolloutClient]) -> None:
    from ..watching.watcher import Watcher
    from .top_app import Top

    try:
        await Top(Watcher(clients)).run_async()
    finally:
        await asyncio.gather(*(client.close() for client in clients.values()))
