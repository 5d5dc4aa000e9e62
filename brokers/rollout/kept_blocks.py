"""The blocks of trajectories that nodes keep (`keep = "node"`): who has them, who is to forget or send them. Pure.

The broker has a handle of each in the job's record or result, which the journal keeps. A block is released when it is
no longer needed: its result was acknowledged, its job restarted, its event was stale. A node that reports everything
says which it has; what it has beyond ours it forgets, and what it lacks is lost, like all that it had when it is gone.
A client that cannot reach a node asks for the relay: the node sends the block here, or says that it is lost. A job
whose block is lost runs again.

Nodes learn of released blocks with the second tick after, when the journal surely has the reason.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ...wire.messages.stages import ForgetBlocks, SendBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ...wire.messages.jobs import BlockHandle
    from ...wire.messages.stages import StageReport

ASK_AGAIN_S = 5.0
"""How long a node may take to send a block before it is asked again."""
IDS_AT_ONCE = 10_000


class KeptBlocks:
    """Times are the broker's clock, in seconds."""

    def __init__(self, lease_s: float) -> None:
        self.lost = 0
        """Blocks that were lost so far, and whose jobs run again."""
        self._lease_s = lease_s
        self._handles: dict[str, BlockHandle] = {}
        """By job."""
        self._jobs: dict[str, str] = {}
        """By block id."""
        self._of_node: defaultdict[str, set[str]] = defaultdict(set)
        """Block ids by node."""
        self._speakers: dict[str, str] = {}
        """The stage id under which each node reports its blocks."""
        self._nodes: dict[str, str] = {}
        """By that stage id."""
        self._awaited: dict[str, float] = {}
        """Nodes that have not reported since this process began, and until when they may."""
        self._relays: dict[str, float] = {}
        """Blocks that nodes are to send, and when to ask next."""
        self._lost: dict[str, None] = {}
        """Jobs whose blocks are lost."""
        self._released: list[tuple[str, str]] = []
        self._forgotten: list[tuple[str, str]] = []
        """Nodes and ids of released blocks: since the last tick, and since the one before it."""

    def __contains__(self, block_id: str) -> bool:
        return block_id in self._jobs

    def job_of(self, block_id: str) -> str | None:
        return self._jobs.get(block_id)

    def restore(self, job_id: str, handle: BlockHandle, now: float) -> None:
        """Take up what the journal has, at the start."""
        self.add(job_id, handle)
        self._awaited[handle.node] = now + self._lease_s

    def add(self, job_id: str, handle: BlockHandle) -> None:
        self._handles[job_id] = handle
        self._jobs[handle.block_id] = job_id
        self._of_node[handle.node].add(handle.block_id)

    def release(self, job_id: str) -> None:
        """Nobody needs a job's block any more."""
        handle = self._handles.pop(job_id, None)
        if handle is None:
            return
        self._lost.pop(job_id, None)
        self._relays.pop(handle.block_id, None)
        del self._jobs[handle.block_id]
        self._of_node[handle.node].discard(handle.block_id)
        if not self._of_node[handle.node]:
            del self._of_node[handle.node]
        self.release_block(handle)

    def release_block(self, handle: BlockHandle) -> None:
        """Nobody needs a block that is no job's."""
        self._released.append((handle.node, handle.block_id))

    def relay(self, job_ids: Iterable[str]) -> None:
        """Have nodes send the blocks of these jobs."""
        self._relays.update((self._handles[job_id].block_id, 0.0) for job_id in job_ids if job_id in self._handles)

    def reported(self, report: StageReport) -> None:
        """A node says which blocks it has."""
        if report.kept is None:
            return
        self._speakers[report.node] = report.stage_id
        self._nodes[report.stage_id] = report.node
        self._awaited.pop(report.node, None)
        there, ours = set(report.kept), self._of_node.get(report.node, set())
        self._released += [(report.node, block_id) for block_id in there - ours]
        self.lose(ours - there)

    def gone(self, stage_ids: Iterable[str]) -> None:
        """These stage processes have gone; a node goes with the one that speaks for it."""
        for stage_id in stage_ids:
            node = self._nodes.pop(stage_id, "")
            if node and self._speakers[node] == stage_id:
                del self._speakers[node]
                self.lose(self._of_node.get(node, ()))

    def lose(self, block_ids: Iterable[str]) -> None:
        self._lost.update((self._jobs[block_id], None) for block_id in block_ids if block_id in self._jobs)

    def take_lost(self, has_ended: Callable[[str], bool]) -> list[str]:
        """Return the jobs that are to run again; those that have not ended wait until they have, or restart."""
        found = [job_id for job_id in self._lost if has_ended(job_id)]
        for job_id in found:
            del self._lost[job_id]
        return found

    def tick(self, now: float) -> list[tuple[str, ForgetBlocks | SendBlocks]]:
        """Return what to tell whom."""
        for node in [node for node, until in self._awaited.items() if until <= now]:
            del self._awaited[node]
            self.lose(self._of_node.get(node, ()))
        forgotten, self._forgotten, self._released = self._forgotten, self._released, []
        asked = [block_id for block_id, at in self._relays.items() if at <= now]
        self._relays.update(dict.fromkeys(asked, now + ASK_AGAIN_S))
        wanted = [(self._handles[self._jobs[block_id]].node, block_id) for block_id in asked]
        reachable = self._speakers.keys() | self._awaited.keys()
        self.lose(block_id for node, block_id in wanted if node not in reachable)
        return [
            (speaker, command(tuple(block_ids[start : start + IDS_AT_ONCE])))
            for command, pairs in ((ForgetBlocks, forgotten), (SendBlocks, wanted))
            for node, block_ids in _by_node(pairs).items()
            if (speaker := self._speakers.get(node)) is not None
            for start in range(0, len(block_ids), IDS_AT_ONCE)
        ]


def _by_node(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for node, block_id in pairs:
        found[node].append(block_id)
    return found
