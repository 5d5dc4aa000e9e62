"""`Watcher`: keeps what all brokers of a service say up to date, for any number of viewers, while there are any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from ..client.asynchronous.client import AsyncRolloutClient
    from .overview import Update

INTERVAL_S = 1.0


class Watcher:
    """Asks all rollout brokers and the backend broker of a service, while somebody looks.

    Args:
        clients: of its rollout brokers, by name; closing them is the caller's.
        interval_s: how often brokers are asked, and a viewer gets an update at the most.
    """

    def __init__(self, clients: Mapping[str, AsyncRolloutClient], interval_s: float = INTERVAL_S) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        raise NotImplementedError

    async def __aexit__(self, *_: object) -> None:
        raise NotImplementedError

    def broker_of(self, job_id: str) -> str:
        """Return the name of the rollout broker that told of a job last; empty: none did."""
        raise NotImplementedError

    def viewer(self) -> AbstractAsyncContextManager[AsyncIterator[Update]]:
        """Look: `async with watcher.viewer() as updates: async for update in updates`; the first one has all rows."""
        raise NotImplementedError


def clients_of(folder: Path, timeout_s: float, keys: Path | None = None) -> dict[str, AsyncRolloutClient]:
    """Return a client for each rollout broker of a service's folder, by name."""
    raise NotImplementedError
