"""The ends of phases that a stage process has told the broker of, and that the broker has not noted yet.

A broker that is killed may have read an event and not written it down. So the process keeps each one, with its
trajectory, until `EventsNoted` names it: it says in every report that the job ended here, which renews the job's lease,
and sends the event again to a broker that welcomes it, or when nothing came back for a while. The broker knows a repeat
by its attempt. There are no more of them than slots, since the broker fills a slot again only after it noted the event.
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
"""How long to wait for the broker's word, the second time twice as long, and so on: while it is away, sendings pile up
in the socket."""


@dataclass(slots=True)
class _Kept:
    job_id: str
    attempt: int
    frames: list[Frame]
    again_at: float
    pause_s: float = FIRST_RESEND_S


class EventOutbox:
    """Holds events until they are noted. Pure: no socket, no clock."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def ended(self) -> dict[str, int]:
        """The jobs whose events these are, with their last attempts."""
        return {kept.job_id: kept.attempt for kept in self._kept.values()}

    def keep(self, event: PhaseDone | PhaseFailed, block: Any, now: float) -> list[Frame]:
        """Number an event and keep it; give its frames, to be sent."""
        number = next(self._numbers)
        header = codec.encode(msgspec.structs.replace(event, number=number))
        frames: list[Frame] = [header] if block is None else [header, block]
        self._kept[number] = _Kept(event.job_id, event.attempt, frames, now + FIRST_RESEND_S)
        return frames

    def noted(self, numbers: Iterable[int]) -> None:
        """Forget events that the broker has noted."""
        for number in numbers:
            self._kept.pop(number, None)

    def started(self, job_id: str, attempt: int) -> None:
        """Forget the events of an earlier job that had this id: those of the same job have lower attempts."""
        gone = [key for key, kept in self._kept.items() if kept.job_id == job_id and kept.attempt >= attempt]
        self.noted(gone)

    def due(self, now: float) -> list[list[Frame]]:
        """Give the frames of events to send again, since nobody has noted them for long."""
        due = [kept for kept in self._kept.values() if kept.again_at <= now]
        for kept in due:
            kept.pause_s = min(2 * kept.pause_s, MAX_RESEND_S)
            kept.again_at = now + kept.pause_s
        return [kept.frames for kept in due]

    def all(self, now: float) -> list[list[Frame]]:
        """Give the frames of all events, for a broker that has not seen them."""
        for kept in self._kept.values():
            kept.again_at = now + kept.pause_s
        return [kept.frames for kept in self._kept.values()]
