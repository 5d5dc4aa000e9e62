"""`GrpoRollouts`: a `rollout_func` for TRL's `GRPOTrainer`."""

from __future__ import annotations

import json
import logging
import random
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Self

from ...client.blocking.client import RolloutClient
from ...data.rows import check_sizes, single_rows_of
from ...errors import ConfigError, InvalidJob, NotTrainable
from ...system.ranks import gather, scatter
from ...weights_publisher import WeightsPublisher
from ...wire.messages.base import POLICY
from ..dataset_rows import job_maker, of_prompt
from ..recorded import Asked
from ..sampling import sampling_of
from ..session import Sample, TrainerSession, check_too_long, check_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from ...data.group import Group
    from ...data.rows import Row
    from ...wire.messages.jobs import Job, Sampling
    from ..dataset_rows import JobMaker
    from ..session import TooLong

log = logging.getLogger("prorl.trainer")

TESTED = "1.16"


def rollout_reward(
    completions: list[Any],
    reward: list[float | None],
    log_metric: Callable[[str, float], None] | None = None,
    **more: Any,
) -> list[float | None]:
    """Return the service's rewards: a reward function for `GRPOTrainer`.

    None for a rollout that was dropped because of its length: TRL omits it from its group's mean.
    """
    if log_metric is not None:
        log_metric("rollouts/truncated", sum(more["truncated"]) / len(completions))
        log_metric("rollouts/dropped", sum(one is None for one in reward) / len(completions))
    return reward


