"""Two ways of collecting batches of informative groups through the same service: for bench/dapo.py.

- `through_batches`: `open_batch`, one batch after the other, each opened when the last one is complete.
- `batch_by_batch`: as in figure 3 of the ProRL Agent paper and in verl's synchronous DAPO recipe
  (`dapo_ray_trainer.py`): generate a whole batch of prompts, wait for all, discard groups with equal rewards, repeat
  until there are enough, and discard the surplus. Here with as many prompts as wanted groups, and with three times as
  many, as in verl's scripts (`gen_prompt_bsz=$((train_prompt_bsz * 3))`).

Both are one client with the public interface, on a service of their own, and both submit the same prompts in the same
order; a trainer that takes no time is assumed. The second way runs with both numbers of prompts at the same time, since
its slots mostly wait.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import msgspec
from dapo_account import Account, account, alike, bound_s, until
from dapo_prompts import GROUP, Ran
from service import BenchService

from prorl_zmq import Job, RolloutClient
from prorl_zmq.wire.messages.jobs import Sampling

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from prorl_zmq import Trajectory
    from prorl_zmq.wire.messages.batches import CarryOver

LIMIT_S = 120.0
"""Longest wait for one batch."""


@dataclass(frozen=True)
class Size:
    """How much is collected."""

    slots: int = 64
    """Of RUN."""
    groups: int = 32
    """Of a batch."""
    batches: int = 10
    mean_s: float = 0.25
    """Of RUN."""

    def service(self) -> BenchService:
        """Make a service for it: INIT and EVAL take no time."""
        return BenchService([("init", 8), ("run", self.slots), ("eval", 16)])


@dataclass
class Collected:
    """What a way came to."""

    size: Size
    started: float = field(default_factory=time.monotonic)
    complete: list[float] = field(default_factory=list)
    """When each batch was."""
    kept: list[set[int]] = field(default_factory=list)
    """The prompts of each batch."""
    ran: list[Ran] = field(default_factory=list)
    """All that ran until the last one was."""

    @property
    def seconds(self) -> float:
        """For each batch."""
        return (self.complete[-1] - self.started) / len(self.complete)

    def account(self) -> Account:
        """Say what became of all that ran."""
        return account(self.ran, set().union(*self.kept))

    def over_bound(self, batches: int) -> float:
        """Give the time of the first batches over the least that their groups, and those found all alike, allow."""
        end = self.complete[batches - 1]
        prompts = alike(until(self.ran, end)).union(*self.kept[:batches])
        return (end - self.started) / bound_s(prompts, self.size.mean_s, self.size.slots)

    def add(self, prompts: set[int]) -> None:
        """A batch is complete."""
        self.complete.append(time.monotonic())
        self.kept.append(prompts)

    def read(self, ledger: Path) -> None:
        """Read what ran, once the service has ended: what was under way then is cut short, and written down too."""
        ran = [msgspec.json.decode(line, type=Ran) for line in ledger.read_bytes().splitlines()]
        self.ran = until(ran, self.complete[-1])


def ours(size: Size, folder: Path, carry: CarryOver) -> Collected:
    """Collect through batches, on a service of its own."""
    ledger = folder / carry
    with size.service() as service:
        collected = through_batches(service.front_door, ledger, size, carry)
    collected.read(ledger)
    return collected


def theirs(size: Size, folder: Path, times: Sequence[int]) -> list[Collected]:
    """Collect batch by batch, with so many times the prompts each, on services of their own at one time."""
    ways = []
    with ExitStack() as stack:
        services = [stack.enter_context(size.service()) for _ in times]
        for each, service in zip(times, services, strict=True):
            ways.append(_BatchByBatch(service.front_door, folder / f"times-{each}", size, each))
        for way in ways:
            way.start()
        for way in ways:
            way.join()
    return [way.result() for way in ways]


class _BatchByBatch(threading.Thread):
    """Collects concurrently with others."""

    def __init__(self, front_door: str, ledger: Path, size: Size, times: int) -> None:
        super().__init__()
        self._ledger = ledger
        self._collect = partial(batch_by_batch, front_door, ledger, size, times)
        self._collected: Collected | None = None

    def run(self) -> None:
        self._collected = self._collect()

    def result(self) -> Collected:
        """Give what came of it, once the service has ended."""
        if self._collected is None:
            raise RuntimeError("the collection failed; what it raised is above")
        self._collected.read(self._ledger)
        return self._collected


def through_batches(front_door: str, ledger: Path, size: Size, carry: CarryOver) -> Collected:
    """Collect with `open_batch`."""
    prompts = (_prompt(number, ledger, size) for number in count())
    with RolloutClient(front_door, timeout_s=LIMIT_S) as client:
        collected = Collected(size)
        for _ in range(size.batches):
            with client.open_batch(target_groups=size.groups, group_size=GROUP, carry=carry) as batch:
                batch.feed(prompts)
                collected.add({_number(group.prompt_id) for group in batch})
    return collected


def batch_by_batch(front_door: str, ledger: Path, size: Size, times: int) -> Collected:
    """Collect by whole batches of prompts, `times` as many as groups are wanted."""
    prompts = (_prompt(number, ledger, size) for number in count())
    with RolloutClient(front_door, timeout_s=LIMIT_S) as client:
        collected = Collected(size)
        for _ in range(size.batches):
            kept: list[int] = []
            while len(kept) < size.groups:
                client.submit(job for _ in range(times * size.groups) for job in _rollouts(next(prompts)))
                groups: dict[str, list[Trajectory]] = {}
                for trajectory in client.stream(timeout_s=LIMIT_S):
                    groups.setdefault(trajectory.group_id, []).append(trajectory)
                kept += [_number(name) for name, group in groups.items() if len({one.reward for one in group}) > 1]
            collected.add(set(kept[: size.groups]))
    return collected


def _prompt(number: int, ledger: Path, size: Size) -> Job:
    instance = {"prompt": number, "mean_s": size.mean_s, "ledger": str(ledger)}
    return Job(task="graded", instance=instance, job_id=f"prompt-{number}", sampling=Sampling(seed=0))


def _number(prompt_id: str) -> int:
    return int(prompt_id.removeprefix("prompt-"))


def _rollouts(prompt: Job) -> Iterator[Job]:
    """Make the jobs of a prompt."""
    for place in range(GROUP):
        job_id = f"{prompt.job_id}.{place}"
        sampling = Sampling(seed=place)
        yield msgspec.structs.replace(prompt, job_id=job_id, group_id=prompt.job_id, sampling=sampling)
