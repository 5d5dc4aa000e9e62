"""Where verl's trainer gets its batches: replay buffers that wait for the service's rollouts instead of polling.

`ServiceReplayBuffer` is verl's asynchronous one: it drops rows that are too old, and refills prompts that failed.
`DynamicReplayBuffer` has the service sample (DAPO): its batches are the groups that `open_batch(keep=…)` keeps, of as
many of verl's prompts as that takes. What is under way at a batch's end goes on while the policy learns.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from ...client.blocking.client import RolloutClient
from ...errors import RequestTimeout, UnknownBatch
from ..outage import Outage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...data.group import Group
    from ...wire.messages.jobs import Job
    from .prompts import Prompt
    from .rollouts import RolloutManager

REMEMBERED_BATCHES = 16
"""How long a prompt without a group may still get one, as a part of a later batch."""


class ServiceReplayBuffer(ReplayBufferAsync):  # type: ignore[misc]
    """verl's asynchronous replay buffer, woken by the rollouts themselves."""

    manager: RolloutManager
    """Set by `ServiceTrainer` when the training begins."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, float]]:
        """Return the keys of a batch, and what to log.

        Raises:
            ProrlError: what ended the rollouts.
        """
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        return batch, {**metrics, **self.manager.take_metrics()}

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:  # noqa: ARG002 - verl's
        self.manager.wait(self.poll_interval)
        return last_debug_time


class DynamicReplayBuffer(ServiceReplayBuffer):
    """Trains on the groups that the service keeps: `trainer.v1.prorl.keep=informative`."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._client: RolloutClient | None = None
        self._asked: dict[str, tuple[Prompt, int]] = {}
        """Prompts that may still get a group, and the batch that each was drawn for."""
        self._batches = 0

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, float]]:
        """Return the keys of a batch, and what to log.

        Raises:
            BatchFailed: too many prompts in a row could not be rolled out.
            ProrlError: as `RolloutClient.open_batch`.
        """
        if partition_id == "val":
            return super().sample(global_steps, partition_id, batch_size)
        tags: dict[str, dict[str, Any]] = {}
        for group in self._groups(batch_size):
            asked = self._asked.pop(group.prompt_id, None)
            if asked is None:
                self.manager.count("forgotten_groups")
                continue
            tags.update(self.manager.put(asked[0], group))
            self._forget([group.prompt_id])
        self._forget_old()
        batch = tq.KVBatchMeta(partition_id="train", keys=list(tags), tags=list(tags.values()))
        return batch, self.manager.take_metrics()

    def _groups(self, number: int) -> Iterator[Group]:
        """Yield so many groups that are kept."""
        service, given = self.manager.service, self.manager.options
        if self._client is None:
            self._client = RolloutClient(service.endpoint, keys=service.keys)
        staleness = None if self.max_off_policy_threshold is None else self.max_off_policy_threshold - 1
        options = {"keep": given.keep, "max_staleness": staleness, **given.batch}
        outage = Outage(given.away_s)
        self._batches += 1
        came = 0
        while came < number:
            try:
                size = self.manager.group_size
                with self._client.open_batch(number - came, size, **options) as batch:
                    outage.end()
                    batch.feed(self._jobs(number))
                    for group in batch:
                        came += 1
                        yield group
                    report = batch.report
                for what in ("dropped_groups", "given_up_groups", "launched", "failed") if report is not None else ():
                    self.manager.count(what, getattr(report, what))
            except (RequestTimeout, UnknownBatch) as error:
                time.sleep(outage.pause_s(error))

    def _jobs(self, more: int) -> Iterator[Job]:
        """Yield the jobs of verl's prompts, without end."""
        waiting = self.manager.waiting
        while True:
            if not waiting:
                self.refill_fn(more)
            prompt = waiting.popleft()
            self._asked[prompt.uid] = prompt, self._batches
            yield self.manager.job(prompt)

    def _forget_old(self) -> None:
        old = self._batches - REMEMBERED_BATCHES
        uids = [uid for uid, (_, batch) in self._asked.items() if batch <= old]
        for uid in uids:
            del self._asked[uid]
        self._forget(uids)

    def _forget(self, uids: list[str]) -> None:
        """Take prompts out of verl's queue; their rows stay."""
        if uids:
            tq.kv_clear(partition_id="train", keys=uids)