def sampling_of_args(args: Any) -> Sampling:
    """Return the sampling of a `GRPOConfig` or `AsyncGRPOConfig`.

    Raises:
        InvalidJob: a parameter is unsupported; `field` names it.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    sampling = sampling_of({name: getattr(args, name) for name in names})
    if sampling.top_p < 1 or sampling.top_k or sampling.min_p:
        log.warning("top_p, top_k and min_p make importance ratios too small: TRL's log-probs are of all tokens")
    return sampling


class GrpoRollouts:
    """Rolls out the prompts of TRL's `GRPOTrainer` by the service, and publishes its weights to the engines.

    Pass it as `rollout_func`, with `rollout_reward` as reward function. The first call of each step publishes the
    model's weights as version `global_step`. TRL corrects the loss by the engine's log-probs (`vllm_importance_…` in
    its configuration). In a distributed trainer every process makes one; only the main process talks to the service.

    Args:
        served: folder of the model that the engines were started with; see `WeightsPublisher`.
        weights_folder: where the weights are written, under the same path on all engine hosts.
        connect: opens a client; by default that of `prorl serve` without a topology file.
        make_job: makes the job of a row of the data set, by default from its columns `task` and `instance`. The
            trainer's `temperature`, `top_p`, `top_k` and `min_p` replace the job's.
        too_long: what happens to a rollout whose response has more than `max_completion_length` tokens: `drop` (not
            trained on, without a reward, counted as `rollouts/dropped`), or `truncate` (trained on up to there, with
            its reward).
        batch_options: options of `open_batch`, such as `keep="informative"` for DAPO's sampling, which also rolls out
            random prompts of TRL's data set.
        publisher_options: options of `WeightsPublisher`, such as `form="delta"`, `rename`, `mode` and `keep`. With
            `lora=True` the adapter of a PEFT model is published as an adapter; otherwise it is merged into the model.
        model: the model of the service that rolls out and whose weights are trained: a `name` of `[[backends]]`, or of
            an adapter.

    Raises:
        ImportError: TRL is not installed.
        ConfigError: an option is invalid.
    """

    def __init__(
        self,
        served: str | Path,
        weights_folder: str | Path,
        *,
        connect: Callable[[], RolloutClient] = RolloutClient,
        make_job: JobMaker | None = None,
        too_long: TooLong = "drop",
        batch_options: Mapping[str, Any] | None = None,
        publisher_options: Mapping[str, Any] | None = None,
        model: str = POLICY,
    ) -> None:
        check_version("trl", TESTED)
        check_too_long(too_long)
        self.__name__ = "prorl_rollouts"
        self._connect = connect
        self._weights = (served, weights_folder, {"model": model, **(publisher_options or {})})
        self._asked = Asked(model)
        self._make_job = make_job or job_maker()
        self._too_long: TooLong = too_long
        self._rewards: list[float] = []
        self._options = {"keep": "all", "model": model, **(batch_options or {})}
        self._session = TrainerSession(connect)
        self._publisher: WeightsPublisher | None = None
        self._trainer: Any = None
        self._rows: dict[str, Mapping[str, Any]] = {}
        """The data sets' rows, by prompt."""
        self._random = random.Random(0)  # noqa: S311 - the order of prompts is not secret

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Roll out this process's prompts; return lists of one entry per prompt, in `GRPOTrainer`'s format.

        Raises:
            ConfigError: the prompts are not whole groups, or are not in the data set.
            InvalidJob: a data set's row cannot be made into a job.
            NotTrainable: prompts could not be rolled out, or a rollout has several segments.
        """
        if self._trainer is None:
            self._begin(trainer)
        everyone = gather(prompts)
        return scatter(lambda: self._parts(everyone, trainer))

    def sync_weights(self) -> None:
        """Publish the model's weights; TRL calls it on all processes at the first rollouts of a step."""
        assert self._publisher is not None, "the first call made it"
        trainer = self._trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        as_adapter = self._weights[2].get("lora", False)
        with nullcontext(model) if as_adapter else _plain_weights(model) as weights:
            self._publisher.publish(weights, trainer.state.global_step)

    def take_rewards(self) -> list[float]:
        """Return the rewards of the training's rollouts since the last call; empty except on the main process."""
        taken, self._rewards = self._rewards, []
        return taken

    def close(self) -> None:
        """Close the clients, and release the folder to other publishers."""
        if self._publisher is not None:
            self._publisher.close()
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, trainer: Any) -> None:
        sharded = getattr(trainer, "is_deepspeed_enabled", False)
        if sharded and trainer.accelerator.state.deepspeed_plugin.zero_stage == 3:
            raise ConfigError("DeepSpeed's ZeRO 3 shards weights in a way that is not read here; use FSDP 2")
        served, folder, options = self._weights
        self._publisher = WeightsPublisher(self._connect, served, folder, **options)
        self._trainer = trainer
        self.sync_weights()
        # TRL uses the engine's log-probs, and calls `sync_weights`, only if it has its own engine.
        trainer.use_vllm = True
        trainer.vllm_generation = self
        trainer._last_loaded_step = trainer.state.global_step  # noqa: SLF001 - TRL has no other place for it

    def _parts(self, everyone: list[list[Any]], trainer: Any) -> list[dict[str, list[Any]]]:
        """Return each process's rollouts, in the order of its prompts."""
        training, most = trainer.model.training, trainer.args.max_completion_length
        size = trainer.num_generations if training else trainer.num_generations_eval
        prompts = [prompt for mine in everyone for prompt in mine]
        keys = [_key(prompt) for prompt in prompts]
        if len(keys) % size or any(keys[index] != keys[index - index % size] for index in range(len(keys))):
            raise ConfigError(
                f"all processes' prompts together are not groups of {size}: make per_device_train_batch_size x "
                "processes a multiple of num_generations",
                key="num_generations",
            )
        groups = self._groups(keys[::size], size, sampling_of_args(trainer.args), training)
        check_sizes(groups, size, "TRL")
        rows = single_rows_of(groups, "GRPOTrainer", "train with AsyncGRPOTrainer, or serve with history = append")
        if training:
            self._rewards += [row.reward for row in rows]
        rolled = [self._entry(row, most) for row in rows]
        if all(entry["reward"] is None for entry in rolled):
            raise NotTrainable(f"all {len(rolled)} rollouts have more than max_completion_length = {most} tokens")
        ended = iter(rolled)
        parts = [[next(ended) for _ in mine] for mine in everyone]
        return [{name: [entry[name] for entry in part] for name in rolled[0]} for part in parts]

    def _groups(self, keys: list[str], size: int, sampling: Sampling, training: bool) -> list[Group]:
        """Return a group for each prompt, or for others in place of those that could not be rolled out."""
        jobs = [self._asked.job(of_prompt(self._make_job(self._row(key)), sampling)) for key in keys]
        rows = self._trainer.train_dataset

        def more() -> Job:
            row = rows[self._random.randrange(len(rows))]
            return self._asked.job(of_prompt(self._make_job(row), sampling))

        def endless() -> Iterator[Job]:
            yield from jobs
            while True:
                yield more()

        if not training:
            model = self._asked.model
            return self._session.fill(jobs, size, more, keep="all", adopt=False, carry="nothing", model=model)
        if self._options["keep"] == "all":
            return self._session.fill(jobs, size, more, **{**self._options, "carry": "nothing"})
        return list(self._session.groups(lambda: (len(jobs), endless()), size, **self._options))

    def _row(self, key: str) -> Mapping[str, Any]:
        if key not in self._rows:
            self._look_up()
        if key not in self._rows:
            raise ConfigError(
                "a prompt is not in the trainer's data set: leave its column `prompt` as it is", key="train_dataset"
            )
        return self._rows[key]

    def _look_up(self) -> None:
        """Index the data sets' rows by prompt, since a rollout function gets prompts only."""
        evaluation = self._trainer.eval_dataset
        more = evaluation.values() if isinstance(evaluation, dict) else [evaluation]
        for rows in (self._trainer.train_dataset, *more):
            if rows is not None and not hasattr(rows, "__len__"):
                raise ConfigError("rows of an IterableDataset cannot be looked up; use a Dataset", key="train_dataset")
            for row in rows if rows is not None else ():
                other = self._rows.setdefault(_key(row["prompt"]), row)
                if {**other, "prompt": None} != {**row, "prompt": None}:
                    raise InvalidJob(
                        f"two rows of the data set have one prompt and differ otherwise: {str(row['prompt'])[:200]}",
                        field="prompt",
                    )

    def _entry(self, row: Row, most: int | None) -> dict[str, Any]:
        """Return TRL's fields of a rollout; a dropped one keeps a single token, which is masked."""
        sample = Sample.of(row, most, self._too_long)
        dropped = not sample.length
        shown = Sample(row, 1) if dropped else sample
        return {
            "prompt_ids": shown.prompt_ids.tolist(),
            "completion_ids": shown.response_ids.tolist(),
            "logprobs": shown.logprobs.tolist(),
            "env_mask": [0] if dropped else shown.response_mask.tolist(),
            "reward": None if dropped else row.reward,
            "truncated": row.truncated or sample.is_cut,
            "job_id": row.trajectory.job_id,
            "weight_versions": row.versions,
        }


def _key(prompt: Any) -> str:
    return json.dumps(prompt, sort_keys=True, default=str)


@contextmanager
def _plain_weights(model: Any) -> Iterator[Iterable[tuple[str, Any]]]:
    """Yield a model's tensors under its checkpoint's names, with adapters (PEFT) merged meanwhile."""
    if not hasattr(model, "merge_adapter"):
        yield model.state_dict().items()
        return
    model.merge_adapter()
    try:
        yield (
            (name.replace(".base_layer", "").replace("modules_to_save.default.", ""), tensor)
            for name, tensor in model.base_model.model.state_dict().items()
            if model.prefix not in name and "original_module" not in name
        )
    finally:
        model.unmerge_adapter()
