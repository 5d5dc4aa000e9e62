"""`NodeTable`: the phases that one node's stage processes hold, and for which rollout broker. Pure.

To a rollout broker, all stage processes of a role are one *pool* under the node's lease. A phase goes to the least
loaded stage process that serves its task. A phase counts as running once its stage process has confirmed it; until then
the broker's limit for unconfirmed starts applies.

Stage processes identify phases by job id. If two brokers have jobs of the same id, the second job starts after the
first has ended here.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..rollout.stage_pool import Requirement, SlotClaim, StagePool

if TYPE_CHECKING:
    from ...wire.messages.jobs import Phase
    from ...wire.messages.stages import MemberAlive, StageReport, StartPhase, Task


@dataclass(slots=True)
class HeldPhase:
    broker: str
    job_id: str
    attempt: int
    phase: Phase
    stage_id: str
    confirmed: bool = False
    """Its stage process has reported the phase."""

    @property
    def claim(self) -> SlotClaim:
        return _claim(self.broker, self.job_id, self.attempt)


class NodeTable:
    def __init__(self, lease_s: float, quiet_s: float) -> None:
        self._pool = StagePool(lease_s, quiet_s)
        self._held: dict[str, HeldPhase] = {}
        """By job id."""
        self._tasks: dict[str, tuple[Task, ...]] = {}
        """By stage process."""
        self._draining: set[str] = set()

    @property
    def stages(self) -> StagePool:
        return self._pool

    # What brokers ask for ---------------------------------------------------------------------------------------------

    def start(self, broker: str, command: StartPhase, task: str) -> HeldPhase | None:
        """Assign a phase to a stage process; return None if none is available now."""
        before = self._held.get(command.job_id)
        if before is not None and before.broker != broker:
            return None
        if before is not None:
            self._drop(before)  # the broker has abandoned that attempt
        claim = _claim(broker, command.job_id, command.attempt)
        stage_id = self._pool.take(Requirement(command.phase, task, None), claim)
        if stage_id is None:
            return None
        held = HeldPhase(broker, command.job_id, command.attempt, command.phase, stage_id)
        self._held[command.job_id] = held
        return held

    def holder(self, broker: str, job_id: str, attempt: int) -> str | None:
        """Return the stage process that holds an attempt of a broker's job, or None."""
        held = self._held.get(job_id)
        return held.stage_id if held is not None and (held.broker, held.attempt) == (broker, attempt) else None

    # What stage processes say -----------------------------------------------------------------------------------------

    def reported(self, report: StageReport, now: float, only_broker: str) -> None:
        """Record a full report; `only_broker` owns the phases for which the report names no broker."""
        named = {**report.running, **report.ended}
        if report.stage_id not in self._pool:
            for job_id, attempt in named.items():
                broker = report.origins.get(job_id, only_broker)
                self._held[job_id] = HeldPhase(broker, job_id, attempt, report.role, report.stage_id, confirmed=True)
                self._pool.expect(report.stage_id, self._held[job_id].claim)
        self._pool.heard(report, now)
        self._tasks[report.stage_id] = report.tasks
        if report.draining:
            self._draining.add(report.stage_id)
        for job_id, attempt in named.items():
            self._confirm(report.stage_id, job_id, attempt)

    def alive(self, alive: MemberAlive, now: float) -> bool:
        """Record a heartbeat; return whether the stage process is known and none of its earlier heartbeats was lost."""
        lease = self._pool.lease(alive.member)
        if lease is None:
            return False
        follows = alive.number == lease.number + 1
        self._pool.lives(lease, alive.number, now)
        for began in alive.began.values():
            for job_id, attempt in began.items():
                self._confirm(alive.member, job_id, attempt)
        return follows

    def ended(self, stage_id: str, job_id: str, attempt: int) -> None:
        """Free the slot of a phase that has ended."""
        held = self._held.get(job_id)
        if held is not None and (held.stage_id, held.attempt) == (stage_id, attempt):
            self._drop(held)

    def left(self, stage_id: str) -> list[HeldPhase]:
        """Remove a stage process that has left; return the phases it held."""
        self._pool.remove(stage_id)
        return self._forget(stage_id)

    def expire(self, now: float) -> dict[str, list[HeldPhase]]:
        """Remove the stage processes whose leases have expired; return the phases that each held."""
        return {stage.stage_id: self._forget(stage.stage_id) for stage in self._pool.expire(now)}

    # Answers to brokers ----------------------------------------------------------------------------------------------

    def roles(self) -> list[Phase]:
        """Return the stages with processes on this node."""
        return sorted({stage.role for stage in self._pool})

    def slots(self, role: Phase) -> int:
        return self._pool.role_slots(role)

    def tasks(self, role: Phase) -> tuple[Task, ...]:
        """Return the tasks that the processes of a role serve, each once."""
        served = {task.name: task for stage in self._pool if stage.role == role for task in self._tasks[stage.stage_id]}
        return tuple(served.values())

    def is_draining(self, role: Phase) -> bool:
        """Return whether all processes of a role accept no more phases."""
        return all(stage.leaving for stage in self._pool if stage.role == role)

    def running(self, broker: str) -> dict[Phase, dict[str, int]]:
        """Return a broker's confirmed attempts, by stage and job."""
        found: defaultdict[Phase, dict[str, int]] = defaultdict(dict)
        for held in self._held.values():
            if held.broker == broker and held.confirmed:
                found[held.phase][held.job_id] = held.attempt
        return found

    def used(self, role: Phase) -> dict[str, int]:
        """Return the number of slots that each broker's phases use."""
        used: defaultdict[str, int] = defaultdict(int)
        for held in self._held.values():
            if held.phase == role:
                used[held.broker] += 1
        return used

    def _confirm(self, stage_id: str, job_id: str, attempt: int) -> None:
        held = self._held.get(job_id)
        if held is not None and (held.stage_id, held.attempt) == (stage_id, attempt):
            held.confirmed = True

    def _drop(self, held: HeldPhase) -> None:
        del self._held[held.job_id]
        self._pool.give_back(held.stage_id, held.claim)

    def _forget(self, stage_id: str) -> list[HeldPhase]:
        self._tasks.pop(stage_id, None)
        self._draining.discard(stage_id)
        gone = [held for held in self._held.values() if held.stage_id == stage_id]
        for held in gone:
            del self._held[held.job_id]
        return gone


def _claim(broker: str, job_id: str, attempt: int) -> SlotClaim:
    return SlotClaim(f"{broker}/{job_id}", attempt)
