"""The node's numbers for ended phases that a rollout broker has not noted yet. Pure.

Each stage process numbers its own events and resends those not noted. To the broker, the node numbers all events; a
resent event keeps its number.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...wire.messages.jobs import Phase


class _Sent(NamedTuple):
    stage_id: str
    number: int
    phase: Phase
    job_id: str
    attempt: int


class EventNumbers:
    def __init__(self) -> None:
        self._last = 0
        self._sent: dict[int, _Sent] = {}
        self._known: dict[tuple[str, int], int] = {}

    def number(self, stage_id: str, number: int, phase: Phase, job_id: str, attempt: int) -> int:
        """Return the node's number for a stage process's event."""
        known = self._known.get((stage_id, number))
        if known is not None:
            return known
        self._last += 1
        self._sent[self._last] = _Sent(stage_id, number, phase, job_id, attempt)
        self._known[stage_id, number] = self._last
        return self._last

    def noted(self, numbers: Iterable[int]) -> dict[str, tuple[int, ...]]:
        """Remove events that the broker has noted; return the stage processes' own numbers of them."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for number in numbers:
            sent = self._sent.pop(number, None)
            if sent is not None:
                del self._known[sent.stage_id, sent.number]
                found[sent.stage_id].append(sent.number)
        return {stage_id: tuple(own) for stage_id, own in found.items()}

    def ended(self, phase: Phase) -> dict[str, int]:
        """Return jobs of a stage, with attempts, whose events the broker has not noted."""
        return {sent.job_id: sent.attempt for sent in self._sent.values() if sent.phase == phase}

    def forget(self, stage_id: str) -> list[int]:
        """Remove the events of a stage process that is gone; return the node's numbers of them."""
        gone = [number for number, sent in self._sent.items() if sent.stage_id == stage_id]
        for number in gone:
            sent = self._sent.pop(number)
            del self._known[sent.stage_id, sent.number]
        return gone
