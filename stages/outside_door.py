"""The HTTP server of a stage process for programs outside, opened with the first rollout that one of them leads.

It is imported only then: importing an HTTP server takes half as long as starting a process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .harness.rollout_door import RolloutDoor

LOOPBACK = "127.0.0.1"


class OutsideDoor:
    """Makes the `RolloutDoor` of a process when it is first asked for.

    Args:
        changed: called when a rollout has got an address.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self.host = LOOPBACK
        """Where it will listen."""
        self._changed = changed
        self._door: RolloutDoor | None = None

    @property
    def addresses(self) -> Mapping[str, str]:
        """Of the open rollouts, by job."""
        return self._door.addresses if self._door is not None else {}

    def __call__(self) -> RolloutDoor:
        if self._door is None:
            from .harness.rollout_door import RolloutDoor

            self._door = RolloutDoor(self.host, self._changed)
        return self._door

    async def close(self) -> None:
        if self._door is not None:
            await self._door.close()


def host_beside(endpoint: str, *, insecure: bool) -> str:
    """Return the host to listen at: loopback, or that of a socket of ours where plaintext may go beyond it."""
    host = urlsplit(endpoint).hostname if endpoint.startswith("tcp://") else None
    return host if host is not None and insecure else LOOPBACK
