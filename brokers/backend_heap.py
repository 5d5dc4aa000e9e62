"""Which backend a job talks to: assignments that stick, on backends ranked by their load. Pure: no sockets, no clock.

- The load of a backend is its assignments in flight over its weight. (The ProRL Agent paper, arXiv 2603.18815, §3.3,
  keys its heap by assignments ever made, which cannot see long jobs; here a release lowers the load again.)
- A job keeps its backend for as long as it holds the assignment, so that its next turn finds the prefix cache warm. A
  newer attempt keeps it too, unless the backend takes no more jobs or is suspect.
- With affinity `group`, a job goes to the backend that its group has been on: of several the earliest that has room.
- Otherwise it goes to the best of the ranking (see `backend_ranking`): one with room on its node, one with room, the
  least loaded one.
- A job that could not reach its backend gets another one, and the same only where there is no other. The backend is
  suspect from then on, and gets jobs only where there is no other, until it is trusted again.
- A backend that drains, serves older weights than it should, or is unwell takes no jobs; those that hold it keep it.

Assignments belong to an owner (a stage process): when the owner is dropped, so are they.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from ..errors import DuplicateBackend, UnknownBackend
from ..messages import Backend, BackendStatus
from .backend_ranking import BackendRanking
from .group_memory import GroupMemory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..messages import Assign

Affinity = Literal["job", "group"]
"""What sticks to a backend."""


@dataclass(slots=True)
class _Member:
    backend: Backend
    draining: bool = False
    """It was asked to take no more jobs."""
    needed_version: int = 0
    """While its weights are older than these it takes no jobs; 0 once it has caught up."""
    suspect: bool = False
    """A job could not reach it, and it was not heard of since."""
    problem: str = ""
    """Why its engine cannot serve now, as its host says."""
    assigned: int = 0
    jobs: set[str] = field(default_factory=set)

    @property
    def state(self) -> Literal["ready", "draining", "suspect", "unwell"]:
        if self.draining or self.needed_version:
            return "draining"
        if self.problem:
            return "unwell"
        return "suspect" if self.suspect else "ready"

    @property
    def has_room(self) -> bool:
        return len(self.jobs) < self.backend.max_in_flight


@dataclass(slots=True)
class _Assignment:
    backend_id: str
    attempt: int
    owner: str
    request_id: str
    """The request that it answers; that one sent again changes nothing."""


class BackendHeap:
    """The backends and the assignments on them.

    Invariant: a backend's in-flight count is the number of jobs that hold an assignment on it.

    Args:
        affinity: `group` keeps the jobs of a group together while there is room; a job without a group is by itself.
    """

    def __init__(self, affinity: Affinity = "job") -> None:
        self._by_group = affinity == "group"
        self._members: dict[str, _Member] = {}
        self._ranking = BackendRanking()
        self._groups = GroupMemory()
        self._assignments: dict[str, _Assignment] = {}
        self._owned: dict[str, set[str]] = {}

    def add(self, backend: Backend, needed_version: int = 0) -> None:
        """Register a backend. Adding a known one again updates it, and makes a draining or suspect one ready.

        Args:
            backend: what to add.
            needed_version: if its weights are older than these it drains until they no longer are.

        Raises:
            DuplicateBackend: one at another endpoint has this id.
        """
        member = self._members.get(backend.backend_id)
        if member is not None and member.backend.endpoint != backend.endpoint:
            raise DuplicateBackend(
                f"backend {backend.backend_id} is registered at {member.backend.endpoint}; remove it first, or choose "
                "another id",
                backend=backend.backend_id,
            )
        if member is None:
            member = self._members[backend.backend_id] = _Member(backend)
        member.backend = backend
        member.draining = member.suspect = False
        member.problem = ""
        member.needed_version = needed_version if backend.weight_version < needed_version else 0
        self._rank(member)

    def drain(self, backend_id: str) -> None:
        """Assign no more jobs to a backend; those that hold it keep it.

        Raises:
            UnknownBackend: there is none of that id.
        """
        member = self._member(backend_id)
        member.draining = True
        self._rank(member)

    def is_drained(self, backend_id: str) -> bool:
        """Say whether a backend was asked to take no more jobs.

        Raises:
            UnknownBackend: there is none of that id.
        """
        return self._member(backend_id).draining

    def set_problem(self, backend_id: str, problem: str) -> None:
        """Note why a backend cannot serve, and so takes no jobs; empty: it can again.

        Raises:
            UnknownBackend: there is none of that id.
        """
        member = self._member(backend_id)
        if member.problem != problem:
            member.problem = problem
            self._rank(member)

    def trust(self, backend_id: str) -> None:
        """Take a backend for reachable again, if it was suspect.

        Raises:
            UnknownBackend: there is none of that id.
        """
        member = self._member(backend_id)
        if member.suspect:
            member.suspect = False
            self._rank(member)

    def remove(self, backend_id: str) -> None:
        """Forget a backend and the assignments on it; a job that held one gets another at its next `assign`.

        Raises:
            UnknownBackend: there is none of that id.
        """
        for job_id in tuple(self._member(backend_id).jobs):
            self._release(job_id)
        del self._members[backend_id]
        self._ranking.discard(backend_id)

    def clear(self) -> None:
        """Forget all backends."""
        for backend_id in tuple(self._members):
            self.remove(backend_id)

    def set_weight_version(self, weight_version: int, backend_id: str | None = None) -> None:
        """Note which weights a backend (None: each) serves from now on; one that has caught up takes jobs again.

        Raises:
            UnknownBackend: there is none of that id.
        """
        for member in [self._member(backend_id)] if backend_id is not None else self._members.values():
            member.backend = msgspec.structs.replace(member.backend, weight_version=weight_version)
            if member.needed_version and weight_version >= member.needed_version:
                member.needed_version = 0
                self._rank(member)

    def known_version(self, backend_id: str) -> int:
        """Give the weights that a backend last served, or should have caught up with.

        Raises:
            UnknownBackend: there is none of that id.
        """
        member = self._member(backend_id)
        return max(member.backend.weight_version, member.needed_version)

    def assign(self, request: Assign) -> Backend | None:
        """Give the job the backend that it holds, or one by the rules above; None if no backend takes jobs.

        An older attempt gets what the newer one holds and changes nothing; nor does a request that comes again.
        """
        job_id = request.job_id
        held = self._assignments.get(job_id)
        if held is not None and not _moves(request, held):
            return self._members[held.backend_id].backend
        if held is not None:
            self._release(job_id)
        backend_id = self._choose(request, held)
        if backend_id is None:
            return None
        member = self._members[backend_id]
        member.jobs.add(job_id)
        member.assigned += 1
        self._rank(member)
        self._assignments[job_id] = _Assignment(backend_id, request.attempt, request.owner, request.request_id)
        owned = self._owned.get(request.owner)
        if owned is None:
            owned = self._owned[request.owner] = set()
        owned.add(job_id)
        if self._by_group and request.group_id:
            self._groups.add(request.group_id, backend_id)
        return member.backend

    def release(self, job_id: str, attempt: int) -> bool:
        """End a job's assignment; false, and no change, if there is none or a newer attempt holds it."""
        held = self._assignments.get(job_id)
        if held is None or held.attempt > attempt:
            return False
        self._release(job_id)
        return True

    def keep_only(self, owner: str, jobs: dict[str, int]) -> None:
        """Release those of an owner's assignments that it does not name (job id to attempt)."""
        for job_id in tuple(self._owned.get(owner, ())):
            if jobs.get(job_id) != self._assignments[job_id].attempt:
                self._release(job_id)

    def drop_owner(self, owner: str) -> None:
        """Release all assignments of an owner that is gone."""
        self.keep_only(owner, {})

    def owners(self) -> Iterable[str]:
        """Give the owners that hold assignments."""
        return self._owned.keys()

    def status(self) -> tuple[BackendStatus, ...]:
        """Describe the backends in the order in which they were added."""
        return tuple(
            BackendStatus(
                backend=member.backend,
                state=member.state,
                problem=member.problem,
                in_flight=len(member.jobs),
                assigned=member.assigned,
            )
            for member in self._members.values()
        )

    def __contains__(self, backend_id: str) -> bool:
        return backend_id in self._members

    def _member(self, backend_id: str) -> _Member:
        try:
            return self._members[backend_id]
        except KeyError:
            raise UnknownBackend(f"no backend is called {backend_id}", backend=backend_id) from None

    def _choose(self, request: Assign, held: _Assignment | None) -> str | None:
        kept = held.backend_id if held is not None else ""
        if kept and kept != request.unreachable and self._members[kept].state == "ready":
            return kept
        lost = self._members.get(request.unreachable)
        if lost is None:
            return self._choose_any(request)
        lost.suspect = True
        self._ranking.discard(request.unreachable)
        other = self._choose_any(request)
        self._rank(lost)
        return other or (request.unreachable if lost.state == "suspect" else None)

    def _choose_any(self, request: Assign) -> str | None:
        if self._by_group and request.group_id:
            for backend_id in self._groups.backends(request.group_id):
                member = self._members.get(backend_id)
                if member is None or member.state != "ready":
                    self._groups.forget(request.group_id, backend_id)
                elif member.has_room:
                    return backend_id
        return self._ranking.first(request.node)

    def _release(self, job_id: str) -> None:
        held = self._assignments.pop(job_id)
        owned = self._owned[held.owner]
        owned.discard(job_id)
        if not owned:
            del self._owned[held.owner]
        member = self._members[held.backend_id]
        member.jobs.discard(job_id)
        self._rank(member)

    def _rank(self, member: _Member) -> None:
        """Put a backend where its load belongs, behind its equals; nowhere if it takes no jobs."""
        state = member.state
        if state in ("draining", "unwell"):
            self._ranking.discard(member.backend.backend_id)
        else:
            self._ranking.place(member.backend, len(member.jobs), suspect=state == "suspect")


def _moves(request: Assign, held: _Assignment) -> bool:
    """Tell whether a request asks for more than what its job holds."""
    if request.attempt != held.attempt:
        return request.attempt > held.attempt
    return request.unreachable == held.backend_id and request.request_id != held.request_id
