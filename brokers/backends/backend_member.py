"""Records of the backend heap: `Member` (a backend and its state), `Owned`, `Assignment`, `Served`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from ...wire.messages.backends import BackendStatus, LackedRecord
from ...wire.messages.base import POLICY
from ...wire.records import RECORD_NAMES, RECORD_TOP_LIMIT, TEACHER, TOP_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...wire.messages.backends import Assign, Backend


@dataclass(slots=True)
class Member:
    backend: Backend
    draining: bool = False
    """Whether the backend was asked to accept no more jobs."""
    needed_version: int = 0
    """The backend accepts no jobs until it serves this version or a newer one; 0: no requirement."""
    awaited: int | None = None
    """Version of the update in progress that the backend does not serve yet."""
    catch_up: str = ""
    """How the backend gets the needed weights, or why that failed; empty: not tried."""
    note: str = ""
    """A remark shown for a backend that accepts jobs."""
    failure: str = ""
    """Why the backend is on probation: the error of its last failed generation."""
    problem: str = ""
    """Why the engine cannot serve now, as reported by its host."""
    models: tuple[str, ...] = ()
    """The models that the backend serves: its own, and the adapters that it has in the version that jobs get."""
    adapter_notes: dict[str, str] = field(default_factory=dict)
    """Why the loading of an adapter failed, by model."""
    room: int | None = None
    """The most rollouts that its host takes; None: it states no number."""
    assigned: int = 0
    ended: int = 0
    """Assignments that were released after a generation."""
    jobs: set[str] = field(default_factory=set)
    """The holders of its assignments."""

    @property
    def state(self) -> Literal["ready", "draining", "updating", "behind", "probation", "unwell"]:
        """As in `BackendStatus`."""
        if self.draining:
            return "draining"
        if self.awaited is not None:
            return "updating"
        if self.needed_version:
            return "behind"
        if self.problem:
            return "unwell"
        return "probation" if self.failure else "ready"

    @property
    def trouble(self) -> str:
        if self.awaited is not None:
            return f"weights {self.awaited} are on their way, and it serves {self.backend.weight_version}"
        if self.needed_version:
            served, needed = self.backend.weight_version, self.needed_version
            named = "" if self.backend.name == POLICY else f" --model-name {self.backend.name}"
            remedy = self.catch_up or (
                f"load them with `prorl backends update-weights PATH {needed}{named}`, or, if its engine has them, say "
                f"so with `prorl backends set-version {needed}{named}`; a new training begins with `prorl backends "
                f"set-version {served}{named}`"
            )
            return f"it serves weights {served} where {needed} are wanted: {remedy}"
        return self.problem or self.failure or self.note

    @property
    def known_version(self) -> int:
        """The newest version that the backend has served or must catch up with."""
        return max(self.backend.weight_version, self.needed_version)

    def weigh(self, wanted: int, begun: int | None) -> None:
        """Update which weights the backend lacks.

        Args:
            wanted: the wanted version of its model; 0: any.
            begun: the version of the model's update in progress; None: there is none.
        """
        if self.backend.frozen:
            self.needed_version, self.awaited, self.catch_up, self.note = 0, None, "", ""
            return
        version = self.backend.weight_version
        needed = max(self.needed_version, wanted)
        self.needed_version = 0 if version >= needed or version == begun else needed
        self.awaited = None if version == begun else begun
        self.note = ""
        if not self.needed_version:
            self.catch_up = ""

    def status(self, adapter_problems: dict[str, str]) -> BackendStatus:
        return BackendStatus(
            backend=self.backend,
            state=self.state,
            problem=self.trouble,
            adapter_problems=adapter_problems,
            in_flight=len(self.jobs),
            assigned=self.assigned,
            room=self.room,
        )

    @property
    def is_closed(self) -> bool:
        """Whether only rollouts that have begun may get the backend."""
        return self.room is not None and len(self.jobs) >= self.room

    @property
    def has_room(self) -> bool:
        return len(self.jobs) < self.backend.max_in_flight and not self.is_closed


@dataclass(slots=True)
class Owned:
    """The assignments of one owner."""

    jobs: set[str] = field(default_factory=set)
    """The holders."""
    digest: int = 0
    """As in `OwnerAlive`."""


@dataclass(slots=True)
class Assignment:
    backend_id: str
    attempt: int
    owner: str
    request_id: str
    """The request that this assignment answers; a resent request changes nothing."""
    trial: bool = False
    """Whether the backend was on probation when the job got it."""
    served: int = 0
    """Generations completed for the job, as last reported."""
    pinned: int | None = None
    """The version of the model's adapter that the job is pinned to."""

    def moves(self, request: Assign) -> bool:
        """Return whether a request ends the assignment: of a newer attempt, or to leave the backend."""
        if request.attempt != self.attempt:
            return request.attempt > self.attempt
        return request.leaving == self.backend_id and request.request_id != self.request_id


class Served(NamedTuple):
    """A backend that has completed more of a job's generations."""

    backend_id: str
    trial: bool
    """Whether the job was the backend's trial."""


def lacking_records(backends: Sequence[Backend], adapters: Mapping[str, str]) -> tuple[LackedRecord, ...]:
    """Return, of each model, the records that one of its backends does not give or gives least of.

    The record `teacher` is that of a backend that can score texts.

    Args:
        backends: all of them.
        adapters: the models that are adapters, with the names of the backends whose weights they adapt.
    """
    lacking: dict[tuple[str, str], LackedRecord] = {}
    for one in backends:
        for model in (one.name, *(adapter for adapter, base in adapters.items() if base == one.name)):
            given = (*one.records, TEACHER) if one.scores else one.records
            for name in (*RECORD_NAMES, TEACHER):
                limit = one.top_limit if name == TOP_LOGPROBS and name in given else 0
                known = lacking.get((model, name))
                if (name not in given or 0 < limit < RECORD_TOP_LIMIT) and (known is None or limit < known.top_limit):
                    reason = one.unrecorded.get(name, "")
                    lacking[model, name] = LackedRecord(model, name, one.backend_id, one.model, reason, limit)
    return tuple(lacking.values())
