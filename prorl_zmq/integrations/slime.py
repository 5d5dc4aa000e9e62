r"""slime: a rollout function whose groups this service collects, and hooks for rewards and weights.

    train.py --rollout-function-path prorl_zmq.integrations.slime.generate_rollout --custom-config-path prorl.yaml \
        --custom-reward-post-process-path prorl_zmq.integrations.slime.post_process_rewards \
        --update-weight-mode full --update-weight-transport disk --update-weight-disk-dir /shared/weights \
        --custom-update-weight-post-write-path prorl_zmq.integrations.slime.update_weights …

The page Training lists the settings `prorl_…`, which are attributes of slime's `args`. A process keeps one client
between calls, since carried-over rollouts belong to its session; `close` or the process's exit closes it.
"""

from __future__ import annotations

import atexit
import copy
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ..client.blocking.client import RolloutClient
from ..data.rows import check_sizes, rows_of
from ..errors import ConfigError, InvalidJob, NotTrainable
from ..wire.messages.base import new_id
from ..wire.messages.jobs import Job, Sampling
from ..wire.records import EXPERTS, SAMPLING_MASK
from .recorded import NOTHING_ASKED, Asked, routes, supports, teacher_scores
from .sampling import sampling_of
from .session import Sample, TrainerSession, load_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from ..data.group import Group
    from ..data.rows import Row

REMEMBERED_ROLLOUTS = 64
"""A prompt fed this many calls ago is forgotten: its group was dropped, since no job lasts that long."""
ZERO_STD = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
CENTERED = frozenset({"grpo", "gspo", "reinforce_plus_plus_baseline"})
"""slime's estimators that subtract the group's mean reward."""
SCALED = frozenset({"grpo", "gspo"})
NO_SPREAD = 1e-6
UPDATE_S = 600.0
SAMPLING = {
    "temperature": "rollout_temperature",
    "top_p": "rollout_top_p",
    "top_k": "rollout_top_k",
    "max_tokens": "rollout_max_response_len",
    "stop": "rollout_stop",
    "stop_token_ids": "rollout_stop_token_ids",
}
"""slime's arguments by the names of `Sampling`."""


@dataclass(slots=True)
class _Prompts:
    """A session, and the samples of the prompts that were fed to it."""

    session: TrainerSession
    fed: dict[str, tuple[int, list[Any]]] = field(default_factory=dict)
    """By prompt id: the call that fed it, and slime's samples."""
    calls: int = 0

    def draw(self, args: Any, data_source: Any) -> Iterator[Job]:
        """Yield the jobs of slime's prompts, endlessly."""
        while groups := data_source.get_samples(1):
            for samples in groups:
                job = _job(args, samples[0], _asked(args))
                self.fed[job.job_id] = (self.calls, samples)
                yield job

    def take(self, prompt_id: str) -> list[Any]:
        return self.fed.pop(prompt_id)[1]

    def next_call(self) -> None:
        self.calls += 1
        self.fed = {
            prompt_id: (call, samples)
            for prompt_id, (call, samples) in self.fed.items()
            if self.calls - call <= REMEMBERED_ROLLOUTS
        }


_open: dict[tuple[str | None, str | None], _Prompts] = {}
"""By endpoint and keys."""


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:  # noqa: ARG001 - slime's contract
    """Collect one step's groups: slime's rollout function, called synchronously.

    Args:
        args: slime's arguments.
        rollout_id: the step's number.
        data_source: slime's source of prompts.
        evaluation: instead, roll out each evaluation sample once and keep all.

    Returns:
        `RolloutFnTrainOutput` of `rollout_batch_size` groups of `n_samples_per_prompt` samples, by `index`; or
        `RolloutFnEvalOutput`.

    Raises:
        NotTrainable: the prompts ended, or groups were given up, before the batch was full.
        ConfigError: an argument is not supported.
        InvalidJob: a prompt cannot be made into a job.
    """
    from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput

    _refuse(args)
    if evaluation:
        return RolloutFnEvalOutput(*_evaluate(args))
    size = args.n_samples_per_prompt
    asked = _asked(args)
    options = {"carry": "running", "model": asked.model, "complete": asked.names}
    options |= {"keep": _keep(args), **_options(args)}
    prompts = _prompts(args)
    prompts.next_call()
    session, number = prompts.session, args.rollout_batch_size
    groups = list(session.groups(lambda: (number, prompts.draw(args, data_source)), size, **options))
    assert session.batch is not None, "it was opened"
    if session.batch.state != "met":
        raise NotTrainable(
            f"the batch ended {session.batch.state} with {len(groups)} of {number} groups: {session.report}"
        )
    filled = fill_samples(groups, [prompts.take(group.prompt_id) for group in groups], size, asked)
    filled.sort(key=lambda group: _segments(group)[0].index)
    if path := getattr(args, "rollout_sample_filter_path", None):
        load_function(path)(args, filled)
    return RolloutFnTrainOutput(samples=filled, metrics=_metrics(session.report))


