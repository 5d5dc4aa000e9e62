"""What a running service tells `prorl explain`: the traces of its jobs, and the results of those that have ended.

Asked of each rollout broker for its own jobs, a few at a time, and for so many at the most: looking at a service must
not be a load for it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from ..errors import UnknownJob
from ..explain.recording import Recording, slots_of_status
from ..explain.rollout import Rollout, rollout_of
from ..service.rollout_brokers import summed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..client.asynchronous.client import AsyncRolloutClient
    from ..service.rollout_brokers import RolloutBrokers
    from ..wire.messages.front_door import ServiceStatus
    from ..wire.messages.watching import BatchView, JobRow, Watched

JOBS_LIMIT = 1000
"""Most jobs of one broker that are looked at: the newest."""
AT_A_TIME = 16
IDLE_S = 5.0
"""Jobs between which the service had nothing to do for so long are not explained together."""


class RecordedJobs(NamedTuple):
    recording: Recording | None
    """None: there are no such jobs."""
    notes: tuple[str, ...]


def record_service(brokers: RolloutBrokers, wanted: Callable[[JobRow], bool] = lambda _row: True) -> RecordedJobs:
    """Record the newest jobs of a service that are wanted, of those between which it was not idle."""
    answers = brokers.ask(lambda client: _record_newest(client, wanted))
    answers.check()
    rollouts = _last_busy([one for found, _ in answers.found.values() for one in found])
    statuses = [status for _, status in answers.found.values()]
    return RecordedJobs(_recording(rollouts, statuses), tuple(answers.silent()))


def record_batch(brokers: RolloutBrokers, batch_id: str) -> tuple[BatchView, RecordedJobs]:
    """Record the jobs of an open batch: those that it shows, and the newest others of groups that it has begun.

    Raises:
        UnknownBatch: no broker that answers has it.
    """
    views = brokers.ask(lambda client: client.views.batch(batch_id))
    views.check()
    name, view = next(iter(views.found.items()))
    begun = tuple({f"{group.group_id.rpartition('.')[0]}." for group in view.groups if not group.carried_over})
    shown = {cell.job_id for group in view.groups for cell in group.cells if cell.job_id}
    answers = brokers.ask(
        lambda client: _record_newest(client, lambda row: row.job_id in shown or row.job_id.startswith(begun)),
        only=name,
    )
    answers.check()
    rollouts, status = answers.found[name]
    launched = view.report.launched + view.report.adopted
    notes = [f"of its {launched} jobs, the newest {len(rollouts)} are explained"] if launched > len(rollouts) else []
    return view, RecordedJobs(_recording(rollouts, [status]), tuple(notes))


async def _record_newest(
    client: AsyncRolloutClient, wanted: Callable[[JobRow], bool]
) -> tuple[list[Rollout], ServiceStatus]:
    rows: Watched = await client.views.changes("", 0, 0, JOBS_LIMIT)
    return await _record(client, [row.job_id for row in rows.jobs if wanted(row)]), await client.status()


async def _record(client: AsyncRolloutClient, job_ids: Iterable[str]) -> list[Rollout]:
    room = asyncio.Semaphore(AT_A_TIME)

    async def one(job_id: str) -> Rollout | None:
        async with room:
            return await record_job(client, job_id)

    return [found for found in await asyncio.gather(*map(one, job_ids)) if found is not None]


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
