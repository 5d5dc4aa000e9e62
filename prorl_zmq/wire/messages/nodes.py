"""Nodes as the rollout broker knows them: what they say of themselves, who is here, and what was lost with others."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from msgspec import Meta
from msgspec.structs import replace

from .base import FOR_ALL, Identifier, Part, Reply, Request, Roles, ShortText
from .jobs import Outcome, Phase

IMAGES_LIMIT = 64
"""Most images that a node names."""
CHANGE_SHARE = 0.05
Bytes = Annotated[int, Meta(ge=0, le=2**62)]


class NodeFacts(Part, frozen=True, kw_only=True):
    """What a node says of its machine; for people, nothing is decided by it."""

    host: ShortText = ""
    allocation: ShortText = ""
    """What a scheduler has given it."""
    version: ShortText = ""
    """Of its package."""
    images: Annotated[tuple[ShortText, ...], Meta(max_length=IMAGES_LIMIT)] = ()
    """Names of the images that are there."""
    sandboxes: Annotated[int, Meta(ge=0)] = 0
    """Those that are open in its run folder."""
    memory_free_bytes: Bytes = 0
    memory_total_bytes: Bytes = 0
    """Of the machine, or what the node's control group may have; 0: not known."""
    disk_free_bytes: Bytes = 0
    disk_total_bytes: Bytes = 0
    """Where its run folder is."""

    def differs(self, before: NodeFacts) -> bool:
        """Return whether these are worth a message: what moves all the time by more than a share, or others at all."""
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
    """List the nodes in the order of their names; those after a name, for who has the ones before."""

    roles: ClassVar[Roles] = FOR_ALL
    after: Identifier | None = None


class NodeState(StrEnum):
    """In the order in which the worst of several is told."""

    READY = "ready"
    DRAINING = "draining"
    """It takes nothing new, and ends what it has."""
    SILENT = "silent"
    """It has not reported for a while, and is given nothing new; it keeps what it holds until its lease is over."""
    LOST = "lost"


class NodeStatus(Part, frozen=True, kw_only=True):
    """One node, as a rollout broker sees it."""

    node: str
    state: NodeState
    slots: dict[Phase, int] = {}
    """By stage, those that this broker may use."""
    busy: dict[Phase, int] = {}
    """Jobs that hold one."""
    silent_s: float
    """Seconds since its last report; of one that is lost, since that was noticed."""
    lease_s: float = 0.0
    """How long it may be silent before it is lost; 0: it is."""
    facts: NodeFacts | None = None
    """As its member said last; None: it has said nothing of the machine."""


class LostNode(Part, frozen=True, kw_only=True):
    """A node whose lease has ended, and what became of the jobs that were there. Those not named have not ended."""

    node: str
    host: str = ""
    died: bool
    """Its connection ended; else it fell silent."""
    ago_s: float
    is_back: bool = False
    jobs: int
    """Jobs that it held, or whose sandboxes it had: they were restarted elsewhere, or had no attempt left."""
    completed: dict[str, int] = {}
    """How many have completed since, by the node where they did."""
    ended: dict[Outcome, int] = {}
    """How many have ended otherwise."""
    lost_again: int = 0
    """How many were lost with another node since, and are counted there."""


class NodeList(Reply, frozen=True, kw_only=True):
    """Answer to `ListNodes`."""

    nodes: tuple[NodeStatus, ...] = ()
    more: bool = False
    """There are nodes after these."""
    lost: tuple[LostNode, ...] = ()
    """The last ones, the newest first."""
