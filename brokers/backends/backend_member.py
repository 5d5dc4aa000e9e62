"""`Member`: a backend in the heap, and the state that follows from what is known of it; what jobs and owners have.

Records without rules, but for the order in which one trouble hides another; the heap changes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ...wire.messages.backends import Backend


@dataclass(slots=True)
class Member:
    backend: Backend
    draining: bool = False
    """It was asked to take no more jobs."""
    needed_version: int = 0
    """It takes no jobs until it has got weights of this version, or newer ones; 0 once it has."""
    awaited: int | None = None
    """The weights that are on their way, and that it does not serve yet."""
    catch_up: str = ""
    """How it gets the weights that it needs, or why it did not; empty: nothing has been tried."""
    note: str = ""
    """What people should know of it, though it takes jobs."""
    failure: str = ""
    """Why it is on probation: what its last failed generation met."""
    problem: str = ""
    """Why its engine cannot serve now, as its host says."""
    assigned: int = 0
    jobs: set[str] = field(default_factory=set)

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
            remedy = self.catch_up or (
                f"load them with `prorl backends update-weights PATH {needed}`, or, if its engine has them, say so "
                f"with `prorl backends set-version {needed}`; a new training begins with `prorl backends set-version "
                f"{served}`"
            )
            return f"it serves weights {served} where {needed} are wanted: {remedy}"
        return self.problem or self.failure or self.note

    @property
    def has_room(self) -> bool:
        return len(self.jobs) < self.backend.max_in_flight


@dataclass(slots=True)
class Owned:
    """The assignments of one owner."""

    jobs: set[str] = field(default_factory=set)
    digest: int = 0
    """As in `OwnerAlive`."""


@dataclass(slots=True)
class Assignment:
    backend_id: str
    attempt: int
    owner: str
    request_id: str
    """The request that it answers; that one sent again changes nothing."""
    trial: bool = False
    """The backend was on probation when the job got it."""
    served: int = 0
    """Generations that it has done for the job, as last heard."""
