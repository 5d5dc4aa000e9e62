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
from ..session import Outage

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
        return batch, metrics if partition_id == "val" else {**metrics, **self.manager.take_metrics()}

    def close(self) -> None:
        """Nothing: the rollouts are the manager's."""

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:  # noqa: ARG002 - verl's
        self.manager.wait(self.poll_interval)
        return last_debug_time


class DynamicReplayBuffer(ServiceReplayBuffer):
    """Trains on the groups that the service keeps: `trainer.v1.prorl.keep=informative`.

    Drawn prompts leave verl's queue with their batch, so that a training that is resumed does not begin with those that
    taught nothing; they are remembered here as long as the service may carry them over.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._client: RolloutClient | None = None
        self._asked: dict[str, tuple[Prompt, int]] = {}
        """Prompts that may still get a group, and the batch that each was drawn for."""
        self._drawn: set[str] = set()
        """Prompts of this batch that are in verl's queue."""
        self._batches = 0

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, float]]:
        """Return the keys of a batch, and what to log.

        Raises:
            BatchFailed: too many prompts in a row could not be rolled out.
            NotTrainable: the rollouts of too many groups are too long.
            ProrlError: as `RolloutClient.open_batch`.
        """
        if partition_id == "val":
            return super().sample(global_steps, partition_id, batch_size)
        self._batches += 1
        tags: dict[str, dict[str, Any]] = {}
        came = 0
        while came < batch_size:
            for group in self._groups(batch_size - came):
                prompt, _ = self._asked.pop(group.prompt_id, (None, 0))
                if prompt is None:
                    self.manager.count("forgotten_groups")
                elif found := self.manager.put(prompt, group):
                    tags.update(found)
                    came += 1
        self._forget()
        batch = tq.KVBatchMeta(partition_id="train", keys=list(tags), tags=list(tags.values()))
        return batch, self.manager.take_metrics()

    def close(self) -> None:
        """Close the client; what it has under way ends with its session."""
        if self._client is not None:
            self._client.close()

    def _groups(self, number: int) -> Iterator[Group]:
        """Yield so many groups that are kept."""
        service, given = self.manager.service, self.manager.options
        if self._client is None:
            self._client = RolloutClient(service.endpoint, keys=service.keys)
        staleness = None if self.max_off_policy_threshold is None else self.max_off_policy_threshold - 1
        options = {"keep": given.keep, "max_staleness": staleness, **given.batch}
        outage = Outage(given.away_s)
        came = 0
        while came < number:
            drawn: list[Prompt] = []
            try:
                with self._client.open_batch(number - came, self.manager.group_size, **options) as batch:
                    outage.end()
                    batch.feed(self._jobs(drawn, number))
                    for group in batch:
                        came += 1
                        yield group
                    report = batch.report
                for what in ("dropped_groups", "given_up_groups", "launched", "failed") if report is not None else ():
                    self.manager.count(what, getattr(report, what))
            except (RequestTimeout, UnknownBatch) as error:
                self.manager.waiting.extendleft(one for one in reversed(drawn) if one.uid in self._asked)
                time.sleep(outage.pause_s(error))

    def _jobs(self, drawn: list[Prompt], more: int) -> Iterator[Job]:
        """Yield the jobs of verl's prompts, without end, and note these."""
        waiting = self.manager.waiting
        while True:
            if not waiting:
                self.refill_fn(more)
            prompt = waiting.popleft()
            drawn.append(prompt)
            self._drawn.add(prompt.uid)
            self._asked[prompt.uid] = prompt, self._batches
            yield self.manager.job(prompt)

    def _forget(self) -> None:
        """Take what this batch has drawn out of verl's queue, and what is old out of memory; rows stay."""
        if uids := self._drawn - {prompt.uid for prompt in self.manager.waiting}:
            tq.kv_clear(partition_id="train", keys=[*uids])
        self._drawn.clear()
        old = self._batches - REMEMBERED_BATCHES
        self._asked = {uid: asked for uid, asked in self._asked.items() if asked[1] > old}