def fill_samples(
    groups: Sequence[Group], samples: Sequence[list[Any]], size: int, asked: Asked = NOTHING_ASKED
) -> list[list[Any]]:
    """Write each group's trajectories into slime's samples of its prompt, and return them.

    A trajectory of several segments becomes a list of copies with one `rollout_id`, by which slime counts it; each has
    the whole reward, as in slime's `TrajectoryManager`.

    Args:
        groups: the groups.
        samples: for each group, `size` samples of slime.
        size: `n_samples_per_prompt`: slime finds the members of a group by counting.
        asked: the records that each rollout must have: `experts`, `sampling_mask`, and the teacher's scores.

    Raises:
        NotTrainable: there are no groups, one has another size or is not trainable, or one has several segments and
            slime's samples have no `rollout_id`; or a record is missing, or a trained token needs a row that is
            unknown.
    """
    check_sizes(groups, size, "slime")
    filled: list[list[Any]] = [[[] for _ in range(size)] for _ in groups]
    for row in rows_of(groups):
        filled[row.group][row.place].append((row, samples[row.group][row.place]))
    return [[_filled(pairs, asked) for pairs in group] for group in filled]


def post_process_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Return the samples' rewards, raw and normalized by group, counting each rollout once: slime's reward hook.

    slime's own normalizes over the whole batch and counts each segment as soon as one rollout has several.

    Args:
        args: slime's: `reward_key`, `rewards_normalization`, `advantage_estimator`, `grpo_std_normalization`.
        samples: of all groups, segments included; identified by `group_index`, and `rollout_id` or `index`.
    """
    key = getattr(args, "reward_key", None)
    raw = [float(sample.reward[key] if key else sample.reward) for sample in samples]
    if args.advantage_estimator not in CENTERED or not getattr(args, "rewards_normalization", True):
        return raw, list(raw)
    groups: dict[Any, dict[Any, float]] = {}
    for sample, reward in zip(samples, raw, strict=True):
        groups.setdefault(sample.group_index, {})[_rollout_of(sample)] = reward
    by_std = args.advantage_estimator in SCALED and getattr(args, "grpo_std_normalization", True)
    processed = []
    for sample, reward in zip(samples, raw, strict=True):
        rewards = np.array([*groups[sample.group_index].values()])
        spread = float(rewards.std(ddof=1)) + NO_SPREAD if by_std and len(rewards) > 1 else 1.0
        processed.append((reward - float(rewards.mean())) / spread)
    return raw, processed


def update_weights(args: Any, version_dir: str, rollout_engines: object) -> None:  # noqa: ARG001 - slime's contract
    """Have the service's engines load a complete checkpoint: slime's hook after a disk update, called by each rank.

    The version is the number at the end of the folder's name.

    Raises:
        ConfigError: the name does not end with a number.
        ProrlError: as `RolloutClient.update_weights`.
    """
    from ..system.ranks import ranks, scatter

    def update() -> list[None]:
        number = re.search(r"(\d+)$", Path(version_dir).name)
        if number is None:
            raise ConfigError(f"{version_dir} does not end with a number, which is the version", key="version_dir")
        with _connect(args)() as client:
            model = _asked(args).model
            client.update_weights(Path(version_dir).absolute(), int(number[1]), timeout_s=UPDATE_S, model=model)
        return [None] * ranks()

    scatter(update)


def close() -> None:
    """Close this process's clients."""
    while _open:
        _open.popitem()[1].session.close()


def _rollout_of(sample: Any) -> Any:
    number = getattr(sample, "rollout_id", None)
    return sample.index if number is None else number


def _filled(pairs: list[tuple[Row, Any]], asked: Asked) -> Any:
    if len(pairs) == 1:
        return _fill(*pairs[0], asked)
    row, sample = pairs[0]
    if "rollout_id" not in type(sample).__dataclass_fields__:
        raise NotTrainable(
            f"job {row.trajectory.job_id} has several segments, which this slime would count as rollouts of their own; "
            "take one whose Sample has a rollout_id, or let the chat keep its history (`history = 'append'`)",
            group_id=row.group_id,
            job_id=row.trajectory.job_id,
        )
    segments = []
    for row, sample in pairs:
        segment = _fill(row, copy.copy(sample), asked)
        segment.rollout_id = sample.index
        segments.append(segment)
    return segments


def _fill(row: Row, sample: Any, asked: Asked) -> Any:
    ours = Sample.of(row)
    asked.check(ours)
    if EXPERTS in asked.names:
        sample.rollout_routed_experts = _padded_routes(routes(ours), len(row) - 1)
    if SAMPLING_MASK in asked.names:
        sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets = (one.tolist() for one in supports(ours))
    if asked.teacher:
        sample.teacher_log_probs = teacher_scores(ours)[0][row.prompt_tokens - 1 :].tolist()
    sample.tokens = row.arrays.token_ids.tolist()
    sample.response_length = ours.length
    sample.loss_mask = ours.response_mask.tolist()
    sample.rollout_log_probs = ours.logprobs.tolist()
    sample.weight_versions = [str(version) for version in row.versions]
    sample.reward = row.reward
    sample.status = type(sample).Status.TRUNCATED if row.truncated else type(sample).Status.COMPLETED
    return sample


