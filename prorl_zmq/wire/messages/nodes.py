"""Nodes as the rollout broker sees them: what they report, their state, and what was lost with lost ones."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from msgspec import Meta
from msgspec.structs import replace

from .base import FOR_ALL, Identifier, Part, Reply, Request, Roles, ShortText
from .jobs import Outcome, Phase

IMAGES_LIMIT = 64
"""Most images that a node reports."""
CHANGE_SHARE = 0.05
Bytes = Annotated[int, Meta(ge=0, le=2**62)]


class NodeFacts(Part, frozen=True, kw_only=True):
    """What a node reports about its machine; for people only, no decision depends on it."""

    host: ShortText = ""
    allocation: ShortText = ""
    """The scheduler's allocation."""
    version: ShortText = ""
    """Of its prorl-zmq package."""
    images: Annotated[tuple[ShortText, ...], Meta(max_length=IMAGES_LIMIT)] = ()
    """Names of the installed images."""
    sandboxes: Annotated[int, Meta(ge=0)] = 0
    """Open sandboxes in its run folder."""
    memory_free_bytes: Bytes = 0
    memory_total_bytes: Bytes = 0
    """Of the machine, or the limit of the node's control group; 0: not known."""
    disk_free_bytes: Bytes = 0
    disk_total_bytes: Bytes = 0
    """Of the file system of its run folder."""

    def differs(self, before: NodeFacts) -> bool:
        """Return whether to report: a varying value moved by more than `CHANGE_SHARE`, or any other one changed."""
        moving = (
            (self.memory_free_bytes - before.memory_free_bytes, self.memory_total_bytes),
            (self.disk_free_bytes - before.disk_free_bytes, self.disk_total_bytes),
            (self.sandboxes - before.sandboxes, before.sandboxes),
        )
        same = replace(
            before,
            memory_free_bytes=self.memory_free_bytes,
            disk_free_bytes=self.disk_free_bytes,
            sandboxes=self.sandboxes,
        )
        return self != same or any(abs(change) > CHANGE_SHARE * whole for change, whole in moving)


class ListNodes(Request, frozen=True):
    """List the nodes ordered by name, or those after a name, to continue a list."""

    roles: ClassVar[Roles] = FOR_ALL
    after: Identifier | None = None


class NodeState(StrEnum):
    """Ordered: of several states the last one is reported."""

    READY = "ready"
    DRAINING = "draining"
    """It accepts nothing new and finishes what it has."""
    SILENT = "silent"
    """It has not reported for a while and gets nothing new; it keeps its jobs until its lease expires."""
    LOST = "lost"


class NodeStatus(Part, frozen=True, kw_only=True):
    """One node, as a rollout broker sees it."""

    node: str
    state: NodeState
    slots: dict[Phase, int] = {}
    """By stage, the slots that this broker may use."""
    busy: dict[Phase, int] = {}
    """Occupied slots."""
    silent_s: float
    """Seconds since its last report; for a lost node, since the loss was noticed."""
    lease_s: float = 0.0
    """How long it may be silent before it counts as lost; 0: it is lost."""
    facts: NodeFacts | None = None
    """The member's last report; None: none yet."""


class LostNode(Part, frozen=True, kw_only=True):
    """A node whose lease has expired, and the fate of its jobs. Jobs in none of the counts have not ended."""

    node: str
    host: str = ""
    died: bool
    """Its connection ended; otherwise it fell silent."""
    ago_s: float
    is_back: bool = False
    jobs: int
    """Jobs that it ran, or whose sandboxes it had: they were restarted elsewhere, or had no attempt left."""
    completed: dict[str, int] = {}
    """Jobs that have completed since, by node."""
    ended: dict[Outcome, int] = {}
    """Jobs that have ended otherwise, by outcome."""
    lost_again: int = 0
    """Jobs that were lost again with another node, and are counted there."""


class NodeList(Reply, frozen=True, kw_only=True):
    """Answer to `ListNodes`."""

    nodes: tuple[NodeStatus, ...] = ()
    more: bool = False
    """There are nodes after these."""
    lost: tuple[LostNode, ...] = ()
    """The last lost nodes, the newest first."""
