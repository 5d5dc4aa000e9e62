"""`TrainingSteps`: figures of the last closed batches, and the times of weight changes; in memory only. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ...wire.messages.base import POLICY
from ...wire.messages.watching import BATCH_STEPS_LIMIT, BatchStep, StepList

if TYPE_CHECKING:
    from .batch_records import BatchRecord

TIMES = ("opened_at", "began_at", "ended_at", "served_at", "closed_at")


class TrainingSteps:
    def __init__(self) -> None:
        self._steps: deque[BatchStep] = deque(maxlen=BATCH_STEPS_LIMIT)
        """With times of the broker's clock."""
        self._models: deque[str] = deque(maxlen=BATCH_STEPS_LIMIT)
        """Of each step."""
        self._weights: dict[str, deque[tuple[int, float]]] = {}
        """By model."""

    def weights_changed(self, model: str, version: int, now: float) -> None:
        """Record weights that a model's trainer announced."""
        known = self._weights.setdefault(model, deque(maxlen=BATCH_STEPS_LIMIT))
        if not known or known[-1][0] != version:
            known.append((version, now))

    def closed(self, batch: BatchRecord, now: float) -> None:
        """Record a batch that was closed or whose session is gone."""
        kept, weights = batch.stats.kept.distribution(), self._weights.get(batch.model)
        self._models.append(batch.model)
        self._steps.append(
            BatchStep(
                batch_id=batch.batch_id,
                session=batch.session,
                opened_at=batch.opened_at,
                began_at=batch.began_at,
                ended_at=batch.ended_at,
                served_at=batch.served_at,
                closed_at=now,
                weight_version=weights[-1][0] if weights else 0,
                groups=batch.stats.kept_groups,
                rollouts=kept.reward.count,
                failed=batch.stats.failed,
                reward=kept.reward.mean,
                tokens=kept.tokens.mean,
                tokens_p90=kept.tokens.p90,
                seconds=kept.seconds.mean,
                staleness=kept.staleness.mean,
                staleness_most=kept.staleness.most,
            )
        )

    def listed(self, request_id: str, now: float, at: float) -> StepList:
        """Return all steps, oldest first; `at` is `now` in seconds since 1970."""

        def wall(time: float | None) -> float | None:
            return at - (now - time) if time is not None else None

        return StepList(
            request_id,
            steps=tuple(replace(step, **{name: wall(getattr(step, name)) for name in TIMES}) for step in self._steps),
            weights=tuple((version, at - (now - changed)) for version, changed in self._weights.get(POLICY, ())),
            models=tuple(self._models) if {*self._models} - {POLICY} else (),
            weights_of={
                model: tuple((version, at - (now - changed)) for version, changed in weights)
                for model, weights in self._weights.items()
                if model != POLICY
            },
        )
