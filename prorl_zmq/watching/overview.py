"""`Overview`: the state of a whole service at one moment, as a page or a terminal shows it. Plain data."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..service.node_rows import NodeRow
from ..wire.messages.backends import BackendList
from ..wire.messages.base import Part
from ..wire.messages.front_door import ServiceStatus
from ..wire.messages.nodes import LostNode
from ..wire.messages.watching import ENDED_INTERVAL_S, EndedJobs, JobRow

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..wire.messages.jobs import Outcome

KEPT_S = 3600.0
FINE_S, MINUTE_S = 600.0, 60.0
"""Older intervals are added up to minutes, since all of them are sent to each viewer once a second."""
RATE_S = 30.0
"""The time that the rate is a mean over."""


class Overview(Part, frozen=True, kw_only=True):
    """A service as its brokers have described it last."""

    at: float
    """Wall clock, seconds since 1970."""
    status: ServiceStatus | None = None
    """The sum over the rollout brokers that answer; None: no broker does."""
    brokers: dict[str, ServiceStatus] = {}
    """Of each rollout broker that answers, by name."""
    backends: BackendList | None = None
    """None: the backend broker does not answer."""
    nodes: tuple[NodeRow, ...] = ()
    lost_nodes: tuple[LostNode, ...] = ()
    """The last ones, the newest first."""
    ended_per_s: float = 0.0
    """Jobs that end in a second, over the last 30 seconds."""
    ended: tuple[EndedJobs, ...] = ()
    """The intervals of the last hour in which jobs ended, the oldest first: of 10 s in the last ten minutes, of a
    minute before."""
    problems: dict[str, str] = {}
    """Why a broker does not answer, by its name; `backend broker` is that one's."""


class Update(Part, frozen=True):
    """What has changed for one viewer since its last update."""

    overview: Overview
    changed: tuple[JobRow, ...]
    """Jobs as they are now, in no order; each once."""
    reset: bool
    """Forget all rows that you have: `changed` has all."""
    forgotten: tuple[str, ...] = ()
    """Jobs whose rows to forget: there are too many."""


class EndedSums:
    """Sums the jobs that ended in the last hour over all rollout brokers, and over the lives of each."""

    def __init__(self) -> None:
        self._lives: dict[tuple[str, str], tuple[EndedJobs, ...]] = {}
        """The last report of each life of each broker."""

    def take(self, broker: str, life: str, ended: tuple[EndedJobs, ...], at: float) -> None:
        """Store the report of a broker's current life."""
        self._lives[broker, life] = ended
        self._lives = {
            key: kept for key, kept in self._lives.items() if key == (broker, life) or self._recent(kept, at)
        }

    def ended(self, at: float) -> tuple[EndedJobs, ...]:
        """Return the intervals of the last hour in which jobs ended, the oldest first; older ones are minutes."""
        fine = at - FINE_S - (at - FINE_S) % MINUTE_S
        sums: dict[tuple[float, float], Counter[Outcome]] = {}
        for one in (one for kept in self._lives.values() for one in self._recent(kept, at)):
            place = (one.at, one.seconds) if one.at >= fine else (one.at - one.at % MINUTE_S, MINUTE_S)
            sums.setdefault(place, Counter()).update(one.outcomes)
        return tuple(EndedJobs(*place, dict(sums[place])) for place in sorted(sums))

    def per_s(self, at: float, up_s: float) -> float:
        """Return the recent rate of ended jobs per second; brokers have counted for `up_s`."""
        first = at - at % ENDED_INTERVAL_S + ENDED_INTERVAL_S - RATE_S
        seconds = min(at - first, up_s)
        count = sum(sum(one.outcomes.values()) for one in self.ended(at) if one.at >= first)
        return count / seconds if seconds >= 1.0 else 0.0

    @staticmethod
    def _recent(ended: Iterable[EndedJobs], at: float) -> tuple[EndedJobs, ...]:
        return tuple(one for one in ended if at - KEPT_S < one.at <= at + ENDED_INTERVAL_S)
