"""`Overview`: the state of a whole service at one moment, as a page or a terminal shows it. Plain data."""

from __future__ import annotations

from ..service.node_rows import NodeRow
from ..wire.messages.backends import BackendList
from ..wire.messages.base import Part
from ..wire.messages.front_door import ServiceStatus
from ..wire.messages.nodes import LostNode
from ..wire.messages.watching import EndedJobs, JobRow


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
