"""Which backends have seen the prompt of which group, and so may have it in their caches. Pure.

Rollouts of one prompt may also come one after the other, so a group outlives its last assignment: what bounds the
memory is the number of groups, not of live ones.
"""

from __future__ import annotations

from collections import OrderedDict

GROUP_LIMIT = 10_000
"""Groups that are remembered; beyond it, the one that was used longest ago is forgotten."""
SPREAD_LIMIT = 16
"""Backends that are remembered of one group: looking for room among them must not depend on the group's size."""


class GroupMemory:
    def __init__(self) -> None:
        self._groups: OrderedDict[str, list[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    def backends(self, group_id: str) -> tuple[str, ...]:
        return tuple(self._groups.get(group_id, ()))

    def add(self, group_id: str, backend_id: str) -> None:
        backends = self._groups.setdefault(group_id, [])
        self._groups.move_to_end(group_id)
        if backend_id not in backends and len(backends) < SPREAD_LIMIT:
            backends.append(backend_id)
        if len(self._groups) > GROUP_LIMIT:
            self._groups.popitem(last=False)

    def forget(self, group_id: str, backend_id: str) -> None:
        self._groups[group_id].remove(backend_id)
