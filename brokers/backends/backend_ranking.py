"""Ranking of backends for jobs without one: by tier, load, and time of the last change; the job's node first. Pure.

Backends with room come before full ones; `max_in_flight` is a soft limit, for which no job waits. For a closed backend
they wait: its host takes no more rollouts. A backend on the job's node is preferred if it has room and, without its
newest assignment, its load is at most that of the least loaded backend. Locality thus costs an imbalance of at most two
assignments. A change and a look-up cost O(log n).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..least_loaded import LeastLoaded

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...wire.messages.backends import Backend

ROOM, FULL, CLOSED = range(3)
"""The tiers: backends of a lower tier get jobs first, and closed ones only rollouts that have begun."""


class BackendRanking:
    def __init__(self) -> None:
        self._all: LeastLoaded[str] = LeastLoaded()
        self._on_node: dict[str, LeastLoaded[str]] = {}
        """The backends with room, by node."""
        self._with_room: dict[str, tuple[Backend, int]] = {}
        """The backends with room, and their assignments in flight."""

    def place(self, backend: Backend, in_flight: int, *, closed: bool = False) -> None:
        """Add a backend, or update its load, which ranks it after backends of equal load."""
        backend_id = backend.backend_id
        tier = CLOSED if closed else FULL if in_flight >= backend.max_in_flight else ROOM
        load = in_flight / backend.weight
        self._all.set(backend_id, load, tier)
        before = self._with_room.get(backend_id)
        if before is not None and (tier or before[0].node != backend.node):
            self._leave_node(backend_id)
        if tier == ROOM:
            self._with_room[backend_id] = (backend, in_flight)
            near = self._on_node.get(backend.node)
            if near is None:
                near = self._on_node[backend.node] = LeastLoaded()
            near.set(backend_id, load)

    def discard(self, backend_id: str) -> None:
        self._all.discard(backend_id)
        if backend_id in self._with_room:
            self._leave_node(backend_id)

    def first(self, node: str, lacks: Callable[[str], bool] | None = None, *, begun: bool = False) -> str | None:
        """Return the first backend for a job on a node that has what the job needs, or None.

        None also if all of them are closed and the job's rollout has not begun. Each backend that `lacks` excludes at
        the head costs a search of all.
        """
        least = self._least(lacks)
        near = self._on_node.get(node)
        nearest = near.first() if near is not None else None
        if lacks is not None and near is not None and nearest is not None and lacks(nearest):
            nearest = near.first_but(lacks)
        if least is not None and not begun and self._all.tier(least) == CLOSED:
            return None
        if least is None or nearest is None or nearest == least:
            return least
        backend, in_flight = self._with_room[nearest]
        return nearest if (in_flight - 1) / backend.weight <= self._all.load(least) else least

    def is_closed(self, lacks: Callable[[str], bool] | None = None) -> bool:
        """Return whether there are backends, and all are closed; `lacks` as in `first`."""
        least = self._least(lacks)
        return least is not None and self._all.tier(least) == CLOSED

    def _least(self, lacks: Callable[[str], bool] | None) -> str | None:
        least = self._all.first()
        return self._all.first_but(lacks) if lacks is not None and least is not None and lacks(least) else least

    def _leave_node(self, backend_id: str) -> None:
        backend, _ = self._with_room.pop(backend_id)
        near = self._on_node[backend.node]
        near.discard(backend_id)
        if not len(near):
            del self._on_node[backend.node]
