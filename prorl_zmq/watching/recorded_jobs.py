"""Recordings of a running service for `prorl explain`: traces of its jobs, and results of those that ended.

Each rollout broker is asked for its own jobs, `AT_A_TIME` at a time and at most `JOBS_LIMIT`, to bound the load.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..errors import RequestTimeout, UnknownBatch, UnknownJob
from ..explain.recording import Recording, slots_of_status
from ..explain.rollout import Rollout, rollout_of, shifted, within
from ..service.rollout_brokers import summed
from ..wire.messages.base import BatchIdentifier
from ..wire.messages.jobs import Outcome
from ..wire.messages.watching import ROWS_LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..client.asynchronous.client import AsyncRolloutClient
    from ..service.rollout_brokers import RolloutBrokers
    from ..wire.messages.front_door import ServiceStatus
    from ..wire.messages.watching import BatchView, JobRow, Watched

JOBS_LIMIT = 1000
"""Most jobs of one broker that are looked at: the newest."""
PAGES = 10
"""Most pages of rows that these are looked for in."""
AT_A_TIME = 16
END_S = 0.05
"""The trace of the rollout that met a batch may end so much later: it is noted first, by another clock."""
CLOCK_S = 0.5
"""Clocks of brokers that differ by less are taken as they are."""
IDLE_S = 5.0
"""Jobs between which the service had nothing to do for so long are not explained together."""


KEPT = "the broker remembers those that ended last, and none over its restart once they were collected"


class RecordedJobs(NamedTuple):
    recording: Recording | None
    """None: there are no such jobs."""
    notes: tuple[str, ...]


def record_service(brokers: RolloutBrokers, wanted: Callable[[JobRow], bool] = lambda _row: True) -> RecordedJobs:
    """Record the newest jobs of a service that are wanted, of those between which it was not idle."""
    answers = brokers.ask(lambda client: _record_newest(client, wanted))
    answers.check()
    found = list(answers.found.values())
    rollouts = _last_busy([one for each in found for one in (each.by_our_clock() if len(found) > 1 else each.rollouts)])
    statuses = [each.status for each in found]
    return RecordedJobs(_recording(rollouts, statuses), tuple(answers.silent()))


def record_batch(brokers: RolloutBrokers, beginning: str) -> tuple[BatchView, RecordedJobs] | None:
    """Record the jobs of a batch, open or closed, whose id begins so; None: no broker that answers knows one.

    Of rollouts that it took over from an earlier batch, or did not wait for, it has the part that was in its time.

    Raises:
        UnknownBatch: there are several.
    """
    found = _view(brokers, beginning)
    if found is None:
        return None
    name, view = found
    answers = brokers.ask(lambda client: _record_newest(client, lambda row: _is_of(row, view)), only=name)
    answers.check()
    rollouts, status, _ = answers.found[name]
    notes = _missing(view, len(rollouts))
    return view, RecordedJobs(_recording(_in_its_time(rollouts, view), [status]), notes)


def _view(brokers: RolloutBrokers, beginning: str) -> tuple[str, BatchView] | None:
    try:
        msgspec.convert(beginning, BatchIdentifier)
    except msgspec.ValidationError:
        return None
    views = brokers.ask(lambda client: client.views.batch(beginning))
    for error in views.problems.values():
        if error.fields.get("matches") or not isinstance(error, UnknownBatch | RequestTimeout):
            raise error
    ids = sorted({view.status.batch_id for view in views.found.values()})
    if len(ids) > 1:
        raise UnknownBatch(f"several batches begin with {beginning}: {', '.join(ids)}", matches=len(ids))
    return min(views.found.items(), key=lambda one: one[1].is_closed, default=None)


def _is_of(row: JobRow, view: BatchView) -> bool:
    """Return whether a job ran for a batch: it is of one of its groups, and was there while it needed rollouts."""
    group_id = row.job_id.rpartition(".")[0]
    if not (group_id.startswith(view.begins) or group_id in view.taken_over):
        return False
    before = view.opened_at is not None and row.ended_at is not None and row.ended_at < view.opened_at
    return not before and (view.ended_at is None or row.accepted_at < view.ended_at)


def _in_its_time(rollouts: list[Rollout], view: BatchView) -> list[Rollout]:
    """Return what rollouts did between the opening of a batch and the end of the last one that it needed."""
    began = view.opened_at if view.opened_at is not None else 0.0
    if view.ended_at is None:
        return [within(one, began, one.seen) if one.accepted < began else one for one in rollouts]
    latest = view.ended_at + END_S
    needed = [one.ended for one in rollouts if one.outcome not in (None, Outcome.CANCELLED) and one.ended is not None]
    ended = max((at for at in needed if at <= latest), default=view.ended_at)
    return [within(one, began, ended) for one in rollouts if one.accepted < ended]


def _missing(view: BatchView, found: int) -> tuple[str, ...]:
    missing = view.rollouts - found
    if missing <= 0:
        return ()
    if found >= JOBS_LIMIT:
        return (f"of its {view.rollouts} rollouts, the newest {found} are explained",)
    return (f"of its {view.rollouts} rollouts, {missing} are no longer kept: {KEPT}",)


class _Newest(NamedTuple):
    """The newest jobs of one broker."""

    rollouts: list[Rollout]
    status: ServiceStatus
    ahead_s: float
    """How much this machine's clock is ahead of the broker's, at most."""

    def by_our_clock(self) -> list[Rollout]:
        """Return the rollouts by one clock for all brokers; clocks that nearly agree are left alone."""
        return [shifted(one, self.ahead_s) for one in self.rollouts] if abs(self.ahead_s) > CLOCK_S else self.rollouts


async def _record_newest(client: AsyncRolloutClient, wanted: Callable[[JobRow], bool]) -> _Newest:
    rollouts, ahead_s = await _record(client, await _newest(client, wanted))
    return _Newest(rollouts, await client.status(), ahead_s)


async def _newest(client: AsyncRolloutClient, wanted: Callable[[JobRow], bool]) -> list[str]:
    """Return the newest jobs that are wanted, a bounded number of those that the broker knows."""
    broker_id, before = "", 0
    job_ids: dict[str, None] = {}
    for _ in range(PAGES):
        rows: Watched = await client.views.changes(broker_id, 0, before, ROWS_LIMIT)
        job_ids.update((row.job_id, None) for row in rows.jobs if wanted(row))
        broker_id, before = rows.broker_id, rows.first
        if not rows.more or len(job_ids) >= JOBS_LIMIT:
            break
    return list(job_ids)[:JOBS_LIMIT]


async def _record(client: AsyncRolloutClient, job_ids: Iterable[str]) -> tuple[list[Rollout], float]:
    room = asyncio.Semaphore(AT_A_TIME)

    async def one(job_id: str) -> tuple[Rollout, float] | None:
        async with room:
            rollout = await record_job(client, job_id)
        return (rollout, time.time() - rollout.seen) if rollout is not None else None

    found = [each for each in await asyncio.gather(*map(one, job_ids)) if each is not None]
    return [rollout for rollout, _ in found], min((ahead_s for _, ahead_s in found), default=0.0)


async def record_job(client: AsyncRolloutClient, job_id: str) -> Rollout | None:
    """Record one job; None: it is known no more."""
    try:
        trace = await client.trace(job_id)
    except UnknownJob:
        return None
    try:
        result = await client.views.result(trace.job_id) if trace.outcome is not None else None
    except UnknownJob:  # collected long ago: its trace is kept for longer
        result = None
    return rollout_of(trace, result)


def _recording(rollouts: list[Rollout], statuses: list[ServiceStatus]) -> Recording | None:
    if not rollouts:
        return None
    rollouts = sorted(rollouts, key=lambda one: one.accepted)
    live = any(one.ended is None for one in rollouts)
    now = max(one.seen for one in rollouts) if live else None
    return Recording(tuple(rollouts), slots_of_status([summed(statuses)]), now)


def _last_busy(rollouts: list[Rollout]) -> list[Rollout]:
    """Return the rollouts since the service was idle for a while."""
    last: list[Rollout] = []
    until = 0.0
    for rollout in sorted(rollouts, key=lambda one: one.accepted):
        if rollout.accepted > until + IDLE_S:
            last = []
        last.append(rollout)
        until = max(until, rollout.ended if rollout.ended is not None else rollout.seen)
    return last
