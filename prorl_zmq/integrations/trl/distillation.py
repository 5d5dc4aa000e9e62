"""`DistillationWorker`: rollouts and their teacher's scores for TRL's experimental `AsyncDistillationTrainer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...data.scores import SCORES_TOP_LIMIT
from ...errors import ConfigError
from ...wire.messages.base import POLICY
from ..recorded import Asked, teacher_scores
from .async_grpo import RolloutWorker, fields_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ...data.group import Group
    from ..session import Sample


class DistillationWorker(RolloutWorker):
    """Continuously rolls out prompts, scored by a model of the service; pass it as `rollout_worker`.

    The teacher takes the place of TRL's `teacher_server_urls`. Each segment of a rollout is a sample. The service
    replaces a rollout that its teacher did not score.

    Args:
        rows: the data set, such as a `datasets.Dataset`; prompts are drawn at random.
        args: the trainer's `AsyncDistillationConfig`: `teacher_top_k`, staleness, and sampling.
        teacher: the model of the service that scores.
        model: the model of the service that rolls out.
        options: further options of `RolloutWorker`.

    Raises:
        ConfigError: `teacher_top_k` is over 64, or `teacher_temperature` is not 1: scores are at temperature 1.
        ImportError, ConfigError, InvalidJob: as `RolloutWorker`.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        args: Any,
        *,
        teacher: str = "teacher",
        model: str = POLICY,
        **options: Any,
    ) -> None:
        if not 1 <= args.teacher_top_k <= SCORES_TOP_LIMIT:
            raise ConfigError(
                f"teacher_top_k is 1 to {SCORES_TOP_LIMIT}, not {args.teacher_top_k}", key="teacher_top_k"
            )
        if args.teacher_temperature != 1.0:
            raise ConfigError(
                f"scores are at temperature 1; set teacher_temperature=1.0, not {args.teacher_temperature}",
                key="teacher_temperature",
            )
        options["batch_options"] = {"keep": "all", **(options.get("batch_options") or {})}
        super().__init__(rows, args, model=model, **options)
        self._asked = Asked(model, (), f"{teacher}:{args.teacher_top_k}")
        self._teacher = teacher

    def _given(self, group: Group, samples: Sequence[Sample]) -> list[Any]:  # noqa: ARG002 - a group has one rollout
        from trl.experimental.async_distillation.async_rollout_worker import RolloutSample

        prompt_id = next(self._group_ids)
        found = []
        for sample in samples:
            ids, logprobs = teacher_candidates(sample)
            columns = {"teacher_topk_ids": ids, "teacher_topk_logprobs": logprobs}
            fields: dict[str, Any] = {
                **fields_of(sample),
                **columns,
                "teacher_id": self._teacher,
                "prompt_id": prompt_id,
            }
            found.append(RolloutSample(**fields, metrics={"reward": sample.row.reward}))
        return found


def teacher_candidates(sample: Sample) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return TRL's `teacher_topk_ids` and `teacher_topk_logprobs` of a sample of T tokens, each [T, K + 1].

    Row i has the candidates for token i: the K likeliest, the likeliest first, then the token itself unless it is among
    them. Tokens that are not trained have none: -1 and minus infinity.

    Raises:
        NotTrainable: a token has no scores.
    """
    logprobs, top_ids, top_logprobs = teacher_scores(sample)
    token_ids = sample.row.arrays.token_ids[: len(logprobs) + 1]
    trained = np.flatnonzero(sample.row.arrays.loss_mask[: len(token_ids)])
    width = top_ids.shape[1]
    ids = np.full((len(token_ids), width + 1), -1, np.int64)
    found = np.full(ids.shape, -np.inf, np.float32)
    ids[trained, :width], found[trained, :width] = top_ids[trained - 1], top_logprobs[trained - 1]
    outside = trained[~(ids[trained] == token_ids[trained, None]).any(axis=1)]
    ids[outside, width], found[outside, width] = token_ids[outside], logprobs[outside - 1]
    return ids, found