def _padded_routes(experts: NDArray[Any], rows: int) -> NDArray[Any]:
    """Return a row for each token but the last; unknown ones, on which no trained token depends, as slime pads."""
    experts = experts[:rows]
    shape = (rows - len(experts), *experts.shape[1:])
    return np.concatenate([experts, np.broadcast_to(np.arange(shape[2], dtype=experts.dtype), shape)])


def _evaluate(args: Any) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """Roll each evaluation sample out once, in its own session."""
    path = getattr(args, "prorl_eval_samples", None)
    if not path:
        raise ConfigError(
            "there is no prorl_eval_samples; name a function that gives the evaluation's samples, or leave evaluation "
            "to slime (`--eval-function-path slime.rollout.sglang_rollout.generate_rollout`)",
            key="prorl_eval_samples",
        )
    data: dict[str, dict[str, Any]] = {}
    metrics: dict[str, float] = {}
    only = Asked(_asked(args).model)
    with TrainerSession(_connect(args)) as session:
        for name, samples in load_function(path)(args).items():
            given = {job.job_id: (job, sample) for sample in samples for job in [_job(args, sample, only)]}
            jobs = [job for job, _ in given.values()]
            options = {"keep": "all", "carry": "nothing", "model": only.model}
            groups = list(session.groups(lambda: (len(jobs), jobs), 1, **options))  # noqa: B023
            done = fill_samples(groups, [[given[group.prompt_id][1]] for group in groups], 1)
            ended = sorted((_segments(group)[-1] for group in done), key=lambda sample: sample.index)
            truncated = [sample.status == type(sample).Status.TRUNCATED for sample in ended]
            rewards = [sample.reward for sample in ended]
            data[name] = {"rewards": rewards, "truncated": truncated, "samples": ended}
            metrics[f"eval/{name}/given_up"] = float(len(jobs) - len(ended))
    return data, metrics


def _refuse(args: Any) -> None:
    if getattr(args, "rollout_all_samples_process_path", None):
        raise ConfigError(
            "groups that are not kept stay at the service; unset --rollout-all-samples-process-path",
            key="rollout_all_samples_process_path",
        )
    if getattr(args, "reward_key", None):
        raise ConfigError("rewards are single numbers here; unset --reward-key", key="reward_key")


def _keep(args: Any) -> str:
    path = getattr(args, "dynamic_sampling_filter_path", None)
    if path and path != ZERO_STD and "keep" not in _options(args):
        raise ConfigError(
            f"groups are chosen by the service, which has no {path}; set `keep` in prorl_batch",
            key="dynamic_sampling_filter_path",
        )
    return "informative" if path else "all"


def _options(args: Any) -> dict[str, Any]:
    return dict(getattr(args, "prorl_batch", None) or {})


def _connect(args: Any) -> Callable[[], RolloutClient]:
    return partial(RolloutClient, getattr(args, "prorl_endpoint", None), keys=getattr(args, "prorl_keys", None))


def _prompts(args: Any) -> _Prompts:
    key = (getattr(args, "prorl_endpoint", None), getattr(args, "prorl_keys", None))
    if key not in _open:
        if not _open:
            atexit.register(close)
        _open[key] = _Prompts(TrainerSession(_connect(args)))
    return _open[key]


def _asked(args: Any) -> Asked:
    options = (getattr(args, f"prorl_{name}", None) for name in ("model", "record", "teacher"))
    return Asked.of("slime", (EXPERTS, SAMPLING_MASK), *options)


def _job(args: Any, sample: Any, asked: Asked = NOTHING_ASKED) -> Job:
    """Make a prompt's job with a new id, since a data source may return the same prompt more than once."""
    sampling = sampling_of({ours: getattr(args, theirs, None) for ours, theirs in SAMPLING.items()})
    if path := getattr(args, "prorl_make_job", None):
        job: Job = load_function(path)(args, sample)
    else:
        job = _default_job(sample)
    if job.sampling == Sampling():
        job = msgspec.structs.replace(job, sampling=sampling)
    return msgspec.structs.replace(asked.job(job), job_id=new_id())


def _default_job(sample: Any) -> Job:
    metadata = sample.metadata or {}
    for name in ("task", "instance"):
        if name not in metadata:
            raise InvalidJob(
                f"sample {sample.index} has no {name} in its metadata; add it to the data set, or name a function that "
                "makes the job in prorl_make_job",
                field=name,
            )
    return Job(task=metadata["task"], instance=metadata["instance"])


def _segments(group: list[Any]) -> list[Any]:
    """Return the samples of a group's first trajectory."""
    return group[0] if isinstance(group[0], list) else group[:1]


def _metrics(report: Any) -> dict[str, float]:
    return {
        "rollout/dynamic_filter/drop_not_kept": float(report.dropped_groups),
        "rollout/given_up_groups": float(report.given_up_groups),
        "rollout/launched": float(report.launched),
        "rollout/failed": float(report.failed),
        **{f"rollout/wasted_{why}": float(count) for why, count in report.wasted.items()},
    }
