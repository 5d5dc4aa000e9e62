"""SkyRL's `GeneratorOutput`, and a generator that rolls out by this service (after SkyRL 0.3.0).

    generator = Generator(make_job, step_wise=cfg.generator.step_wise_trajectories)
    trainer = RayPPOTrainer(..., generator=generator)

The service replaces jobs without a reward, and never returns copies. To sample until enough groups are informative,
collect them with `open_batch` and convert them with `generator_output`. SkyRL cuts, pads and re-aligns the rows.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ...client.blocking.client import RolloutClient
from ...data.reward_curve import RewardCurve
from ...data.rows import rows_of, single_rows_of
from ...errors import ConfigError, InvalidJob
from ...wire.messages.base import new_id
from ...wire.records import EXPERTS, NO_TOKEN, SAMPLING_MASK
from ..recorded import NOTHING_ASKED, Asked, routes, supports
from ..sampling import sampling_of
from ..session import Sample, TrainerSession

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from ...data.group import Group
    from ...data.rows import Row
    from ...wire.messages.jobs import Job


@dataclass(frozen=True, slots=True)
class TrajectoryID:
    """A rollout's prompt and its number within the prompt's group; has the fields of SkyRL's class."""

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        """Return the form in which SkyRL compares ids."""
        return f"{self.instance_id}_{self.repetition_id}"


def generator_output(
    groups: Sequence[Group],
    *,
    step_wise: bool = False,
    token_rewards: bool = False,
    trajectory_ids: Sequence[Any] | None = None,
    asked: Asked = NOTHING_ASKED,
    as_arrays: bool = False,
    top_k: int = 0,
) -> dict[str, Any]:
    """Return the groups with the keys and types of SkyRL's `GeneratorOutput`.

    Args:
        groups: what to train on, in this order.
        step_wise: with `generator.step_wise_trajectories` a trajectory may have several rows, all with its reward, the
            last with `is_last_step`.
        token_rewards: `rewards` has a list per row, with the rewards of turns at their tokens; otherwise a number,
            their sum. SkyRL cannot mix the two.
        trajectory_ids: SkyRL's own, one per trajectory; None: made from the groups' ids, which are then the `uids`.
        asked: the records that each rollout must have. `experts` become `rollout_expert_indices`, of the first tokens
            of prompt and response. `sampling_mask` becomes SkyRL 0.4's `rollout_sample_support`, int32 [response,
            top_k] with -1 in unused places.
        as_arrays: routes are arrays, as SkyRL 0.4 has them; otherwise nested lists, as 0.3 has them.
        top_k: of the rollouts' sampling, above 1: the columns of `rollout_sample_support`, of which there are more only
            if equally likely tokens at the cut were all kept. Otherwise not used.

    Raises:
        ConfigError: `sampling_mask` is asked for without `top_k`.
        NotTrainable: there are no groups, one is not trainable, or one has several segments without `step_wise`; or a
            record is missing, or a trained token needs a row that is unknown.
    """
    rows = rows_of(groups) if step_wise else single_rows_of(groups, "SkyRL", "set generator.step_wise_trajectories")
    ids = trajectory_ids or [
        TrajectoryID(group.group_id, place) for group in groups for place in range(len(group.trajectories))
    ]
    samples = [Sample.of(row) for row in rows]
    for sample in samples:
        asked.check(sample)
    experts = [routes(sample) for sample in samples] if EXPERTS in asked.names else None
    more = {"rollout_sample_support": _sample_support(samples, top_k)} if SAMPLING_MASK in asked.names else {}
    return {
        "prompt_token_ids": [sample.prompt_ids.tolist() for sample in samples],
        "response_ids": [sample.response_ids.tolist() for sample in samples],
        "rewards": [sample.token_rewards.tolist() if token_rewards else sample.row.reward for sample in samples],
        "loss_masks": [sample.response_mask.tolist() for sample in samples],
        "stop_reasons": ["length" if row.truncated else "stop" for row in rows],
        "rollout_metrics": _metrics(rows),
        "rollout_logprobs": [sample.logprobs.tolist() for sample in samples],
        "trajectory_ids": [ids[row.index] for row in rows],
        "trajectory_generation_times": [row.seconds for row in rows],
        "rollout_expert_indices": experts if as_arrays or experts is None else [one.tolist() for one in experts],
        "is_last_step": [row.is_last for row in rows] if step_wise else None,
        "env_metrics": [dict(row.trajectory.result.metrics) for row in rows],
        **more,
    }


