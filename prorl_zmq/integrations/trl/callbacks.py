"""Callbacks of TRL's trainers: the reward of each step, and evaluations for `AsyncGRPOTrainer`, which has none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback

from ...client.blocking.client import RolloutClient
from ...data.reward_curve import RewardCurve, standard_error
from ...errors import ConfigError
from ..dataset_rows import job_maker, of_prompt
from .grpo import sampling_of_args

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ..dataset_rows import JobMaker
    from .async_grpo import RolloutWorker
    from .grpo import GrpoRollouts

EVALUATION_S = 600.0
"""Longest wait for the next rollout of an evaluation, in seconds."""


class RewardLines(TrainerCallback):
    """Prints each step's mean reward with its standard error, and at the end whether the reward rose.

    Args:
        source: `GrpoRollouts` or `RolloutWorker`.
    """

    def __init__(self, source: GrpoRollouts | RolloutWorker) -> None:
        self._source = source
        self._curve = RewardCurve()

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Print a line for a logged step."""
        del args, control, more
        if not state.is_world_process_zero or "loss" not in (logs or {}):
            return
        if rewards := self._source.take_rewards():
            print(f"step {state.global_step}: {self._curve.add(rewards)}", flush=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Print the last line."""
        del args, control, more
        if state.is_world_process_zero:
            print(self._curve.conclusion(), flush=True)


class Evaluations(TrainerCallback):
    """Evaluates the served weights every few steps of `AsyncGRPOTrainer`; learning waits for it.

    Add it after the trainer is made (`trainer.add_callback`), so that the engines have the step's weights by then. It
    logs `eval_reward` and its standard error, `eval_reward_error`.

    Args:
        trainer: the trainer, through which it logs.
        rows: the data set, with a row for each rollout.
        every: steps between two evaluations.
        connect: opens the client; by default that of `prorl serve` without a topology file.
        make_job: makes a row's job, by default from its columns `task` and `instance`. Sampling is as in training.

    Raises:
        ConfigError: there are no rows, or `every` is below 1.
        InvalidJob: the first row cannot be made into a job.
    """

    def __init__(
        self,
        trainer: Any,
        rows: Iterable[Mapping[str, Any]],
        every: int,
        *,
        connect: Callable[[], RolloutClient] = RolloutClient,
        make_job: JobMaker | None = None,
    ) -> None:
        self._trainer = trainer
        self._rows = list(rows)
        if not self._rows:
            raise ConfigError("the data set has no rows", key="rows")
        if every < 1:
            raise ConfigError(
                f"every is the number of steps between two evaluations, at least 1; not {every}", key="every"
            )
        self._every = every
        self._connect = connect
        self._make_job = make_job or job_maker()
        self._make_job(self._rows[0])

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Evaluate every `every` steps."""
        del more
        if state.global_step % self._every or not state.is_world_process_zero:
            return
        sampling = sampling_of_args(args)
        with self._connect() as client:
            client.submit([of_prompt(self._make_job(row), sampling) for row in self._rows])
            done = list(client.stream(timeout_s=EVALUATION_S))
        rewards = [each.reward for each in done if each.reward is not None]
        if not rewards:
            reasons = {str(each.error) for each in done}
            print(f"step {state.global_step}: no rollout of the evaluation has a reward: {min(reasons, default='')}")
            return
        mean, error = sum(rewards) / len(rewards), standard_error(rewards)
        is_due = control.should_log
        # Not by the trainer's own `log`, which would give this entry the metrics of the step.
        Trainer.log(self._trainer, {"eval_reward": mean, "eval_reward_error": error})
        control.should_log = is_due  # the step's own entry follows
        print(f"step {state.global_step}: evaluation: reward {mean:.3f} ± {error:.3f} ({len(rewards)} rollouts)")


def continue_from(trainer: Any, weight_transfer: Any, checkpoint: str) -> None:
    """Continue the weight versions of a checkpoint in a resumed `AsyncGRPOTrainer`; call it before `train`.

    Without it the versions begin at 1 again, below those of the service's existing rollouts.

    Args:
        trainer: the trainer, whose `train(resume_from_checkpoint=checkpoint)` is called next.
        weight_transfer: its `WeightTransfer`.
        checkpoint: the checkpoint's folder, such as `out/checkpoint-40`.

    Raises:
        ConfigError: the folder's name has no step.
    """
    step = checkpoint.rstrip("/").rpartition("checkpoint-")[2]
    if not step.isdecimal():
        raise ConfigError(f"{checkpoint} is not named as TRL names checkpoints: checkpoint-STEP", key="checkpoint")
    synchronized = int(step) // trainer.args.weight_sync_steps
    trainer.model_version = weight_transfer.version = synchronized
