"""`Rollout`: one rollout's recorded times: its waits, its works, and the parts of RUN.

Made from a job's trace and its result, whose timings divide RUN; without a result RUN is one part. Times are seconds
since 1970 by the broker's clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from ..wire.messages.base import POLICY
from ..wire.messages.jobs import Outcome, Phase
from .parts import OWN_CODE, median_parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ..wire.messages.front_door import JobTrace, Span
    from ..wire.messages.jobs import Result, Step, StepTokens

NO_PARTS = frozenset({*Phase, *(f"{phase}_queue" for phase in Phase)})
"""Timings of a result that are not part of RUN."""


class EngineCall(NamedTuple):
    """One generation."""

    began: float
    ended: float
    tokens: StepTokens


@dataclass(frozen=True, slots=True)
class Work:
    """One stay in a slot."""

    phase: Phase
    queued_at: float
    began: float
    ended: float
    parts: Mapping[str, float]
    """Seconds by part; their sum is the whole time."""
    node: str = ""
    stage_id: str = ""
    backend: str = ""
    lost: str = ""
    """The error's code if it had to be repeated; empty: it counts."""
    failed: bool = False
    """Whether that error occurred in it."""
    calls: tuple[EngineCall, ...] = ()
    """Its generations, as far as they were recorded."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class Rollout:
    job_id: str
    task: str
    accepted: float
    ended: float | None
    """None: it has not ended."""
    works: tuple[Work, ...]
    waits: tuple[Phase, float] | None = None
    """The phase that it waits for now, and since when."""
    outcome: Outcome | None = None
    model: str = POLICY
    """The model of its own turns."""
    code: str = ""
    """Of its final error."""
    turns: int = 0
    tokens: int = 0
    """Generated tokens."""
    divided: bool = False
    """Whether the parts of RUN are known."""
    left_out: int = 0
    """Events that its trace has lost."""
    seen: float = 0.0
    """When its trace was read."""
    longest: Step | None = None
    """The longest step of its RUN."""
    cut_off: bool = False
    """It ran on after the end of what is explained, which did not wait for it; `ended` is that end."""

    @property
    def counted(self) -> tuple[Work, ...]:
        return tuple(work for work in self.works if not work.lost)

    @property
    def has_run(self) -> bool:
        return any(work.phase == Phase.RUN for work in self.counted)

    @property
    def worked_s(self) -> float:
        return sum(work.seconds for work in self.counted)

    @property
    def again_tokens(self) -> tuple[int, int]:
        """The prompt tokens that its engine computed again, and all prompt tokens."""
        tokens = [call.tokens for work in self.counted for call in work.calls]
        return sum(min(one.again, one.prompt) for one in tokens), sum(one.prompt for one in tokens)

    def parts(self) -> dict[str, float]:
        """Return the seconds of works that count, by part."""
        parts: dict[str, float] = {}
        for work in self.counted:
            for part, seconds in work.parts.items():
                parts[part] = parts.get(part, 0.0) + seconds
        return parts


def medians(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Return the median seconds of each part."""
    return median_parts([one.parts() for one in rollouts])


def rollout_of(trace: JobTrace, result: Result | None = None) -> Rollout:
    """Make a rollout from a job's trace and result."""
    now = trace.accepted_at + trace.age_s
    works: list[Work] = []
    waiting: Span | None = None
    attempt = 1
    for span in trace.spans:
        if span.place == "queued":
            waiting = span
            if works and span.attempt > attempt:
                works = _lost(works, span, trace.spans)
        else:
            works.append(_work(span, waiting, trace.accepted_at, now))
            waiting, attempt = None, span.attempt
    timings = {name: s for name, s in result.timings.items() if name not in NO_PARTS} if result is not None else {}
    if timings and result is not None:
        steps = result.steps
        works = [
            _divided(work, timings, steps) if work.phase == Phase.RUN and not work.lost else work for work in works
        ]
    error = trace.error if trace.error is not None else result.error if result is not None else None
    return Rollout(
        job_id=trace.job_id,
        task=trace.task or (result.task if result is not None else ""),
        accepted=trace.accepted_at,
        ended=trace.accepted_at + trace.ended_s if trace.ended_s is not None else None,
        works=tuple(works),
        waits=(waiting.phase, trace.accepted_at + waiting.start_s) if waiting and waiting.end_s is None else None,
        outcome=trace.outcome,
        model=trace.model,
        code=error.code if error is not None else "",
        turns=int(result.metrics.get("turns", 0)) if result is not None else 0,
        tokens=int(result.metrics.get("generated_tokens", 0)) if result is not None else 0,
        divided=bool(timings),
        left_out=trace.left_out,
        seen=now,
        longest=max(result.steps, key=lambda step: step.seconds, default=None) if result is not None else None,
    )


