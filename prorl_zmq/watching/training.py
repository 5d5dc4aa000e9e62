"""The steps of a training, from the batches that its session closed and the times at which weights changed. Pure.

A step is a batch. It lasts from when the client had the batch before to when it has this one. Rollouts count as working
from a batch's first prompt until it needs no more of them; the trainer from when it has a batch until it announces the
next weights. So the figures hold for any trainer that opens batches and announces weights.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice, pairwise, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING

from ..wire.messages.base import POLICY, Part

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..wire.messages.watching import BatchStep, StepList

    Span = tuple[float, float]


class TrainingStep(Part, frozen=True, kw_only=True):
    """One step; rewards and the like are means over the rollouts that the client was sent."""

    batch_id: str
    at: float
    """When its client got it, in seconds since 1970."""
    weight_version: int
    groups: int
    rollouts: int
    failed: int
    reward: float
    tokens: float
    tokens_p90: float
    seconds: float
    staleness: float
    staleness_most: float
    step_s: float | None = None
    """How long it lasted; None: the broker does not know when it began."""
    rollouts_share: float | None = None
    """Of that time, in which rollouts worked."""
    trainer_share: float | None = None
    """In which the trainer worked; None: it announced no weights after that."""
    overlap: float | None = None
    """In which both did."""


class Training(Part, frozen=True, kw_only=True):
    """The steps of one session."""

    session: str
    broker: str
    steps: tuple[TrainingStep, ...]
    """The oldest first."""


def trainings(listed: dict[str, StepList]) -> list[Training]:
    """Return the sessions that had batches with rollouts, by rollout broker; that of the last step comes first."""
    found = []
    for broker, steps in listed.items():
        sessions: dict[str, list[BatchStep]] = {}
        models: dict[str, set[str]] = {}
        for step, model in zip(steps.steps, steps.models or (POLICY,) * len(steps.steps), strict=True):
            if step.rollouts:
                sessions.setdefault(step.session, []).append(step)
                models.setdefault(step.session, set()).add(model)
        announced = {**steps.weights_of, POLICY: steps.weights}
        for name, own in sessions.items():
            changes = sorted(at for model in models[name] for _, at in announced.get(model, ()))
            found.append(Training(session=name, broker=broker, steps=_steps(own, changes)))
    return sorted(found, key=lambda training: -training.steps[-1].at)


def _steps(batches: Sequence[BatchStep], changes: Sequence[float]) -> tuple[TrainingStep, ...]:
    batches = sorted(batches, key=_had_at)
    rolling = _union((one.began_at, one.ended_at or one.closed_at) for one in batches if one.began_at is not None)
    learning = _union((had, _after(changes, had)) for had in map(_had_at, batches))
    starts = [batches[0].opened_at, *(_had_at(one) for one, _ in pairwise(batches))]
    last_change = max(changes, default=0.0)
    return tuple(
        _step(batch, start, rolling, learning, knows_trainer=start is not None and last_change > start)
        for batch, start in zip(batches, starts, strict=True)
    )


def _step(
    batch: BatchStep, start: float | None, rolling: list[Span], learning: list[Span], *, knows_trainer: bool
) -> TrainingStep:
    end = _had_at(batch)
    shares: dict[str, float | None] = {}
    if start is not None and end > start:
        ours, theirs = _within(rolling, start, end), _within(learning, start, end)
        shares = {"step_s": end - start, "rollouts_share": _length(ours) / (end - start)}
        if knows_trainer:
            shares |= {
                "trainer_share": _length(theirs) / (end - start),
                "overlap": _length(_both(ours, theirs)) / (end - start),
            }
    return TrainingStep(
        batch_id=batch.batch_id,
        at=end,
        weight_version=batch.weight_version,
        groups=batch.groups,
        rollouts=batch.rollouts,
        failed=batch.failed,
        reward=batch.reward,
        tokens=batch.tokens,
        tokens_p90=batch.tokens_p90,
        seconds=batch.seconds,
        staleness=batch.staleness,
        staleness_most=batch.staleness_most,
        **shares,
    )


def _had_at(batch: BatchStep) -> float:
    return batch.served_at if batch.served_at is not None else batch.closed_at


def _union(spans: Iterable[Span]) -> list[Span]:
    """Return spans that do not overlap, in order, of any."""
    found: list[Span] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _within(spans: Sequence[Span], start: float, end: float) -> list[Span]:
    """Return what of spans in order lies within a time."""
    first = max(0, bisect_right(spans, start, key=itemgetter(0)) - 1)
    inside = takewhile(lambda span: span[0] < end, islice(spans, first, None))
    return _union((max(span[0], start), min(span[1], end)) for span in inside)


def _both(ones: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return the times that are in both."""
    return [span for start, end in others for span in _within(ones, start, end)]


def _after(changes: Sequence[float], at: float) -> float:
    """Return the first change after a time; the time itself if there is none."""
    index = bisect_right(changes, at)
    return changes[index] if index < len(changes) else at


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
