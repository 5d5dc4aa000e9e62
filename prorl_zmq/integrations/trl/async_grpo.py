"""`RolloutWorker` and `WeightTransfer`: replacements of the parts of TRL's `AsyncGRPOTrainer`.

Rollouts continue while the trainer learns. The worker is at most `ahead` steps' samples ahead of the trainer, not
counting the batch that is being collected.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import deque
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from ...client.blocking.client import RolloutClient
from ...data.rows import rows_of
from ...errors import Closed, ConfigError, InternalError, NotTrainable, RequestTimeout
from ...weights_publisher import WeightsPublisher
from ...wire.messages.base import POLICY
from ..dataset_rows import job_maker, of_prompt
from ..recorded import Asked
from ..session import Sample, TrainerSession, check_too_long, check_version
from .grpo import TESTED, sampling_of_args

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ...data.group import Group
    from ...wire.messages.jobs import Job
    from ..dataset_rows import JobMaker
    from ..session import TooLong

NO_SPREAD = 1e-8


class RolloutWorker:
    """Continuously rolls out prompts by the service for TRL's `AsyncGRPOTrainer`; pass it as `rollout_worker`.

    Each segment of a trajectory becomes a sample; all samples of one trajectory have its GRPO advantage: (reward -
    mean) / standard deviation, over the group. A sample's `model_version` is that of its oldest token. The worker waits
    for an unavailable service; `check_health` has the limit. In a distributed trainer every process makes a worker, and
    only the main process's is started.

    Args:
        rows: the data set, such as a `datasets.Dataset`; prompts are drawn at random.
        args: the trainer's `AsyncGRPOConfig`: group size, staleness, and sampling.
        connect: opens the client, in a thread of the worker; by default that of `prorl serve` without a topology file.
        make_job: makes a row's job, by default from its columns `task` and `instance`.
        too_long: what happens to a sample whose response has more than `max_completion_length` tokens: `drop` (counted
            as `rollouts/dropped_total`), or `truncate`.
        ahead: steps' worth of samples that may wait for the trainer.
        seed: of the order of prompts.
        batch_options: options of `open_batch`, such as `keep="all"` (by default groups whose rewards are all equal are
            dropped, since they teach nothing).
        model: the model of the service that rolls out: a `name` of `[[backends]]`.

    Raises:
        ImportError: TRL is not installed.
        ConfigError: the data set is empty, a step is not a whole number of groups, or an option is invalid.
        InvalidJob: the first row cannot be made into a job.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        args: Any,
        *,
        connect: Callable[[], RolloutClient] = RolloutClient,
        make_job: JobMaker | None = None,
        too_long: TooLong = "drop",
        ahead: float = 1.0,
        seed: int = 0,
        batch_options: Mapping[str, Any] | None = None,
        model: str = POLICY,
    ) -> None:
        check_version("trl", TESTED)
        check_too_long(too_long)
        if not len(rows):
            raise ConfigError("the data set has no rows", key="rows")
        self._samples_per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._size: int = getattr(args, "num_generations", 1)
        if self._samples_per_step % self._size:
            raise ConfigError(
                f"a step has {self._samples_per_step} samples, which are not whole groups of num_generations = "
                f"{self._size}",
                key="num_generations",
            )
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._rows = rows
        self._args = args
        self._sampling = sampling_of_args(args)
        self._make_job = make_job or job_maker()
        self._make_job(rows[0])
        self._too_long: TooLong = too_long
        self._ahead = ahead * self._samples_per_step
        self._random = random.Random(seed)  # noqa: S311 - the order of prompts is not secret
        self._asked = Asked(model)
        self._options = {"max_staleness": args.max_staleness, "model": model, **(batch_options or {})}
        self._session = TrainerSession(connect, away_s=inf)
        self._group_ids = count()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._rewards: deque[float] = deque()
        """Of the samples passed to the trainer, in order."""
        self._last_s = time.monotonic()
        """When the last sample came, or the trainer last needed none."""

    def start(self) -> None:
        """Start rolling out, in a thread."""
        self._last_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the service stops its rollouts, at the latest when the session's lease expires."""
        self._session.stop()
        if self._thread is not None:
            self._thread.join()

    def take_rewards(self) -> list[float]:
        """Return the rewards of the next step's samples, in the trainer's order."""
        return [self._rewards.popleft() for _ in range(min(self._samples_per_step, len(self._rewards)))]

    def update_model_version(self, model_version: int) -> None:
        """Do nothing: each token carries the version of the weights that generated it."""

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that ended the worker; `RequestTimeout` if no sample came for `stale_after_s` seconds."""
        if self._failure is not None:
            raise self._failure
        if self._thread is None or not self._thread.is_alive():
            raise InternalError("the rollout worker does not run")
        silent_s = time.monotonic() - self._last_s
        if silent_s > stale_after_s:
            raise RequestTimeout(f"no rollout came for {silent_s:.0f} s; see `prorl status`", timeout_s=stale_after_s)

    def _run(self) -> None:
        try:
            with self._session:
                while True:
                    self._fill()
        except Closed:
            pass  # by `stop`
        except BaseException as error:  # noqa: BLE001 - raised by check_health, in the trainer's thread
            self._failure = error

    def _fill(self) -> None:
        """Collect the groups of one step."""
        while self.rollout_buffer.qsize() >= self._ahead and not self._session.stopped.wait(0.01):
            self._last_s = time.monotonic()
        size = self._size
        put: list[int] = []
        options = {**self._options, "complete": self._asked.names}
        began = time.monotonic()
        wanted = self._samples_per_step // size
        for group in self._session.groups(lambda: (wanted - len(put), self._jobs()), size, **options):
            put.append(sum(self._put(role) for role in group.split(group.model)))  # noqa: PERF401 - `wanted` is asked meanwhile
        if put and not any(put):
            most = self._args.max_completion_length
            raise NotTrainable(f"all rollouts of a batch have more than max_completion_length = {most} tokens")
        report = self._session.report
        given_up = float(len(report.given_up)) if report is not None else 0.0
        self.metrics_queue.put({"rollouts/batch_s": time.monotonic() - began, "rollouts/given_up_total": given_up})

    def _jobs(self) -> Iterator[Job]:
        while True:
            row = self._rows[self._random.randrange(len(self._rows))]
            yield self._asked.job(of_prompt(self._make_job(row), self._sampling))

    def _put(self, group: Group) -> int:
        """Pass a group's samples to the trainer; return how many were not dropped."""
        samples = [Sample.of(row, self._args.max_completion_length, self._too_long) for row in rows_of([group])]
        kept = [sample for sample in samples if sample.length]
        for sample, given in zip(kept, self._given(group, kept), strict=True):
            self._rewards.append(sample.row.reward)
            self.rollout_buffer.put(given)
            self._last_s = time.monotonic()
        if dropped := len(samples) - len(kept):
            self.metrics_queue.put({"rollouts/dropped_total": float(dropped)})
        return len(kept)

    def _given(self, group: Group, samples: Sequence[Sample]) -> list[Any]:
        """Return TRL's samples of a group."""
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        spread = float(group.rewards.std())
        advantages = (group.rewards - group.rewards.mean()) / (spread + NO_SPREAD)
        group_id = next(self._group_ids)
        return [
            RolloutSample(
                **fields_of(sample),
                old_log_probs=sample.row.arrays.logprobs[: sample.row.prompt_tokens + sample.length].astype(np.float32),
                advantage=float(advantages[sample.row.place]),
                group_id=group_id,
                metrics={"reward": sample.row.reward, "reward_std": spread, "truncated": float(sample.row.truncated)},
            )
            for sample in samples
        ]


