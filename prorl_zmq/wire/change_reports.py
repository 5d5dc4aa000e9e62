"""What a member reports to the rollout broker with its next heartbeat: everything, or what has changed. Pure.

Everything is due over a new connection until the broker has answered, when it asks, and now and then. Else a heartbeat
says which phases have begun, so that it costs by what happens, not by what is held, and what the machine is like if
that has changed much.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from .messages.nodes import NodeFacts
from .messages.stages import MemberAlive

if TYPE_CHECKING:
    from collections.abc import Mapping

FULL_EVERY = 60
"""Heartbeats from one full report to the next: what no rule thought of lasts no longer."""

Phases = dict[str, int]
"""Attempts by job."""
NONE: Mapping[str, str] = MappingProxyType({})


class ChangeReports:
    def __init__(self, member: str) -> None:
        self._member = member
        self._number = 0
        self._full_in = 0
        self.is_unanswered = True
        """The broker has not answered since the connection began: it may be another one."""
        self._running: dict[str, Phases] = {}
        self._backends: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._facts = NodeFacts()
        """All as they were last reported."""

    @property
    def number(self) -> int:
        """Of the last heartbeat that said what has changed."""
        return self._number

    def connected(self) -> None:
        """A connection has begun."""
        self.is_unanswered = True

    def answered(self) -> None:
        """The broker asks for everything, and then has it."""
        self.is_unanswered = False
        self._full_in = 0

    def want_full(self) -> None:
        """Say everything next: something may have been lost."""
        self._full_in = 0

    def is_full(
        self,
        running: Mapping[str, Phases],
        backends: Mapping[str, str],
        facts: NodeFacts,
        addresses: Mapping[str, str] = NONE,
    ) -> bool:
        """Return whether to say everything now; then it counts as said."""
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
        """Return what has changed since the last report; it counts as said."""
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
    """Return what jobs have got that they did not have, with their attempts."""
    return {
        job_id: (attempts[job_id], value)
        for job_id, value in now.items()
        if job_id in attempts and before.get(job_id) != value
    }
