"""`GroupMemory`: the backends that have seen each group's prompt, and so may have it cached. Pure.

A group is remembered after its last assignment, since rollouts of one prompt may run one after the other.
"""

from __future__ import annotations

from collections import OrderedDict

GROUP_LIMIT = 10_000
"""Most groups remembered; the least recently used one is evicted."""
SPREAD_LIMIT = 16
"""Most backends remembered per group, so a search for room does not depend on the group's size."""


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
