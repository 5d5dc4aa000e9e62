"""`GrpoRollouts`: a `rollout_func` for TRL's `GRPOTrainer`."""

from __future__ import annotations

import json
import random
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from ...client.blocking.client import RolloutClient
from ...data.rows import check_sizes, single_rows_of
from ...errors import ConfigError, InvalidJob, NotTrainable
from ...system.ranks import gather, rank, scatter
from ...weights_publisher import WeightsPublisher
from ..dataset_rows import job_maker, of_prompt
from ..session import Places, check_too_long, check_version, response_room
from .samples import TESTED, sampling_of_args

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path
    from typing import Self

    from ...data.group import Group
    from ...data.rows import Row
    from ...weights_publisher import Published
    from ...wire.messages.jobs import Job, Sampling
    from ..dataset_rows import JobMaker
    from ..session import TooLong


def rollout_reward(
    completions: list[Any],
    reward: list[float | None],
    log_metric: Callable[[str, float], None] | None = None,
    **more: Any,
) -> list[float | None]:
    """Return the rewards that the service gave: a reward function for `GRPOTrainer`.

    None for a rollout that was dropped since it was too long: TRL leaves it out of its group's mean.
    """
    if log_metric is not None:
        log_metric("rollouts/truncated", sum(more["truncated"]) / len(completions))
        log_metric("rollouts/dropped", sum(one is None for one in reward) / len(completions))
    return reward