def within(rollout: Rollout, began: float, ended: float = math.inf) -> Rollout:
    """Return the part of a rollout within a time span that overlaps it."""
    works = tuple(_within(work, began, ended) for work in rollout.works if work.began < ended and work.ended > began)
    waits = (rollout.waits[0], max(began, rollout.waits[1])) if rollout.waits is not None else None
    rollout = replace(rollout, accepted=max(began, rollout.accepted), works=works, waits=waits)
    if ended == math.inf or (rollout.ended is not None and rollout.ended <= ended):
        return rollout
    return replace(rollout, ended=ended, waits=None, outcome=None, code="", cut_off=True)


def shifted(rollout: Rollout, by_s: float) -> Rollout:
    """Return a rollout with its times shifted to another clock."""
    works = tuple(
        replace(
            one,
            queued_at=one.queued_at + by_s,
            began=one.began + by_s,
            ended=one.ended + by_s,
            calls=tuple(call._replace(began=call.began + by_s, ended=call.ended + by_s) for call in one.calls),
        )
        for one in rollout.works
    )
    return replace(
        rollout,
        accepted=rollout.accepted + by_s,
        ended=rollout.ended + by_s if rollout.ended is not None else None,
        works=works,
        waits=(rollout.waits[0], rollout.waits[1] + by_s) if rollout.waits is not None else None,
        seen=rollout.seen + by_s,
    )


def _within(work: Work, since: float, until: float) -> Work:
    began, ended = max(since, work.began), min(until, work.ended)
    share = (ended - began) / work.seconds if work.seconds else 1.0
    parts = {part: seconds * share for part, seconds in work.parts.items()}
    calls = tuple(call for call in work.calls if began <= call.ended <= ended)
    return replace(work, queued_at=max(since, work.queued_at), began=began, ended=ended, parts=parts, calls=calls)


def _work(span: Span, queued: Span | None, accepted: float, now: float) -> Work:
    began = accepted + span.start_s
    ended = max(began, accepted + span.end_s if span.end_s is not None else now)
    return Work(
        phase=span.phase,
        queued_at=accepted + queued.start_s if queued is not None else began,
        began=began,
        ended=ended,
        parts={span.phase.upper(): ended - began},
        node=span.node,
        stage_id=span.stage_id,
        backend=span.backends[-1] if span.backends else "",
    )


def _lost(works: list[Work], again: Span, spans: Sequence[Span]) -> list[Work]:
    """Mark the works that a job must repeat: all if it restarts from INIT, else those of the phase."""
    errors = [span.error.code for span in spans if span.error is not None and span.start_s < again.start_s]
    code = errors[-1] if errors else "lost"
    marked = works if again.phase == Phase.INIT else [work for work in works if work.phase == again.phase]
    lost = [replace(work, lost=work.lost or code) if work in marked else work for work in works]
    return [*lost[:-1], replace(lost[-1], failed=True)]


def _divided(work: Work, timings: Mapping[str, float], steps: Sequence[Step]) -> Work:
    """Divide a RUN by its timings, scaled down if they overlapped, and add the generations among its steps."""
    known = sum(timings.values())
    scale = min(1.0, work.seconds / known) if known > 0 else 0.0
    parts = {name: seconds * scale for name, seconds in timings.items()}
    starts = ((work.began + step.start_s, step) for step in steps)
    calls = tuple(EngineCall(at, at + one.seconds, one.tokens) for at, one in starts if one.tokens is not None)
    return replace(work, parts={**parts, OWN_CODE: max(0.0, work.seconds - known * scale)}, calls=calls)
