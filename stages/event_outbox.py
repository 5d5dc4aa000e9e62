"""`EventOutbox`: the phase ends that a stage process has sent and the broker has not yet confirmed.

An event is kept, with its trajectory, until `EventsNoted` names it. It is resent to a broker that welcomes the process,
and after a time without confirmation; the broker recognises a repeat by its attempt.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from ..wire import codec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..wire.messages.stages import PhaseDone, PhaseFailed
    from ..wire.sockets import Frame

FIRST_RESEND_S = 5.0
MAX_RESEND_S = 60.0
"""Longest wait before a resend, in seconds. Each wait is twice the last one, because messages to an absent broker pile
up in the socket."""


@dataclass(slots=True)
class _Unnoted:
    job_id: str
    attempt: int
    origin: str
    frames: list[Frame]
    resend_at: float
    pause_s: float = FIRST_RESEND_S


class EventOutbox:
    """Unconfirmed events by number. Pure: no socket, no clock; `now` is in seconds."""

    def __init__(self) -> None:
        self._events: dict[int, _Unnoted] = {}
        self._of_job: dict[str, list[int]] = {}
        """The numbers of each job's events."""
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._events)

    @property
    def ended(self) -> dict[str, int]:
        """The last attempt of each job that has events here."""
        return {event.job_id: event.attempt for event in self._events.values()}

    @property
    def origins(self) -> dict[str, str]:
        """The origins of these jobs (`StartPhase.origin`)."""
        return {event.job_id: event.origin for event in self._events.values() if event.origin}

    def add(self, event: PhaseDone | PhaseFailed, block: Any, now: float) -> list[Frame]:
        """Number and keep an event; return the frames to send."""
        number = next(self._numbers)
        header = codec.encode(msgspec.structs.replace(event, number=number), is_plain=True)
        frames: list[Frame] = [header] if block is None else [header, block]
        self._events[number] = _Unnoted(event.job_id, event.attempt, event.origin, frames, now + FIRST_RESEND_S)
        self._of_job.setdefault(event.job_id, []).append(number)
        return frames

    def noted(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            event = self._events.pop(number, None)
            if event is not None:
                left = self._of_job[event.job_id]
                left.remove(number)
                if not left:
                    del self._of_job[event.job_id]

    def started(self, job_id: str, attempt: int) -> None:
        """Drop the events of an earlier job with this id. Events of the same job have lower attempts and stay."""
        numbers = self._of_job.get(job_id)
        if numbers is not None:
            self.noted([number for number in numbers if self._events[number].attempt >= attempt])

    def due(self, now: float) -> list[list[Frame]]:
        """Return the frames of the events to resend now."""
        due = [event for event in self._events.values() if event.resend_at <= now]
        for event in due:
            event.pause_s = min(2 * event.pause_s, MAX_RESEND_S)
            event.resend_at = now + event.pause_s
        return [event.frames for event in due]

    def all(self, now: float) -> list[list[Frame]]:
        """Return the frames of all events, for a broker that has not seen them."""
        for event in self._events.values():
            event.resend_at = now + event.pause_s
        return [event.frames for event in self._events.values()]
