"""Results as a client receives them: `Delivery` reads one reply, `CollectState` returns its results to the caller.

A trajectory's block follows its result in the reply, or a node keeps it: `fill` adds those after they were fetched by
their handles. `CollectState` makes delivery exactly-once for a live client: it drops results that it has seen, and
acknowledges a result only with the request after it was returned. No sockets, no clock.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..errors import JobsLost, MalformedMessage
from ..wire import codec
from ..wire.messages.base import new_id
from ..wire.messages.batches import GroupGiven
from ..wire.messages.front_door import Collect, Collected
from ..wire.messages.jobs import Outcome, Result
from .requests import read_reply, read_trajectory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ..data.trajectory import Trajectory
    from ..wire.messages.batches import NextGroup
    from ..wire.messages.jobs import BlockHandle
    from .requests import Received

SEEN_LIMIT = 20_000
"""Ids of received results that a client remembers: many more than can be unacknowledged."""


log = logging.getLogger("prorl.client")


class Delivery:
    """One reply to a request for results, made from the request and the reply's frames.

    Raises:
        ProrlError: the service refused the request with this error.
        MalformedMessage: the frames are not a reply to the request.
    """

    def __init__(self, request: Collect | NextGroup, frames: Sequence[Received]) -> None:
        self.reply: Any = read_reply(frames)
        """A `Collected` or a `GroupGiven`."""
        if not isinstance(self.reply, Collected if isinstance(request, Collect) else GroupGiven):
            raise MalformedMessage(f"the service answered a {type(request).__name__} with {type(self.reply).__name__}")
        self.handles: dict[str, BlockHandle] = {}
        """Handles of the blocks that nodes keep, by job."""
        self._blocks: dict[str, Received] = {}
        """Blocks of the results that have tokens, by job."""
        self._results: list[Result] = []
        rest = iter(frames[1:])
        try:
            for result in self.reply.results if isinstance(self.reply, Collected) else _rollouts(self.reply, rest):
                self._results.append(result)
                if result.kept is not None:
                    self.handles[result.job_id] = result.kept
                elif result.tokens:
                    self._blocks[result.job_id] = next(rest)
        except StopIteration:
            job_id = self._results[-1].job_id
            raise MalformedMessage(f"the trajectory of job {job_id} is missing from the reply") from None

    def fill(self, blocks: Mapping[str, Received]) -> list[str]:
        """Add fetched blocks, by job, and return the jobs whose blocks are missing.

        A result without its block is omitted; a group without one is omitted as a whole.
        """
        from ..data.trajectory import block_bytes  # imports numpy, which commands without results do not need

        for result in self._results:
            block = blocks.get(result.job_id)
            if block is not None and len(block) == block_bytes(result.tokens, result.turns, result.records):
                self._blocks[result.job_id] = block
        lacking = [job_id for job_id in self.handles if job_id not in self._blocks]
        if lacking and isinstance(self.reply, Collected):
            self._results = [result for result in self._results if result.job_id not in lacking]
            remaining = self.reply.remaining + len(lacking)
            self.reply = replace(self.reply, results=tuple(self._results), remaining=remaining)
        elif lacking:
            self._results = []
            self.reply = replace(self.reply, group_id="", prompt_id="", rollouts=0)
        return lacking

    def trajectories(self) -> list[tuple[Trajectory, Received]]:
        """Return the results as trajectories, each with the block that its arrays are views of.

        One that cannot be read is an infrastructure error without tokens: the caller gets it once, and then the others.
        """
        return [_read(one, self._blocks.get(one.job_id, b"")) for one in self._results]


def _rollouts(given: GroupGiven, rest: Iterator[Received]) -> Iterator[Result]:
    for _ in range(given.rollouts):
        packed = next(rest, None)
        if packed is None:
            raise MalformedMessage("a rollout of the group is missing from the reply")
        yield codec.decode(packed if isinstance(packed, bytes) else packed.bytes, Result)


def _read(result: Result, block: Received) -> tuple[Trajectory, Received]:
    try:
        return read_trajectory(result, block), block
    except MalformedMessage as error:
        unread = MalformedMessage(f"the stage process wrote a trajectory that cannot be read: {error.message}")
        log.warning("job %s: %s", result.job_id, unread.message)
        bare = Result(
            job_id=result.job_id,
            task=result.task,
            outcome=Outcome.INFRASTRUCTURE_ERROR,
            group_id=result.group_id,
            attempt=result.attempt,
            error=unread.info(),
            model=result.model,
            backend=result.backend,
        )
        return read_trajectory(bare, b""), b""


class CollectState:
    """What one client has received, returned to its caller, and acknowledged."""

    def __init__(self, session: str, client_id: str) -> None:
        self.session = session
        self._client_id = client_id
        self._received: deque[Trajectory] = deque()
        self._handed_over: list[str] = []
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._expected: dict[str, str] = {}
        self._lost: list[str] = []
        self._aside: dict[str, Trajectory | None] = {}
        """Trajectories with a receiver of their own, by job; None until received."""
        self._journal_id = ""
        self.remaining = 0
        """Jobs of the session whose results this client did not have at the last reply."""

    @property
    def waiting(self) -> int:
        """Trajectories received and not returned; no request is made while there are any."""
        return len(self._received)

    def begin(self, job_ids: Iterable[str]) -> list[str]:
        """Forget results of jobs about to be submitted, since the id of an ended job may be reused. Return those."""
        return [job_id for job_id in job_ids if self._seen.pop(job_id, "") is None]

    def refused(self, begun: Iterable[str]) -> None:
        """Undo `begin`."""
        self._seen.update(dict.fromkeys(begun))

    def expect(self, job_ids: Iterable[str], journal_id: str) -> None:
        """Record accepted jobs and their journal; some may have been received, if the reply was lost."""
        for job_id in job_ids:
            if job_id not in self._seen:
                self._expected[job_id] = journal_id
        self._journal_id = ""  # so that the next reply is compared with all of `_expected`

    def set_aside(self, job_id: str) -> None:
        """Keep this job's trajectory for `aside`."""
        self._aside[job_id] = None

    def aside(self, job_id: str) -> Trajectory | None:
        """Return the kept trajectory, if it was received."""
        return self._aside.get(job_id)

    def forget_aside(self, job_id: str) -> None:
        """Drop a trajectory that its receiver has, or no longer needs."""
        self._aside.pop(job_id, None)
        self._expected.pop(job_id, None)
        self._lost = [each for each in self._lost if each != job_id]
        self._seen[job_id] = None  # a delivery in transit is acknowledged

    def is_lost(self, job_id: str) -> bool:
        """Return whether this job's journal is gone."""
        return job_id in self._lost

    def check_lost(self) -> None:
        """Raise `JobsLost` once for jobs whose journal is gone, after all results have been returned."""
        if self._lost and not self._received:
            lost, self._lost = self._lost, []
            raise JobsLost(
                f"{len(lost)} accepted jobs are gone: the rollout broker was restarted without the journal that had "
                "them (cleared, or in memory); submit them again if they are still wanted",
                count=len(lost),
                job_ids=" ".join(lost),
            )

    def take(self, most: int) -> list[Trajectory]:
        taken = [self._received.popleft() for _ in range(min(most, len(self._received)))]
        self._handed_over += [trajectory.job_id for trajectory in taken]
        return taken

    def request(self, max_results: int, wait_s: float, *, goodbye: bool = False) -> Collect:
        """Return the next request, which acknowledges all returned results."""
        return Collect(
            new_id(),
            self.session,
            self._client_id,
            tuple(self._handed_over),
            max_results=max_results,
            wait_s=wait_s,
            goodbye=goodbye,
        )

    def receive(self, request: Collect, delivery: Delivery) -> None:
        reply, new = delivery.reply, delivery.trajectories()
        acknowledged = set(request.acknowledge)
        self._handed_over = [job_id for job_id in self._handed_over if job_id not in acknowledged]
        self.remaining = reply.remaining
        if reply.journal_id != self._journal_id:
            self._journal_id = reply.journal_id
            self._lost += [job_id for job_id, journal_id in self._expected.items() if journal_id != reply.journal_id]
            self._expected = {key: value for key, value in self._expected.items() if value == reply.journal_id}
        for trajectory, _ in new:
            self._expected.pop(trajectory.job_id, None)
            if trajectory.job_id in self._aside:
                self._aside[trajectory.job_id] = trajectory
            elif trajectory.job_id in self._seen:
                self._handed_over.append(trajectory.job_id)  # a second delivery: its acknowledgement was lost
            else:
                self._seen[trajectory.job_id] = None
                self._received.append(trajectory)
        while len(self._seen) > SEEN_LIMIT:
            self._seen.popitem(last=False)
