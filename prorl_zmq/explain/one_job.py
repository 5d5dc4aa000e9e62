"""Explain one job against the median of other jobs of its task: waits, repeated work, stages, engine and tools.

It names the part that exceeds the median most, if that is significant, and says whether the job's node or backend is
slower than others, or the job had more turns or tokens.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from ..system.duration import duration
from ..wire.messages.base import POLICY
from ..wire.messages.jobs import Outcome
from .kv_loss import SHARE
from .parts import HANDOVER, WAIT, median_parts, work_name
from .suspects import suspects

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .recording import Recording
    from .rollout import Rollout
    from .suspects import Suspect

AS_USUAL = 1.25
"""Up to this multiple of the median, a job took as long as others."""
MORE = 1.5
"""From this multiple of the median, a job has more turns or tokens than others."""
LEAST_PEERS = 3
WORTH_NAMING = 0.1
"""A slow node or backend is named if this share of the excess time was in its work."""
AGAIN = "work done again"


class JobPartRow(msgspec.Struct, frozen=True):
    part: str
    seconds: float
    usual_s: float
    """The median of the others of its task."""


class JobExplanation(msgspec.Struct, frozen=True, kw_only=True):
    job_id: str
    task: str
    took_s: float
    """Up to now, if it is still running."""
    usual_s: float
    """The median of the others that have ended."""
    peers: int
    part: str
    """The part with the largest excess; empty: nothing stands out, or too few others are known."""
    sentences: tuple[str, ...]
    parts: tuple[JobPartRow, ...]
    notes: tuple[str, ...] = ()


def explain_job(job: Rollout, others: Sequence[Rollout], recording: Recording | None = None) -> JobExplanation:
    """Explain a job against the ended jobs of its task in `recording`."""
    peers = [
        one
        for one in others
        if (one.task, one.model) == (job.task, job.model) and one.job_id != job.job_id and one.ended is not None
    ]
    own = _seconds(job)
    usual = median_parts([_seconds(one) for one in peers])
    took_s, usual_s = sum(own.values()), median([_took_s(one) for one in peers] or [0.0])
    excess = {part: seconds - usual.get(part, 0.0) for part, seconds in own.items()}
    worst = max(excess, key=excess.__getitem__, default="")
    enough = len(peers) >= LEAST_PEERS
    stands_out = enough and took_s > AS_USUAL * usual_s
    rows = [JobPartRow(work_name(part), own.get(part, 0.0), usual.get(part, 0.0)) for part in {**own, **usual}]
    return JobExplanation(
        job_id=job.job_id,
        task=job.task,
        took_s=took_s,
        usual_s=usual_s,
        peers=len(peers),
        part=worst if stands_out else "",
        sentences=(
            _verdict(job, took_s, usual_s, len(peers), worst if stands_out else "", excess),
            _where(own, took_s),
            *_reasons(job, peers, [] if recording is None else _slow_members(job, excess, took_s - usual_s, recording)),
        ),
        parts=tuple(sorted(rows, key=lambda row: -row.seconds)),
        notes=(f"{job.left_out} events of its trace are lost",) if job.left_out else (),
    )


def _seconds(job: Rollout) -> dict[str, float]:
    """Return all seconds of a job by part, from its acceptance to its end."""
    seconds: defaultdict[str, float] = defaultdict(float, job.parts())
    for work in job.works:
        seconds[WAIT + work.phase.upper()] += max(0.0, work.began - work.queued_at)
        if work.lost:
            seconds[AGAIN] += work.seconds
    if job.waits is not None:
        phase, since = job.waits
        seconds[WAIT + phase.upper()] += max(0.0, job.seen - since)
    seconds[HANDOVER] = max(0.0, _took_s(job) - sum(seconds.values()))
    return {part: value for part, value in seconds.items() if value > 0}


def _took_s(job: Rollout) -> float:
    return (job.ended if job.ended is not None else job.seen) - job.accepted


def _verdict(job: Rollout, took_s: float, usual_s: float, peers: int, part: str, excess: dict[str, float]) -> str:
    took = f"took {duration(took_s)}" if job.ended is not None else f"has taken {duration(took_s)} so far"
    kind = f"task {job.task}" + (f" and model {job.model}" if job.model != POLICY else "")
    if peers < LEAST_PEERS:
        others = f"{peers or 'no'} others of {kind} to compare with"
        return f"Job {job.job_id} {took}; there are {others}" + (", which is too few." if peers else ".")
    usual = f"and the median of {peers} others of {kind} is {duration(usual_s)}"
    if not part:
        return f"Job {job.job_id} {took}, {usual}: nothing stands out."
    return f"Job {job.job_id} {took}, {usual}: {duration(excess[part])} more went into {work_name(part)}."


def _where(own: dict[str, float], took_s: float) -> str:
    largest = sorted(own.items(), key=lambda one: -one[1])[:3]
    shares = ", ".join(f"{work_name(part)} {seconds / took_s:.0%}" for part, seconds in largest) if took_s > 0 else ""
    return f"Its seconds went into {shares}." if shares else "It has done nothing yet."


def _slow_members(job: Rollout, excess: dict[str, float], longer_s: float, recording: Recording) -> list[Suspect]:
    """Return the slow nodes and backends that worked on a job and explain some of what it took longer."""
    members = {("node", work.node) for work in job.works} | {("backend", work.backend) for work in job.works}
    return [
        one
        for one in suspects(recording)
        if (one.kind, one.name) in members and excess.get(one.part, 0.0) >= max(0.0, WORTH_NAMING * longer_s)
    ]


def _reasons(job: Rollout, peers: list[Rollout], slow: list[Suspect]) -> list[str]:
    reasons = []
    failures = [work for work in job.works if work.failed]
    if failures:
        last = failures[-1]
        where = f" on node {last.node}" if last.node else ""
        again = "once" if len(failures) == 1 else f"{len(failures)} times"
        reasons.append(f"it failed {again}, last in {last.phase.upper()}{where} with {last.lost}")
    if job.outcome not in (None, Outcome.COMPLETED):
        reasons.append(f"it ended as {job.outcome}" + (f" ({job.code})" if job.code else ""))
    reasons += [one.evidence for one in slow]
    again_tokens, prompt_tokens = job.again_tokens
    if again_tokens > SHARE * prompt_tokens:
        share = again_tokens / prompt_tokens
        reasons.append(f"the engine computed {share:.0%} of its prompt tokens again, which it had cached")
    if len(peers) >= LEAST_PEERS:
        for what, own, usual in (
            ("turns", job.turns, median(one.turns for one in peers)),
            ("generated tokens", job.tokens, median(one.tokens for one in peers)),
        ):
            if own > MORE * usual > 0:
                reasons.append(f"it had {own} {what}, and the median of the others is {usual:g}")
    if job.longest is not None and not reasons:
        step = job.longest
        reasons.append(f"its longest step was {work_name(step.name)} in turn {step.turn}, {duration(step.seconds)}")
    text = "; ".join(reasons)
    return [f"{text[0].upper()}{text[1:]}."] if text else []


def with_job(recording: Recording, job: Rollout) -> Recording:
    """Return a recording that includes a job."""
    if any(one.job_id == job.job_id for one in recording.rollouts):
        return recording
    return replace(recording, rollouts=tuple(sorted((*recording.rollouts, job), key=lambda one: one.accepted)))