class Generator:
    """SkyRL's `GeneratorInterface` by a service.

    Each call has its own client and session: SkyRL's fully asynchronous trainer makes many calls at once, and batches
    of one session share their prompts.

    Args:
        make_job: makes the job of a prompt from its messages, its `env_class` and its `env_extras`. The generator sets
            its `job_id` and, where SkyRL passes sampling parameters, its `sampling`.
        connect: opens a client, in a thread; by default that of `prorl serve` without a topology file.
        step_wise: as in `generator_output`.
        token_rewards: as in `generator_output`.
        spare: makes the job of another training prompt, which replaces a training prompt that cannot be rolled out;
            None: no prompt is replaced.
        away_s: how long the service may be unavailable, in seconds.
        options: more options of `open_batch`, such as `weight` and `max_replacements`.
        asked: the model that rolls out, and the records that each training rollout must have, as in
            `generator_output`.
    """

    def __init__(
        self,
        make_job: Callable[[Any, str, dict[str, Any]], Job],
        *,
        connect: Callable[[], RolloutClient] = RolloutClient,
        step_wise: bool = False,
        token_rewards: bool = False,
        spare: Callable[[], Job] | None = None,
        away_s: float = 600.0,
        options: Mapping[str, Any] | None = None,
        asked: Asked = NOTHING_ASKED,
    ) -> None:
        self._make_job = make_job
        self._connect = connect
        self._output = {"step_wise": step_wise, "token_rewards": token_rewards}
        self._spare = spare
        self._away_s = away_s
        self._asked = asked
        self._options = {"carry": "nothing", **(options or {}), "keep": "all", "model": asked.model}
        self.curve = RewardCurve()
        """The rewards of the training batches; each prints a line."""

    async def generate(self, input_batch: Mapping[str, Any], disable_tqdm: bool = False) -> dict[str, Any]:  # noqa: ARG002 - SkyRL passes it
        """Roll out a `GeneratorInput`; the output is in the order of the input.

        Its metric `generate/replaced_prompts` counts the prompts that were replaced by others.

        Raises:
            InvalidJob: the prompts are not repeated in SkyRL's order, or a sampling parameter is unknown.
            ConfigError: sampling masks are asked for, and a prompt's sampling has no `top_k` above 1.
            NotTrainable: prompts and their replacements could not be rolled out. In an evaluation none is replaced,
                since its score is of these prompts.
        """
        given = input_batch.get("sampling_params")
        drawn = {} if given is None else {"sampling": sampling_of(given)}

        phase = getattr(input_batch.get("batch_metadata"), "training_phase", "train")
        asked = self._asked if phase == "train" else Asked(self._asked.model)

        def prompt_of(job: Job) -> Job:
            return msgspec.structs.replace(asked.job(job), job_id=new_id(), **drawn)

        size, made = self._jobs(input_batch)
        jobs = [prompt_of(job) for job in made]
        cuts = [job.sampling.top_k for job in jobs]
        if SAMPLING_MASK in asked.names:
            _check_top_k(min(cuts, default=0))
        spare = self._spare if phase == "train" else None
        more = None if spare is None else lambda: prompt_of(spare())
        session = TrainerSession(self._connect, self._away_s)
        options = {**self._options, "complete": asked.names}
        groups = await _in_thread(session, lambda: session.fill(jobs, size, more, **options))
        if spare is not None:
            line = self.curve.add([reward for group in groups for reward in group.rewards.tolist()])
            print(f"batch {len(self.curve.means)}: {line}", flush=True)
        ids = input_batch.get("trajectory_ids")
        output = generator_output(groups, **self._output, trajectory_ids=ids, asked=asked, top_k=max(cuts, default=0))
        output["rollout_metrics"]["generate/replaced_prompts"] = float(session.replaced)
        return output

    def _jobs(self, batch: Mapping[str, Any]) -> tuple[int, list[Job]]:
        """Return the number of rollouts per prompt, and one job per prompt."""
        prompts, ids = batch["prompts"], batch.get("trajectory_ids")
        extras = batch.get("env_extras") or [{}] * len(prompts)
        size = max((tid.repetition_id + 1 for tid in ids), default=1) if ids else 1
        repeats = [tid.repetition_id for tid in ids or ()]
        if len(prompts) % size or repeats != [index % size for index in range(len(repeats))]:
            names = Counter(tid.instance_id for tid in ids or ())
            raise InvalidJob(
                f"prompts must be repeated {size} times each, one behind the other: {names.most_common(4)}"
            )
        firsts = range(0, len(prompts), size)
        return size, [self._make_job(prompts[first], batch["env_classes"][first], extras[first]) for first in firsts]


async def _in_thread(session: TrainerSession, collect: Callable[[], list[Group]]) -> list[Group]:
    """Collect groups in a thread; if the caller is cancelled, stop the collection."""
    collected: Future[list[Group]] = Future()
    collected.set_running_or_notify_cancel()

    def run() -> None:
        try:
            with session:
                collected.set_result(collect())
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            collected.set_exception(error)

    threading.Thread(target=run, name="rollouts", daemon=True).start()
    try:
        return await asyncio.wrap_future(collected)
    except asyncio.CancelledError:
        session.stop()
        raise


def _check_top_k(top_k: int) -> None:
    if top_k < 2:
        raise ConfigError(
            f"rollout_sample_support has top_k columns: draw with a top_k above 1, not {top_k}", key="top_k"
        )


def _sample_support(samples: list[Sample], top_k: int) -> list[NDArray[np.int32]]:
    """Return the ids that sampling left for each token of a response, all with the same number of columns."""
    _check_top_k(top_k)
    found = [supports(sample) for sample in samples]
    width = max(top_k, *(int(np.diff(offsets).max(initial=0)) for _, offsets in found))
    padded = []
    for ids, offsets in found:
        counts = np.diff(offsets)
        table = np.full((len(counts), width), NO_TOKEN, np.int32)
        table[np.arange(width) < counts[:, None]] = ids
        padded.append(table)
    return padded


def _metrics(rows: list[Row]) -> dict[str, float]:
    """Return the metrics that SkyRL logs; it merges batches by `min`, `max` or `avg` in the name."""
    tokens = np.array([len(row) - row.prompt_tokens for row in rows])
    seconds = np.array([row.seconds for row in rows if row.is_last])
    versions = [row.versions for row in rows]
    return {
        "generate/min_num_tokens": float(tokens.min()),
        "generate/max_num_tokens": float(tokens.max()),
        "generate/avg_num_tokens": float(tokens.mean()),
        "generate/trajectory_completion_time_mean": float(seconds.mean()),
        "generate/trajectory_completion_time_max": float(seconds.max()),
        "generate/min_weight_version": float(min(spanned[0] for spanned in versions)),
        "generate/max_weight_version": float(max(spanned[-1] for spanned in versions)),
    }
