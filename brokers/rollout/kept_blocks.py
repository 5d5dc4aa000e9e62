"""`KeptBlocks`: the handles of trajectory blocks that nodes store (`keep = "node"`). Pure.

A handle is in the job's record or result, and so in the journal; the broker stores blocks without a handle itself. A
block is released when its result is acknowledged, its job restarts or its event was stale. A node's full report lists
its blocks: unknown ones are released, and missing ones are lost, like all blocks of a node that does not report for a
lease (if only its broker died, its disk still has them). A job whose block is lost runs again. If a client cannot fetch
a block, or its node shuts down, the node sends the block to the broker.

Nodes learn of released blocks at the second tick afterwards, when the journal has the reason. A block that becomes a
job's until then stays: its end was resent to a broker that had restarted.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ...wire.messages.stages import ForgetBlocks, SendBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ...wire.messages.jobs import BlockHandle
    from ...wire.messages.stages import StageReport
    from ..journal.records import Finished

ASK_AGAIN_S = 5.0
"""Seconds after which a node is asked again for a block."""
IDS_AT_ONCE = 10_000


class KeptBlocks:
    """Times are the broker's clock, in seconds."""

    def __init__(self, lease_s: float) -> None:
        self.lost = 0
        """Number of lost blocks whose jobs ran again."""
        self._lease_s = lease_s
        self._handles: dict[str, BlockHandle] = {}
        """By job."""
        self._of_node: defaultdict[str, dict[str, str]] = defaultdict(dict)
        """Job ids by node and block id."""
        self._speakers: dict[str, str] = {}
        """The stage id under which each node reports its blocks."""
        self._awaited: dict[str, float] = {}
        """Nodes that have not reported since this process began or they were gone, and their deadlines."""
        self._relays: dict[str, float] = {}
        """Jobs whose blocks the broker wants, and when to ask their nodes next."""
        self._lost: dict[str, str] = {}
        """Jobs whose blocks are lost: their node if it is gone, empty if only the block is."""
        self._released: list[tuple[str, str]] = []
        self._forgotten: list[tuple[str, str]] = []
        """Nodes and ids of blocks released since the last tick, and since the one before."""

    def job_of(self, node: str, block_id: str) -> str | None:
        return self._of_node.get(node, {}).get(block_id)

    def restore(self, job_id: str, handle: BlockHandle | None, now: float) -> None:
        """Add a block named in the journal, at the start."""
        if handle is not None:
            self.add(job_id, handle)
            self._awaited[handle.node] = now + self._lease_s

    def add(self, job_id: str, handle: BlockHandle) -> None:
        """Record a job's block; another one that it had before is released."""
        if self._handles.get(job_id) not in (None, handle):
            self.release(job_id)
        self._handles[job_id] = handle
        self._of_node[handle.node][handle.block_id] = job_id

    def release(self, job_id: str) -> None:
        """Release a job's block, which its node then deletes."""
        handle = self._handles.pop(job_id, None)
        if handle is None:
            return
        self._lost.pop(job_id, None)
        self._relays.pop(job_id, None)
        del self._of_node[handle.node][handle.block_id]
        if not self._of_node[handle.node]:
            del self._of_node[handle.node]
        self.release_block(handle)

    def release_block(self, handle: BlockHandle) -> None:
        """Release a block that belongs to no job."""
        self._released.append((handle.node, handle.block_id))

    def relay(self, job_ids: Iterable[str]) -> None:
        """Have nodes send the blocks of these jobs to the broker."""
        self._relays.update((job_id, 0.0) for job_id in job_ids if job_id in self._handles)

    def reported(self, report: StageReport) -> None:
        """Compare a node's reported blocks with the expected ones."""
        if report.kept is None:
            return
        self._speakers[report.node] = report.stage_id
        self._awaited.pop(report.node, None)
        there, ours = set(report.kept), self._of_node.get(report.node, {})
        self._released += [(report.node, block_id) for block_id in there - ours.keys()]
        self.lose(job_id for block_id, job_id in ours.items() if block_id not in there)
        for block_id in there & ours.keys():
            if self._lost.get(ours[block_id]) == report.node:
                del self._lost[ours[block_id]]

    def gone(self, stage_ids: Iterable[str], now: float) -> None:
        """Give the nodes that reported under these stage ids a lease to report their blocks again."""
        gone = set(stage_ids)
        for node in [node for node, speaker in self._speakers.items() if speaker in gone] if gone else ():
            del self._speakers[node]
            self._awaited[node] = now + self._lease_s

    def lose(self, job_ids: Iterable[str]) -> None:
        self._lost.update(dict.fromkeys(job_ids, ""))

    def take_lost(self, ended: Callable[[str], Finished | None]) -> list[tuple[Finished, BlockHandle]]:
        """Return the results and handles of jobs to run again; jobs that have not ended stay queued here."""
        found = [finished for job_id in self._lost if (finished := ended(job_id)) is not None]
        for finished in found:
            del self._lost[finished.result.job_id]
        return [(finished, self._handles[finished.result.job_id]) for finished in found]

    def tick(self, now: float) -> list[tuple[str, ForgetBlocks | SendBlocks]]:
        """Return the commands to send, by stage id."""
        for node in [node for node, until in self._awaited.items() if until <= now]:
            del self._awaited[node]
            self._lose_node(node)
        released = ((node, block_id) for node, block_id in self._forgotten if self.job_of(node, block_id) is None)
        forgotten, self._forgotten, self._released = list(released), self._released, []
        asked = {job_id: self._handles[job_id] for job_id, at in self._relays.items() if at <= now}
        self._relays.update(dict.fromkeys(asked, now + ASK_AGAIN_S))
        reachable = self._speakers.keys() | self._awaited.keys()
        self.lose(job_id for job_id, handle in asked.items() if handle.node not in reachable)
        wanted = [(handle.node, handle.block_id) for handle in asked.values()]
        return [
            (speaker, command(tuple(block_ids[start : start + IDS_AT_ONCE])))
            for command, pairs in ((ForgetBlocks, forgotten), (SendBlocks, wanted))
            for node, block_ids in _by_node(pairs).items()
            if (speaker := self._speakers.get(node)) is not None
            for start in range(0, len(block_ids), IDS_AT_ONCE)
        ]

    def _lose_node(self, node: str) -> None:
        for job_id in self._of_node.get(node, {}).values():
            self._lost.setdefault(job_id, node)


def _by_node(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for node, block_id in pairs:
        found[node].append(block_id)
    return found
