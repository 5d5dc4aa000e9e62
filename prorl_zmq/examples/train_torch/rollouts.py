"""Batches of groups from the service, one after the other, on the main thread."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ...errors import RequestTimeout
from .records import BatchRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...client.blocking.batch import Batch
    from ...client.blocking.client import RolloutClient
    from ...data.group import Group
    from .display import Display
    from .tasks import PromptStream

POLL_S = 0.5
"""How often it looks whether all is well while it waits for a group."""
PROMPTS_PER_GROUP = 8
"""Prompts that a batch may try for each group that it is to keep: a policy that knows all tasks agrees with itself."""


class Collected(NamedTuple):
    """A batch that has ended."""

    groups: list[Group]
    record: BatchRecord


class Rollouts:
    """Opens batches and collects their groups; one batch at a time."""

    def __init__(
        self,
        client: RolloutClient,
        prompts: PromptStream,
        groups: int,
        group_size: int,
        max_staleness: int,
        clock: Callable[[], float],
        check: Callable[[], None],
        display: Display,
    ) -> None:
        self._client = client
        self._prompts = prompts
        self._groups = groups
        self._group_size = group_size
        self._max_staleness = max_staleness
        self._clock = clock
        self._check = check
        self._display = display
        self._batch: Batch | None = None
        self._opened_s = 0.0

    def open(self) -> None:
        """Have the service begin with the next batch, and with what the last one left."""
        self._batch = self._client.open_batch(
            self._groups, self._group_size, keep="informative", carry="running", max_staleness=self._max_staleness
        )
        self._opened_s = self._clock()
        self._batch.feed(islice(self._prompts, PROMPTS_PER_GROUP * self._groups))

    def collect(self) -> Collected:
        """Wait for the groups of the batch that is open, and close it.

        Raises:
            ProrlError: what `check` raises, or the service stopped answering.
        """
        assert self._batch is not None
        batch, groups = self._batch, []
        while True:
            self._check()
            try:
                group = batch.next_group(POLL_S)
            except RequestTimeout:
                self._display.collecting(batch.status)
                continue
            if group is None:
                break
            groups.append(group)
            self._display.collecting(batch.status)
        met_s = self._clock()
        batch.close()
        self._batch = None
        report = batch.report
        assert report is not None
        spreads = (report.kept.reward, report.dropped.reward)
        count = sum(spread.count for spread in spreads)
        record = BatchRecord(
            reward=sum(spread.mean * spread.count for spread in spreads) / max(count, 1),
            rollouts=report.completed,
            kept_groups=report.kept_groups,
            dropped_groups=report.dropped_groups,
            unused_rollouts=sum(report.wasted.values()),
            opened_s=self._opened_s,
            met_s=met_s,
        )
        return Collected(groups, record)
