"""What a member reports to the rollout broker with each heartbeat: its full state, or the changes. Pure.

A full report is due on a new connection until the broker answers, when the broker asks, and every `FULL_EVERY`
heartbeats. Other heartbeats carry only changes, so their cost follows the rate of change and not the number of jobs.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from .messages.nodes import NodeFacts
from .messages.stages import MemberAlive

if TYPE_CHECKING:
    from collections.abc import Mapping

FULL_EVERY = 60
"""Heartbeats between two full reports, which bound how long a missed change can last."""

Phases = dict[str, int]
"""Attempts by job."""
NONE: Mapping[str, str] = MappingProxyType({})


class ChangeReports:
    def __init__(self, member: str) -> None:
        self._member = member
        self._number = 0
        self._full_in = 0
        self.is_unanswered = True
        """The broker has not answered on this connection; it may be a new broker."""
        self._running: dict[str, Phases] = {}
        self._backends: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._facts = NodeFacts()
        """This and the three above: as last reported."""

    @property
    def number(self) -> int:
        """The number of the last heartbeat that carried changes."""
        return self._number

    def connected(self) -> None:
        """Note a new connection."""
        self.is_unanswered = True

    def answered(self) -> None:
        """Note the broker's answer, and make the next report a full one."""
        self.is_unanswered = False
        self._full_in = 0

    def want_full(self) -> None:
        """Make the next report a full one."""
        self._full_in = 0

    def is_full(
        self,
        running: Mapping[str, Phases],
        backends: Mapping[str, str],
        facts: NodeFacts,
        addresses: Mapping[str, str] = NONE,
    ) -> bool:
        """Return whether a full report is due now; if so, record the state as reported."""
        if self._full_in > 0 and not self.is_unanswered:
            self._full_in -= 1
            return False
        self._full_in = FULL_EVERY
        self._facts = facts
        self._note(running, backends, addresses)
        return True

    def changes(
        self,
        running: Mapping[str, Phases],
        backends: Mapping[str, str],
        facts: NodeFacts,
        addresses: Mapping[str, str] = NONE,
    ) -> MemberAlive:
        """Return what changed since the last report, and record it as reported."""
        self._number += 1
        began: dict[str, Phases] = {}
        for stage_id, phases in running.items():
            before = self._running.get(stage_id, {})
            new = {job_id: attempt for job_id, attempt in phases.items() if before.get(job_id) != attempt}
            if new:
                began[stage_id] = new
        attempts = {job_id: attempt for phases in running.values() for job_id, attempt in phases.items()}
        assigned = _new(backends, self._backends, attempts)
        opened = _new(addresses, self._addresses, attempts)
        self._note(running, backends, addresses)
        news = facts if facts.differs(self._facts) else None
        self._facts = news or self._facts
        return MemberAlive(
            member=self._member, number=self._number, began=began, backends=assigned, addresses=opened, facts=news
        )

    def _note(self, running: Mapping[str, Phases], backends: Mapping[str, str], addresses: Mapping[str, str]) -> None:
        self._running = {stage_id: dict(phases) for stage_id, phases in running.items()}
        self._backends = dict(backends)
        self._addresses = dict(addresses)


def _new(now: Mapping[str, str], before: Mapping[str, str], attempts: Phases) -> dict[str, tuple[int, str]]:
    """Return the entries that are new or changed, with their jobs' attempts."""
    return {
        job_id: (attempts[job_id], value)
        for job_id, value in now.items()
        if job_id in attempts and before.get(job_id) != value
    }
