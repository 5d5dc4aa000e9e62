"""Replay buffers, from which verl's trainer gets its batches, woken by the service's rollouts.

`ServiceReplayBuffer` is verl's asynchronous one: it drops rows that are too old, and refills prompts that failed. With
`DynamicReplayBuffer` the service samples (DAPO): a batch is the groups that `open_batch(keep=…)` keeps, of as many of
verl's prompts as needed, and rollouts in flight at its end continue while the policy learns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...data.group import Group
    from ...wire.messages.jobs import Job
    from ..session import TrainerSession
    from .rollouts import Prompt, RolloutManager

REMEMBERED_BATCHES = 16
"""For how many batches a prompt without a group may still get one."""


class ServiceReplayBuffer(ReplayBufferAsync):  # type: ignore[misc]
    """verl's asynchronous replay buffer, woken by the rollouts."""

    manager: RolloutManager
    """Set by `ServiceTrainer` when the training begins."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, float]]:
        """Return the keys of a batch, and metrics to log.

        Raises:
            ProrlError: the error that ended the rollouts.
        """
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        return batch, metrics if partition_id == "val" else {**metrics, **self.manager.take_metrics()}

    def close(self) -> None:
        """Do nothing: the manager owns the rollouts."""

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:  # noqa: ARG002 - verl's
        self.manager.wait(self.poll_interval)
        return last_debug_time


class DynamicReplayBuffer(ServiceReplayBuffer):
    """Trains on the groups that the service keeps: `trainer.v1.prorl.keep=informative`.

    Drawn prompts leave verl's queue with their batch, so that a resumed training does not start with prompts that
    taught nothing; this buffer remembers them while the service may carry them over.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._session: TrainerSession | None = None
        self._asked: dict[str, tuple[Prompt, int]] = {}
        """Prompts that may still get a group, each with the batch that drew it."""
        self._drawn: list[Prompt] = []
        """Since the last batch was opened, in order."""
        self._batches = 0

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, float]]:
        """Return the keys of a batch, and metrics to log.

        Raises:
            BatchFailed: too many consecutive prompts could not be rolled out.
            NotTrainable: the rollouts of too many groups are too long.
            ProrlError: as `TrainerSession.groups`.
        """
        if partition_id == "val":
            return super().sample(global_steps, partition_id, batch_size)
        self._batches += 1
        drawn: set[str] = set()
        tags: dict[str, dict[str, Any]] = {}
        came = 0
        while came < batch_size:
            for group in self._groups(batch_size - came, drawn):
                prompt, _ = self._asked.pop(group.prompt_id, (None, 0))
                if prompt is None:
                    self.manager.count("forgotten_groups")
                elif found := self.manager.put(prompt, group):
                    tags.update(found)
                    came += 1
        self._forget(drawn)
        return tq.KVBatchMeta(partition_id="train", keys=list(tags), tags=list(tags.values())), (
            self.manager.take_metrics()
        )

    def close(self) -> None:
        """Close the client; its rollouts end with its session."""
        if self._session is not None:
            self._session.close()

    def _groups(self, number: int, drawn: set[str]) -> Iterator[Group]:
        """Yield `number` kept groups, and record the prompts drawn for them."""
        manager = self.manager
        self._session = self._session or manager.session()
        staleness = None if self.max_off_policy_threshold is None else self.max_off_policy_threshold - 1
        options = {"keep": manager.options.keep, "max_staleness": staleness}
        options |= {"model": manager.asked.model, "complete": manager.asked.names, **manager.options.batch}
        came = 0
        self._drawn = []

        def wanted() -> tuple[int, Iterator[Job]]:
            # After an outage, redraw prompts without a group first.
            manager.waiting.extendleft(one for one in reversed(self._drawn) if one.uid in self._asked)
            self._drawn = []
            return number - came, self._jobs(number, drawn)

        for group in self._session.groups(wanted, manager.group_size, **options):
            came += 1
            yield group
        report = self._session.report
        for what in ("dropped_groups", "given_up_groups", "launched", "failed") if report is not None else ():
            manager.count(what, getattr(report, what))

    def _jobs(self, more: int, drawn: set[str]) -> Iterator[Job]:
        """Yield the jobs of verl's prompts, endlessly, and record the prompts."""
        waiting = self.manager.waiting
        while True:
            if not waiting:
                self.refill_fn(more)
            prompt = waiting.popleft()
            self._drawn.append(prompt)
            drawn.add(prompt.uid)
            self._asked[prompt.uid] = prompt, self._batches
            yield self.manager.job(prompt)

    def _forget(self, drawn: set[str]) -> None:
        """Remove this batch's drawn prompts from verl's queue, and old ones from memory; rows stay."""
        if uids := drawn - {prompt.uid for prompt in self.manager.waiting}:
            tq.kv_clear(partition_id="train", keys=[*uids])
        old = self._batches - REMEMBERED_BATCHES
        self._asked = {uid: asked for uid, asked in self._asked.items() if asked[1] > old}
