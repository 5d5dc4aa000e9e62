"""`DashboardApi`: the endpoints of the page, except its stream.

Requests about a job or batch go to all rollout brokers; the one that has it answers. Only `cancel` changes anything.
Operators may see everything, trainers nothing, and without keys everybody may see everything.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from msgspec import Meta
from msgspec.structs import replace

from ...errors import ConfigError, NotAllowed
from ...service.rollout_brokers import ask_all, fates, the_answer, trace_in
from ...watching.overview import Overview
from ...watching.training import Training, trainings
from ...wire.messages.backends import DrainBackend
from ...wire.messages.base import ATTEMPT_LIMIT, KeyRole, new_id
from ...wire.messages.front_door import Cancel, Cancelled, JobTrace
from ...wire.messages.watching import (
    BATCH_STEPS_LIMIT,
    BatchView,
    ListSteps,
    Peek,
    PeekTurns,
    Tokens,
    ViewBatch,
    Watch,
)
from ..bodies import Body
from ..connection import check_may
from ..endpoint import Endpoint, NoQuery
from ..http_errors import error_response
from .job_views import JobView, JobViews, LiveTurns
from .run_list import Rollouts, RunComparison, RunFigures, RunList, Runs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    import msgspec

    from ...client.asynchronous.client import AsyncRolloutClient
    from ...security.rights import Sender
    from ...watching.watcher import Watcher
    from ...wire.messages.base import Request
    from ..endpoint import Call


T = TypeVar("T")


class Me(Body, frozen=True):
    """The sender of this request, and its rights."""

    role: str
    """Empty: no key is required, so everybody may do everything."""
    name: str
    may: tuple[str, ...]
    """Of `watch`, `cancel` and `drain`."""


class TurnsQuery(NoQuery, frozen=True):
    """What the page knows of the job."""

    attempt: Annotated[int, Meta(ge=0, le=ATTEMPT_LIMIT)] = 0
    tokens: Tokens = 0
    """Tokens of that attempt; no turns are sent until there are more."""


class StepsQuery(NoQuery, frozen=True):
    """Which steps."""

    last: Annotated[int, Meta(ge=1, le=BATCH_STEPS_LIMIT)] = 500
    """How many of each session."""


class Trainings(Body, frozen=True):
    """The sessions that had batches; the one with the last step first."""

    trainings: tuple[Training, ...]


class RunQuery(NoQuery, frozen=True):
    """The run."""

    run: str


class ComparisonQuery(RunQuery, frozen=True):
    """The run that it is compared with."""

    other: str


class ProblemQuery(RunQuery, frozen=True):
    """A problem of the run."""

    problem: str


class RolloutQuery(RunQuery, frozen=True):
    """A rollout of the run."""

    job_id: str


class DashboardApi:
    def __init__(
        self,
        clients: Mapping[str, AsyncRolloutClient],
        watcher: Watcher,
        job_views: JobViews,
        runs: RunList,
        *,
        read_only: bool = False,
    ) -> None:
        self._clients = clients
        self._watcher = watcher
        self._job_views = job_views
        self._runs = runs
        self._read_only = read_only
        endpoints = (
            Endpoint("GET", "/v1/me", self.me, Me),
            Endpoint("GET", "/v1/overview", self.overview, Overview),
            Endpoint("GET", "/v1/jobs/{job_id}/trace", self.trace, JobTrace),
            Endpoint("GET", "/v1/jobs/{job_id}/view", self.job, JobView),
            Endpoint("GET", "/v1/jobs/{job_id}/turns", self.turns, LiveTurns, query=TurnsQuery),
            Endpoint("POST", "/v1/jobs/{job_id}/cancel", self.cancel, Cancelled),
            Endpoint("GET", "/v1/batches/{batch_id}/view", self.batch, BatchView),
            Endpoint("GET", "/v1/trainings", self.trainings, Trainings, query=StepsQuery),
            Endpoint("GET", "/v1/runs", self.runs, Runs),
            Endpoint("GET", "/v1/runs/figures", self.run, RunFigures, query=RunQuery),
            Endpoint("GET", "/v1/runs/comparison", self.comparison, RunComparison, query=ComparisonQuery),
            Endpoint("GET", "/v1/runs/rollouts", self.rollouts, Rollouts, query=ProblemQuery),
            Endpoint("GET", "/v1/runs/view", self.rollout, JobView, query=RolloutQuery),
        )
        self.endpoints = tuple(each._replace(with_defaults=True) for each in endpoints)

    async def me(self, call: Call) -> Me:
        """Return the owner and the rights of this token."""
        wishes: dict[str, Request] = {"watch": Watch("")}
        if not self._read_only:
            wishes |= {"cancel": Cancel("", ()), "drain": DrainBackend("", "any")}
        may = tuple(name for name, request in wishes.items() if _may(call.sender, request))
        return Me(role=str(call.sender.role or ""), name=call.sender.name, may=may)

    async def overview(self, call: Call) -> Overview:
        """Describe the whole service: brokers, backends, nodes, and the jobs that ended in the last hour."""
        call.sender.check(Watch(new_id()))
        async with self._watcher.viewer() as updates:
            async for update in updates:
                seen = update.overview
                if self._clients.keys() <= {*seen.brokers, *seen.problems} and (seen.backends or seen.problems):
                    return seen  # all have answered, or it is known why not
        raise NotAllowed("the gateway is ending")

    async def trace(self, call: Call) -> JobTrace:
        """Return the trace of a job. The id may be an unambiguous prefix."""
        job_id = call.path["job_id"]
        call.sender.check(Peek(new_id(), job_id))
        return trace_in(await ask_all(self._clients, lambda client: client.trace(job_id)), job_id)

    async def job(self, call: Call) -> JobView:
        """Return the result and transcript of an ended job, while the service has them."""
        job_id = call.path["job_id"]
        call.sender.check(Peek(new_id(), job_id))
        return await self._job_views.view(*await self._ask(lambda client: client.views.peek(job_id)))

    async def turns(self, call: Call) -> LiveTurns:
        """Return the last turns of a running job, or nothing new beyond the given attempt and tokens.

        At most 20 turns and 5,000 tokens. An ended job has a view.
        """
        job_id, query = call.path["job_id"], call.query
        call.sender.check(PeekTurns(new_id(), job_id))
        peeked = await self._ask(
            lambda client: client.views.turns(job_id, known_attempt=query.attempt, known_tokens=query.tokens)
        )
        return await self._job_views.turns(*peeked)

    async def cancel(self, call: Call) -> Cancelled:
        """Cancel a job of any session."""
        job_id = call.path["job_id"]
        call.sender.check(Cancel(new_id(), (job_id,)))
        check_may(call.sender, KeyRole.OPERATOR)
        answers = await ask_all(self._clients, lambda client: client.cancel(job_id))
        jobs: dict[str, Any] = fates(answers.found.values())
        answers.check(every=set(jobs.values()) == {"unknown"})  # one that has not answered may have it
        return Cancelled(new_id(), jobs)

    async def batch(self, call: Call) -> BatchView:
        """Return a batch: its groups, their rollouts, and what it waits for."""
        batch_id = call.path["batch_id"]
        call.sender.check(ViewBatch(new_id(), batch_id))
        return await self._ask(lambda client: client.views.batch(batch_id))

    async def trainings(self, call: Call) -> Trainings:
        """Return the last steps of each session that had batches: reward, length, staleness, overlap."""
        call.sender.check(ListSteps(new_id()))
        answers = await ask_all(self._clients, lambda client: client.views.steps())
        answers.check()
        last = call.query.last
        return Trainings(trainings=tuple(replace(one, steps=one.steps[-last:]) for one in trainings(answers.found)))

    async def runs(self, call: Call) -> Runs:
        """List the evaluations (`prorl eval`) in the dashboard's folder of runs."""
        check_may(call.sender, KeyRole.OPERATOR)
        return await asyncio.to_thread(self._runs.rows)

    async def run(self, call: Call) -> object:
        """Return the figures of one evaluation."""
        return await self._of_run(call, lambda: self._runs.figures(call.query.run))

    async def comparison(self, call: Call) -> object:
        """Compare two evaluations: differing settings, shared problems, and a paired test."""
        return await self._of_run(call, lambda: self._runs.comparison(call.query.run, call.query.other))

    async def rollouts(self, call: Call) -> object:
        """List the rollouts of one problem of an evaluation."""
        return await self._of_run(call, lambda: self._runs.rollouts(call.query.run, call.query.problem))

    async def rollout(self, call: Call) -> object:
        """Show one rollout of an evaluation."""
        return await self._of_run(call, lambda: self._runs.view(call.query.run, call.query.job_id))

    async def _ask(self, question: Callable[[AsyncRolloutClient], Awaitable[T]]) -> T:
        return the_answer(await ask_all(self._clients, question))

    async def _of_run(self, call: Call, read: Callable[[], msgspec.Struct]) -> object:
        check_may(call.sender, KeyRole.OPERATOR)
        try:
            return await asyncio.to_thread(read)
        except ConfigError as error:
            return error_response(error, 404)


def _may(sender: Sender, request: Request) -> bool:
    try:
        sender.check(request)
    except NotAllowed:
        return False
    return True
