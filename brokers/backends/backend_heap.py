"""`BackendHeap`: sticky assignments of jobs to backends, which are ranked by load. Pure: no sockets, no clock.

- The load of a backend is its number of assignments in flight divided by its weight. (The ProRL Agent paper, arXiv
  2603.18815, §3.3, counts all assignments ever made.)
- A job keeps its backend while it holds the assignment, so its next turn finds a warm prefix cache. A newer attempt
  keeps the backend too if that is ready.
- With affinity `group`, a job goes to a backend that its group has used: the earliest one with room. Where hosts report
  what their caches have, this comes first (see `warm_backends`).
- Otherwise a job goes to the first of the ranking (see `backend_ranking`).
- A backend whose host states its room accepts no new rollouts beyond it (see `set_room`).
- Each model (`Backend.name`) has a ranking of its own; a job may hold one backend of each, by `HolderIdentifier`.
- A job that leaves its backend gets another one; it gets the same one only if there is no other.
- Draining, behind (serving other weights than wanted) and unwell backends accept no jobs; their jobs keep them.
- During an update of a model's weights (see `wanted_weights`), only its backends that serve exactly the new weights
  accept jobs. Each model has weight versions of its own.
- A backend on probation accepts one job per trial (see `backend_probation`): the next job without a backend, or, if no
  other backend is ready, a job that leaves another one.
- Frozen backends are never behind and do not wait for weight updates.
- Backends also serve the adapters that they have loaded (see `adapter_models`); their load counts all assignments. A
  job that is pinned to a version moves only to backends that have this one.

Assignments belong to an owner (a stage process) and are dropped with that owner.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

import msgspec

from ...errors import DuplicateBackend, UnknownBackend
from ...wire.messages.backends import assignment_digest
from ...wire.messages.base import POLICY
from .adapter_models import AdapterModels
from .backend_member import Assignment, Member, Owned, Served
from .backend_ranking import BackendRanking
from .warm_backends import WarmBackends

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ...wire.messages.backends import Assign, Backend, BackendStatus, HeldAssignment

Affinity = Literal["job", "group"]
"""What sticks to a backend: a single job or its group."""


class BackendHeap:
    """The backends and the assignments on them.

    Invariant: a backend's in-flight count is the number of holders that have an assignment on it.
    """

    def __init__(self, affinity: Affinity = "job") -> None:
        self._members: dict[str, Member] = {}
        self.warm = WarmBackends(self._members, by_group=affinity == "group")
        self._offers: dict[str, None] = {}
        """Backends on probation that the next job may try."""
        self._rankings: dict[str, BackendRanking] = {}
        """By the backends' own model, whose adapters' jobs get the first that has the adapter."""
        self._assignments: dict[str, Assignment] = {}
        """By holder."""
        self._besides: dict[str, set[str]] = {}
        """Of each job, the holders of assignments to other models than the policy."""
        self._owned: dict[str, Owned] = {}
        self._wanted: dict[str, int] = {}
        """By model: its backends with older weights accept no jobs."""
        self._begun: dict[str, int] = {}
        """Weight versions of the updates in progress, by model."""
        self.adapters = AdapterModels(self._wanted, self._begun)

    def add(self, backend: Backend, needed_version: int = 0) -> None:
        """Register a backend, or update a known one at the same endpoint and end its draining or probation.

        The backend is behind while its weights are older than `needed_version` or the wanted version.
        """
        member = self._members.get(backend.backend_id)
        if member is not None and member.backend.endpoint != backend.endpoint:
            raise DuplicateBackend(
                f"backend {backend.backend_id} is registered at {member.backend.endpoint}; remove it first, or choose "
                "another id",
                backend=backend.backend_id,
            )
        if member is None:
            member = self._members[backend.backend_id] = Member(backend)
        elif member.backend.name != backend.name:
            self._release_all(member)
            self._unrank(member)
        member.backend = backend
        member.draining = False
        member.problem = member.failure = ""
        self._offers.pop(backend.backend_id, None)
        member.needed_version = needed_version
        member.adapter_notes.clear()
        self.warm.forget_resident(backend.backend_id)
        self._weigh(member)
        self._serve(member)
        self._rank(member)

    def drain(self, backend_id: str) -> None:
        member = self.member(backend_id)
        member.draining = True
        self._rank(member)

    def set_problem(self, backend_id: str, problem: str) -> None:
        member = self.member(backend_id)
        if member.problem != problem:
            member.problem = problem
            self._rank(member)

    def set_room(self, backend_id: str, room: int | None) -> None:
        """Limit a backend to this number of rollouts; None: to no number. Jobs that have it keep it.

        A job that holds a backend of another model gets one in any case: it must not wait for jobs that wait for it.
        """
        member = self.member(backend_id)
        was_closed, member.room = member.is_closed, room
        if member.is_closed != was_closed:
            self._rank(member)

    def suspend(self, backend_id: str, failure: str) -> None:
        """Put a backend on probation, or record its latest failure."""
        member = self.member(backend_id)
        fresh = not member.failure
        member.failure = failure
        if fresh:
            self._rank(member)

    def offer(self, backend_id: str) -> None:
        if self.member(backend_id).failure:
            self._offers[backend_id] = None

    def restore(self, backend_id: str) -> None:
        member = self.member(backend_id)
        if member.failure:
            member.failure = ""
            self._offers.pop(backend_id, None)
            self._rank(member)

    def remove(self, backend_id: str) -> None:
        """Remove a backend and its assignments; their jobs get another backend at their next `assign`."""
        member = self.member(backend_id)
        self._release_all(member)
        self._offers.pop(backend_id, None)
        del self._members[backend_id]
        self.warm.forget_resident(backend_id)
        self._unrank(member)
        name = member.backend.name
        if not any(other.backend.name == name for other in self._members.values()):
            self._rankings.pop(name, None)

    def set_weight_version(
        self, weight_version: int, backend_id: str | None = None, *, as_wanted: bool = False, model: str = POLICY
    ) -> None:
        """Record the weights that a backend (None: each of the model but frozen ones) serves now.

        One that has caught up accepts jobs again.

        `as_wanted` marks a trainer's statement: the backend need not catch up with its earlier weights, and, for all
        backends of the model, the version becomes the wanted one.
        """
        if as_wanted and backend_id is None:
            self._wanted[model] = weight_version
        for member in [self.member(backend_id)] if backend_id is not None else self._trained(model):
            before = member.state
            member.backend = msgspec.structs.replace(member.backend, weight_version=weight_version)
            if as_wanted:
                member.needed_version = 0
            self._weigh(member)
            if member.state != before:
                self._rank(member)

    def _weigh(self, member: Member) -> None:
        name = member.backend.name
        member.weigh(self.wanted_version(name), self._begun.get(name))

    def wanted_version(self, model: str = POLICY) -> int:
        """Return the version that a model's backends must serve to accept jobs; 0: any."""
        return self._wanted.get(model, 0)

    def serves(self, weight_version: int, model: str = POLICY) -> bool:
        return any(member.backend.weight_version == weight_version for member in self._trained(model))

    def want_version(self, weight_version: int, model: str = POLICY) -> None:
        """Set the wanted version for backends of a model that are added later."""
        self._wanted[model] = weight_version

    def set_base(self, model: str, base: str | None) -> None:
        """Make a model an adapter of another one; None: forget the adapter."""
        if base is not None:
            self.adapters.bases[model] = base
            return
        self.adapters.forget(model)
        self._wanted.pop(model, None)
        self._begun.pop(model, None)
        self._serve_adapters()

    def set_adapters(self, backend_id: str, adapters: Mapping[str, tuple[int, ...]]) -> None:
        """Record the adapters that a backend has loaded (see `Backend.adapters`)."""
        member = self.member(backend_id)
        member.backend = msgspec.structs.replace(member.backend, adapters=dict(adapters))
        self._serve(member)

    def note_adapter(self, backend_id: str, model: str, note: str) -> None:
        """Record why a backend could not load an adapter; empty: it could."""
        notes = self.member(backend_id).adapter_notes
        notes.pop(model, None)
        if note:
            notes[model] = note

    def serve(self, backend_ids: Iterable[str]) -> None:
        """Set which models backends serve, after `adapters` changed for them; unknown ones are ignored."""
        for backend_id in self._members.keys() & backend_ids:
            self._serve(self._members[backend_id])

    def _serve(self, member: Member) -> None:
        """Set which models a backend serves."""
        member.models = self.adapters.served(member.backend)

    def _serve_adapters(self) -> None:
        for member in self._members.values():
            if member.backend.adapter_slots:
                self._serve(member)

    def begin_update(self, weight_version: int, model: str = POLICY) -> None:
        """Allow only backends of a model that serve exactly this version to accept jobs."""
        self._begun[model] = weight_version
        if model in self.adapters:
            self._serve_adapters()
        for member in self._trained(model):
            self._weigh(member)
            self._rank(member)

    def end_update(self, weight_version: int, model: str = POLICY) -> None:
        """End a model's update: its backends that serve another version accept no jobs."""
        self._begun.pop(model, None)
        self._wanted[model] = weight_version
        if model in self.adapters:
            self._serve_adapters()
        for member in self._trained(model):
            member.needed_version = 0 if member.backend.weight_version == weight_version else weight_version
            member.awaited = None
            member.catch_up = ""
            self._rank(member)

    def hold_back(self, backend_id: str, needed_version: int) -> None:
        """Stop a backend from accepting jobs until it gets this version or a newer one, even if it serves it now."""
        member = self.member(backend_id)
        member.needed_version = 0 if member.backend.frozen else needed_version
        self._rank(member)

    def give_up_update(self, note: str = "", model: str = POLICY) -> None:
        """End a model's update without new weights; backends that waited show `note` until their next weights."""
        self._begun.pop(model, None)
        if model in self.adapters:
            self._serve_adapters()
        for member in self._trained(model):
            waited = member.awaited is not None
            self._weigh(member)
            member.note = note if waited else ""
            self._rank(member)

    def note_catch_up(self, backend_id: str, note: str) -> None:
        """Record how a backend that is behind gets the wanted weights, or why that failed."""
        self.member(backend_id).catch_up = note

    def assign(self, request: Assign, *, anyhow: bool = False) -> Backend | None:
        """Return the model's backend that the job holds, or choose one by the rules above; None: none accepts jobs.

        An older attempt or a resent request gets the held backend and changes nothing. With `anyhow`, the job may get
        the least loaded backend on probation.
        """
        holder_id = request.holder
        held = self._assignments.get(holder_id)
        if held is not None and not held.moves(request):
            return self._members[held.backend_id].backend
        if held is not None:
            self._release(holder_id)
        pinned, pins = request.pinned, self.adapters.pins
        if pinned is not None or pins.by_job:
            pins.add(request.owner, holder_id, request.attempt, pinned)
        if pinned is not None:
            begun = self.has_begun(request.job_id)
            members = self._members.values()
            backend_id = self.adapters.having(members, request, self._offers, begun=begun, anyhow=anyhow)
        else:
            backend_id = self._choose(request, held) or (self._least_bad(request.model) if anyhow else None)
        if backend_id is None:
            return None
        member = self._members[backend_id]
        member.assigned += 1
        self._offers.pop(backend_id, None)
        trial = bool(member.failure)
        if request.pin and pinned is None:
            pinned = member.backend.adapters.get(request.model, (None,))[-1]
            pins.add(request.owner, holder_id, request.attempt, pinned)
        found = Assignment(backend_id, request.attempt, request.owner, request.request_id, trial, pinned=pinned)
        self._hold(holder_id, found)
        self.warm.note_assigned(request, backend_id)
        return member.backend

    def adopt(self, owner: str, holder_id: str, held: HeldAssignment) -> None:
        """Record an assignment made by an earlier broker process; a known holder is left unchanged."""
        backend_id, model = held.backend_id, holder_id.partition("/")[2] or POLICY
        if held.pinned is not None:
            self.adapters.pins.add(owner, holder_id, held.attempt, held.pinned)
        if backend_id is None or backend_id not in self._members or holder_id in self._assignments:
            return
        if self._members[backend_id].backend.name == self.adapters.base(model):
            kept = Assignment(backend_id, held.attempt, owner, "", served=held.served, pinned=held.pinned)
            self._hold(holder_id, kept)

    def note_served(self, holder_id: str, attempt: int, served: int) -> Served | None:
        """Record how many generations a holder's backend has completed; return the backend if the number grew."""
        held = self._assignments.get(holder_id)
        if held is None or held.attempt != attempt or held.served >= served:
            return None
        held.served = served
        return Served(held.backend_id, held.trial)

    def release(self, holder_id: str, attempt: int) -> bool:
        if self.adapters.pins.by_job:
            self.adapters.pins.drop(holder_id, attempt)
        held = self._assignments.get(holder_id)
        if held is None or held.attempt > attempt:
            return False
        self._members[held.backend_id].ended += held.served > 0
        self._release(holder_id)
        return True

    def holders(self, job_id: str) -> tuple[str, ...]:
        """Return all holders of a job that may have an assignment or a pin: the policy's, and those of other models."""
        return tuple({job_id, *self._besides.get(job_id, ()), *self.adapters.pins.by_job.get(job_id, ())})

    def keep_only(self, owner: str, jobs: Mapping[str, HeldAssignment]) -> None:
        for holder_id in tuple(self._owned[owner].jobs) if owner in self._owned else ():
            named = jobs.get(holder_id)
            if named is None or named.attempt != self._assignments[holder_id].attempt:
                self._release(holder_id)
        self.adapters.pins.keep_only(owner, jobs)

    def drop_owner(self, owner: str) -> None:
        self.keep_only(owner, {})

    def digest(self, owner: str) -> int:
        """Return the digest of an owner's assignments, as in `OwnerAlive`."""
        return self._owned[owner].digest if owner in self._owned else 0

    def owners(self) -> Iterable[str]:
        return self._owned.keys() | self.adapters.pins.owners()

    def status(self) -> tuple[BackendStatus, ...]:
        return tuple(member.status(self.adapters.problems(member)) for member in self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, backend_id: str) -> bool:
        return backend_id in self._members

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._members))

    def trained(self, model: str = POLICY) -> list[str]:
        """Return the backends that take a model's weight updates, or an adapter's versions."""
        if model not in self.adapters:
            return [member.backend.backend_id for member in self._trained(model)]
        base = self.adapters.base(model)
        return [one.backend_id for one in self.backends() if one.adapter_slots and one.name == base]

    def backends(self) -> list[Backend]:
        return [member.backend for member in self._members.values()]

    def in_flight(self) -> Counter[str]:
        """Return the number of assignments by model."""
        return Counter(holder_id.partition("/")[2] or POLICY for holder_id in self._assignments)

    def models(self) -> set[str]:
        return {member.backend.name for member in self._members.values()}

    def holds(self, holder_id: str) -> Assignment | None:
        return self._assignments.get(holder_id)

    def member(self, backend_id: str) -> Member:
        try:
            return self._members[backend_id]
        except KeyError:
            raise UnknownBackend(f"no backend is called {backend_id}", backend=backend_id) from None

    def _choose(self, request: Assign, held: Assignment | None) -> str | None:
        kept = self._members[held.backend_id] if held is not None and held.backend_id != request.leaving else None
        if kept is not None and kept.state == "ready" and request.model in kept.models:
            return kept.backend.backend_id
        left = self._members.get(request.leaving)
        if left is None or request.model not in left.models:
            return self._offered(request) or self._choose_ready(request)
        self._unrank(left)
        other = self._choose_ready(request) or self._offered(request)
        self._rank(left)
        return other or (request.leaving if left.state == "ready" else None)

    def _offered(self, request: Assign) -> str | None:
        for backend_id in self._offers:
            member = self._members[backend_id]
            if backend_id != request.leaving and member.state == "probation" and request.model in member.models:
                return backend_id
        return None

    def _least_bad(self, model: str) -> str | None:
        tried = [key for key, member in self._members.items() if member.state == "probation" and model in member.models]
        return min(tried, key=lambda backend_id: len(self._members[backend_id].jobs), default=None)

    def _choose_ready(self, request: Assign) -> str | None:
        if (warm := self.warm.find(request)) is not None:
            return warm
        node, (ranking, lacks) = request.node, self._ranking(request.model)
        if ranking is None:
            return None
        return ranking.first(node, lacks) or (
            ranking.first(node, lacks, begun=True) if self.has_begun(request.job_id) else None
        )

    def lacks_room(self, model: str, pinned: int | None) -> bool:
        """Return whether jobs of a model, pinned to a version, wait for room alone: all ready backends are closed."""
        if pinned is not None:
            having = (one for one in self._members.values() if pinned in one.backend.adapters.get(model, ()))
            return any(member.is_closed and member.state == "ready" for member in having)
        ranking, lacks = self._ranking(model)
        return ranking is not None and ranking.is_closed(lacks)

    def _ranking(self, model: str) -> tuple[BackendRanking | None, Callable[[str], bool] | None]:
        """Return the ranking for a model's jobs, and which of its backends cannot take them."""
        base = self.adapters.bases.get(model)
        ranking = self._rankings.get(base or model)
        return ranking, None if base is None else lambda one: model not in self._members[one].models

    def has_begun(self, job_id: str) -> bool:
        """Return whether a job holds a backend, of any model."""
        return job_id in self._assignments or job_id in self._besides

    def _hold(self, holder_id: str, held: Assignment) -> None:
        self._assignments[holder_id] = held
        owned = self._owned.get(held.owner)
        if owned is None:
            owned = self._owned[held.owner] = Owned()
        owned.jobs.add(holder_id)
        owned.digest += assignment_digest(holder_id, held.attempt, held.backend_id)
        if "/" in holder_id:
            self._besides.setdefault(holder_id.partition("/")[0], set()).add(holder_id)
        member = self._members[held.backend_id]
        member.jobs.add(holder_id)
        self._rank(member)

    def _release_all(self, member: Member) -> None:
        for holder_id in tuple(member.jobs):
            self._release(holder_id)

    def _release(self, holder_id: str) -> None:
        held = self._assignments.pop(holder_id)
        owned = self._owned[held.owner]
        owned.jobs.discard(holder_id)
        owned.digest -= assignment_digest(holder_id, held.attempt, held.backend_id)
        if not owned.jobs:
            del self._owned[held.owner]
        if "/" in holder_id:
            job_id = holder_id.partition("/")[0]
            self._besides[job_id].discard(holder_id)
            if not self._besides[job_id]:
                del self._besides[job_id]
        member = self._members[held.backend_id]
        member.jobs.discard(holder_id)
        self._rank(member)

    def _rank(self, member: Member) -> None:
        if member.state != "ready":
            self._unrank(member)
            return
        ranking = self._rankings.get(member.backend.name)
        if ranking is None:
            ranking = self._rankings[member.backend.name] = BackendRanking()
        ranking.place(member.backend, len(member.jobs), closed=member.is_closed)

    def _unrank(self, member: Member) -> None:
        ranking = self._rankings.get(member.backend.name)
        if ranking is not None:
            ranking.discard(member.backend.backend_id)

    def _trained(self, model: str) -> list[Member]:
        members = self._members.values()
        return [member for member in members if member.backend.name == model and not member.backend.frozen]