class GrpoRollouts:
    """Rolls out the prompts of TRL's `GRPOTrainer` by the service, and gives the engines its weights.

    Pass it as `rollout_func`, with `rollout_reward` as reward function. With each new step's first call all engines get
    the model's weights, with `global_step` as their version. TRL's correction of the log-probs (`vllm_importance_…` in
    its configuration) is switched on, and used with those of the engine. In a distributed trainer every process makes
    one; only the main process talks to the service.

    Args:
        served: folder of the model that the engines were started with; see `WeightsPublisher`.
        weights_folder: where the weights are written; all engine hosts see it under this path.
        connect: opens the client; by default that of `prorl serve` without a topology file.
        make_job: makes the job of a row of the data set, by default from its columns `task` and `instance`. How its
            tokens are drawn is the trainer's: `temperature`, `top_p`, `top_k` and `min_p` of its configuration.
        too_long: what becomes of a rollout whose response has more than `max_completion_length` tokens: it is `drop`ped
            (not trained on, without a reward, counted as `rollouts/dropped`), or `truncate`d (trained on up to there,
            with its reward).
        batch_options: options of `open_batch`, such as `keep="informative"` for DAPO's sampling: then prompts that TRL
            did not ask for are rolled out too, at random from its data set.
        publisher_options: options of `WeightsPublisher`, such as `rename`, `mode` and `keep`.

    Raises:
        ImportError: TRL is not installed.
        ConfigError: an option cannot be used.
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
    ) -> None:
        check_version("trl", TESTED)
        check_too_long(too_long)
        self.__name__ = "prorl_rollouts"
        self._served = served
        self._weights_folder = weights_folder
        self._connect = connect
        self._make_job = make_job or job_maker()
        self._too_long: TooLong = too_long
        self._rewards: list[float] = []
        self._batch_options = dict(batch_options or {})
        self._publisher_options = dict(publisher_options or {})
        self._client: RolloutClient | None = None
        self._publisher: WeightsPublisher | None = None
        self._trainer: Any = None
        self._rows: dict[str, Mapping[str, Any]] = {}
        """The data sets' rows by their prompts."""
        self._random = random.Random(0)  # noqa: S311 - the order of prompts is no secret
        self.published: list[Published | None] = []
        """What each step's weights took; None on all but the main process."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Roll out this process's prompts: lists of one entry per prompt, as `GRPOTrainer` wants them.

        Raises:
            ConfigError: the prompts are no whole groups, or cannot be looked up in the data set.
            InvalidJob: a row of the data set makes no job.
            NotTrainable: prompts could not be rolled out, or a rollout has several segments.
        """
        if self._trainer is None:
            self._begin(trainer)
        everyone = gather(prompts)
        return scatter(lambda: self._parts(everyone, trainer))

    def sync_weights(self) -> None:
        """Give the engines the model's weights; TRL calls it on all processes at the first rollouts of a step."""
        assert self._publisher is not None, "the first call made it"
        trainer = self._trainer
        with _plain_weights(trainer.accelerator.unwrap_model(trainer.model)) as weights:
            self.published.append(self._publisher.publish(weights, trainer.state.global_step))

    def take_rewards(self) -> list[float]:
        """Return the rewards of the training's rollouts since the last call; none on other processes than the main."""
        taken, self._rewards = self._rewards, []
        return taken

    def close(self) -> None:
        """Close the client, and let others publish in the folder."""
        if self._publisher is not None:
            self._publisher.close()
        if self._client is not None:
            self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, trainer: Any) -> None:
        if (
            getattr(trainer, "is_deepspeed_enabled", False)
            and trainer.accelerator.state.deepspeed_plugin.zero_stage == 3
        ):
            raise ConfigError("DeepSpeed's ZeRO 3 shards weights in a way that is not read here; use FSDP 2")
        if rank() == 0:
            self._client = self._connect()
        self._publisher = WeightsPublisher(self._client, self._served, self._weights_folder, **self._publisher_options)
        self._trainer = trainer
        self.sync_weights()
        # TRL uses the engine's log-probs, and says when weights are due, only where it knows an engine of its own.
        trainer.use_vllm = True
        trainer.vllm_generation = self
        trainer._last_loaded_step = trainer.state.global_step  # noqa: SLF001 - TRL has no other place for it

    def _parts(self, everyone: list[list[Any]], trainer: Any) -> list[dict[str, list[Any]]]:
        """Return each process's part of what all of them asked for."""
        training = trainer.model.training
        size = trainer.num_generations if training else trainer.num_generations_eval
        prompts = [prompt for mine in everyone for prompt in mine]
        keys = [_key(prompt) for prompt in prompts]
        if len(keys) % size or any(keys[index] != keys[index - index % size] for index in range(len(keys))):
            raise ConfigError(
                f"all processes' prompts together are no groups of {size}: make per_device_train_batch_size x "
                "processes a multiple of num_generations",
                key="num_generations",
            )
        sampling = sampling_of_args(trainer.args)
        groups = self._groups([self._job(prompt, sampling) for prompt in prompts[::size]], size, sampling, training)
        check_sizes(groups, size, "TRL")
        rows = single_rows_of(groups, "GRPOTrainer", "train with AsyncGRPOTrainer, or serve with history = append")
        if training:
            self._rewards += [row.reward for row in rows]
        rolled = [self._entry(row, trainer.args.max_completion_length) for row in rows]
        if all(entry["reward"] is None for entry in rolled):
            most = trainer.args.max_completion_length
            raise NotTrainable(f"all {len(rolled)} rollouts have more than max_completion_length = {most} tokens")
        parts, start = [], 0
        for mine in everyone:
            part = rolled[start : start + len(mine)]
            parts.append({name: [entry[name] for entry in part] for name in rolled[0]})
            start += len(mine)
        return parts

    def _groups(self, jobs: list[Job], size: int, sampling: Sampling, training: bool) -> list[Group]:
        """Return a group for each job; of those that could not be rolled out, groups of other prompts."""
        assert self._client is not None, "rank 0 collects"
        options = {"keep": "all", **self._batch_options}
        if not training:
            options = {"keep": "all", "adopt": False, "carry": "nothing"}
        if options["keep"] != "all":
            with self._client.open_batch(len(jobs), size, **options) as batch:
                batch.feed(self._with_more(jobs, sampling))
                return list(batch)
        options["carry"] = "nothing"
        places = Places(jobs, partial(next, self._more(sampling)))
        while True:
            with self._client.open_batch(len(places.wanted), size, **options) as batch:
                batch.feed(places.wanted)
                for group in batch:
                    places.add(group)
            if places.filled(batch.report):
                return places.groups

    def _with_more(self, jobs: list[Job], sampling: Sampling) -> Iterator[Job]:
        yield from jobs
        yield from self._more(sampling)

    def _more(self, sampling: Sampling) -> Iterator[Job]:
        """Yield further prompts of the training data, at random, without end."""
        while True:
            row = self._trainer.train_dataset[self._random.randrange(len(self._trainer.train_dataset))]
            yield of_prompt(self._make_job(row), sampling)

    def _job(self, prompt: Any, sampling: Sampling) -> Job:
        key = _key(prompt)
        if key not in self._rows:
            self._look_up()
        if key not in self._rows:
            raise ConfigError(
                "a prompt is not in the trainer's data set: leave its column `prompt` as it is", key="train_dataset"
            )
        return of_prompt(self._make_job(self._rows[key]), sampling)

    def _look_up(self) -> None:
        """Learn the rows of the data sets by their prompts: a rollout function is given prompts only."""
        trainer = self._trainer
        evaluation = trainer.eval_dataset
        for rows in (trainer.train_dataset, *(evaluation.values() if isinstance(evaluation, dict) else [evaluation])):
            if rows is None:
                continue
            if not hasattr(rows, "__len__"):
                raise ConfigError("rows of an IterableDataset cannot be looked up; use a Dataset", key="train_dataset")
            for row in rows:
                other = self._rows.setdefault(_key(row["prompt"]), row)
                if {**other, "prompt": None} != {**row, "prompt": None}:
                    raise InvalidJob(
                        f"two rows of the data set have one prompt and differ otherwise: {str(row['prompt'])[:200]}",
                        field="prompt",
                    )

    def _entry(self, row: Row, most: int | None) -> dict[str, Any]:
        """Return what TRL is given of a rollout; one that is not trained on keeps a single token, which is masked."""
        room = response_room(len(row) - row.prompt_tokens, most, self._too_long)
        response = slice(row.prompt_tokens, row.prompt_tokens + max(room, 1))
        arrays = row.arrays
        return {
            "prompt_ids": arrays.token_ids[: row.prompt_tokens].tolist(),
            "completion_ids": arrays.token_ids[response].tolist(),
            "logprobs": arrays.logprobs[response].tolist(),
            "env_mask": (arrays.loss_mask[response] & (room > 0)).astype(int).tolist(),
            "reward": row.reward if room else None,
            "truncated": row.truncated or room < len(row) - row.prompt_tokens,
            "job_id": row.trajectory.job_id,
            "weight_versions": row.versions,
        }


def _key(prompt: Any) -> str:
    return json.dumps(prompt, sort_keys=True, default=str)


@contextmanager
def _plain_weights(model: Any) -> Iterator[Iterable[tuple[str, Any]]]:
    """Give a model's tensors under its checkpoint's names; adapters (PEFT) are merged meanwhile."""
    if not hasattr(model, "merge_adapter"):
        yield model.state_dict().items()
        return
    model.merge_adapter()
    try:
        yield _base_weights(model.base_model.model.state_dict(), model.prefix)
    finally:
        model.unmerge_adapter()


def _base_weights(state: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, tensor in state.items():
        if prefix not in name and "original_module" not in name:
            yield name.replace(".base_layer", "").replace("modules_to_save.default.", ""), tensor
