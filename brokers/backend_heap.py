"""Which backend a job talks to: a min-heap on assignments in flight, sticky per job. Pure: no sockets, no clock.

The ProRL Agent paper (arXiv 2603.18815, §3.3) keys its heap by assignments ever made, which cannot see long jobs; here
a release lowers the weight again. A job keeps its backend for as long as it holds the assignment, so that its next turn
finds the prefix cache warm. Assignments belong to an owner (a stage process): when the owner is dropped, so are they.
A backend that serves older weights than it should drains until it has caught up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from ..errors import DuplicateBackend, UnknownBackend
from ..messages import Backend, BackendStatus
from .least_loaded import LeastLoaded

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(slots=True)
class _Member:
    backend: Backend
    draining: bool = False
    """It was asked to take no more jobs."""
    needed_version: int = 0
    """While its weights are older than these it takes no jobs; 0 once it has caught up."""
    assigned: int = 0
    jobs: set[str] = field(default_factory=set)

    @property
    def takes_jobs(self) -> bool:
        return not self.draining and not self.needed_version


@dataclass(slots=True)
class _Assignment:
    backend_id: str
    attempt: int
    owner: str


class BackendHeap:
    """The backends and the assignments on them.

    Invariant: a backend's weight is the number of jobs that hold an assignment on it.
    """

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._ready: LeastLoaded[str] = LeastLoaded()
        self._assignments: dict[str, _Assignment] = {}
        self._owned: dict[str, set[str]] = {}

    def add(self, backend: Backend, needed_version: int = 0) -> None:
        """Register a backend. Adding a known one again updates it, and makes a draining one ready.

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
        member.draining = False
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

    def remove(self, backend_id: str) -> None:
        """Forget a backend and the assignments on it; a job that held one gets another at its next `assign`.

        Raises:
            UnknownBackend: there is none of that id.
        """
        for job_id in tuple(self._member(backend_id).jobs):
            self._release(job_id)
        del self._members[backend_id]
        self._ready.discard(backend_id)

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

    def assign(self, job_id: str, attempt: int, owner: str) -> Backend | None:
        """Give the job's backend, or the least loaded one; None if no backend takes jobs.

        A newer attempt takes its job's assignment over and keeps the backend, whose cache knows the job's prompt,
        unless that takes no more jobs. An older attempt gets what the newer one holds and changes nothing.
        """
        held = self._assignments.get(job_id)
        if held is not None and held.attempt >= attempt:
            return self._members[held.backend_id].backend
        if held is not None:
            self._release(job_id)
        if held is not None and self._members[held.backend_id].takes_jobs:
            backend_id: str | None = held.backend_id
        else:
            backend_id = self._ready.first()
        if backend_id is None:
            return None
        member = self._members[backend_id]
        member.jobs.add(job_id)
        member.assigned += 1
        self._rank(member)
        self._assignments[job_id] = _Assignment(backend_id, attempt, owner)
        self._owned.setdefault(owner, set()).add(job_id)
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
                state="ready" if member.takes_jobs else "draining",
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
        if member.takes_jobs:
            self._ready.set(member.backend.backend_id, len(member.jobs))
        else:
            self._ready.discard(member.backend.backend_id)