def fields_of(sample: Sample) -> dict[str, Any]:
    """Return the fields that the samples of TRL's asynchronous trainers share."""
    row, shown = sample.row, slice(sample.row.prompt_tokens + sample.length)
    return {
        "prompt": [],
        "completion": [],
        "input_ids": row.arrays.token_ids[shown].astype(np.int64),
        "completion_mask": row.arrays.loss_mask[shown].astype(np.int64),
        "model_version": row.versions[0],
        "enqueued_at": time.time(),
    }


class WeightTransfer:
    """Publishes the weights of TRL's `AsyncGRPOTrainer` to the engines; pass it as `weight_transfer`.

    The versions are the trainer's own: 1 before the first step, incremented by each synchronization; a resumed trainer
    continues them (`continue_from`). Generations continue between two tokens with the new weights, unless `mode` says
    otherwise.

    Args:
        served: folder of the model that the engines were started with; see `WeightsPublisher`.
        weights_folder: where the weights are written, under the same path on all engine hosts.
        connect: opens the client; by default that of `prorl serve` without a topology file.
        publisher_options: options of `WeightsPublisher`, such as `form="delta"`, `rename`, `mode` and `keep`.
        model: the model of the service whose weights these are: a `name` of `[[backends]]`.
    """

    def __init__(
        self,
        served: str | Path,
        weights_folder: str | Path,
        *,
        connect: Callable[[], RolloutClient] = RolloutClient,
        publisher_options: Mapping[str, Any] | None = None,
        model: str = POLICY,
    ) -> None:
        self._arguments = (connect, served, weights_folder)
        self._options = {"all_ranks": False, "model": model, **(publisher_options or {})}
        self._publisher: WeightsPublisher | None = None
        self.version = 0
        """Of the last published weights."""

    def init_weight_transfer(self) -> None:
        """Connect; TRL calls it on the main process only, and gathers sharded tensors itself."""
        self._publisher = WeightsPublisher(*self._arguments, **self._options)

    def pause(self) -> None:
        """Do nothing: `send_weights` pauses the engines, as its mode says."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Have all engines serve these tensors.

        Raises:
            ProrlError: as `WeightsPublisher.publish`.
        """
        assert self._publisher is not None, "TRL calls init_weight_transfer first"
        self._publisher.publish(iterator, self.version + 1)
        self.version += 1

    def resume(self) -> None:
        """Do nothing: the engines resume when they have the weights."""

    def destroy(self) -> None:
        """Close the client, and release the folder to other publishers."""
        if self._publisher is not None:
            self._publisher.close()
