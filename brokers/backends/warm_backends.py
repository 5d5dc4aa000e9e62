"""`WarmBackends`: the backend that may have a job's prefix in its cache, if it can take the job. Pure.

First come backends whose hosts keep an index of the engine's cache and report the job's own prompt as resident, or,
with affinity `group`, that of a job of its group; of several, the least loaded. Then, with affinity `group`, those that
the group has used, the earliest first. Hosts without an index report nothing, and only the second rule applies.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from ...wire.messages.base import holder
from .group_memory import GroupMemory

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ...wire.messages.backends import Assign
    from .backend_member import Member

JOB_LIMIT = 10_000
"""Most jobs whose groups are remembered; the one that was assigned first is forgotten."""


class _Resident(NamedTuple):
    jobs: frozenset[str]
    groups: frozenset[str]


class WarmBackends:
    """Knows where prefixes are.

    Args:
        members: all backends.
        by_group: whether the affinity is `group`.
    """

    def __init__(self, members: Mapping[str, Member], *, by_group: bool) -> None:
        self._members = members
        self._by_group = by_group
        self._groups = GroupMemory()
        self._resident: dict[str, _Resident] = {}
        """Of the backends whose hosts keep an index."""
        self._group_of: OrderedDict[str, str] = OrderedDict()
        """The groups of jobs, while there is such a host."""

    def note_assigned(self, request: Assign, backend_id: str) -> None:
        if self._by_group and request.group_id:
            group_id = holder(request.group_id, request.model)
            self._groups.add(group_id, backend_id)
            if self._resident:
                self._group_of[request.holder] = group_id
                if len(self._group_of) > JOB_LIMIT:
                    self._group_of.popitem(last=False)

    def note_resident(self, backend_id: str, jobs: Collection[str]) -> None:
        """Record the jobs whose prompts a backend's cache has; all others are not there."""
        name = self._members[backend_id].backend.name
        holders = [holder(job_id, name) for job_id in jobs] if self._group_of else []
        groups = frozenset(self._group_of[one] for one in holders if one in self._group_of)
        self._resident[backend_id] = _Resident(frozenset(jobs), groups)

    def forget_resident(self, backend_id: str) -> None:
        self._resident.pop(backend_id, None)

    def find(self, request: Assign) -> str | None:
        group_id = holder(request.group_id, request.model) if self._by_group and request.group_id else ""
        holding = [
            member
            for backend_id, (jobs, groups) in self._resident.items()
            if request.job_id in jobs or group_id in groups
            if (member := self._members[backend_id]).backend.name == request.model and backend_id != request.leaving
            if member.state == "ready" and member.has_room
        ]
        if holding:
            return min(holding, key=lambda one: len(one.jobs) / one.backend.weight).backend.backend_id
        for backend_id in self._groups.backends(group_id) if group_id else ():
            known = self._members.get(backend_id)
            if known is not None and request.model not in known.models:
                known = None
            if known is not None and known.state == "updating":
                continue  # the update ends soon
            if known is None or known.state != "ready" or backend_id == request.leaving:
                self._groups.forget(group_id, backend_id)
            elif known.has_room:
                return backend_id
        return None
