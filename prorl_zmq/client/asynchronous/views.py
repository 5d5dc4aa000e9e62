"""`AsyncViews`: what an operator sees of a service's sessions, jobs and batches. Looking changes none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...wire.messages.base import new_id
from ...wire.messages.front_door import EndSession, ListSessions
from ...wire.messages.watching import TURNS_WAIT_S, ListSteps, Peek, PeekTurns, ViewBatch, Watch
from ..requests import check_job_ids, read_arrays, read_reply, read_trajectory

if TYPE_CHECKING:
    from ...data.trajectory import TokenArrays, Trajectory
    from ...wire.messages.front_door import SessionList, SessionStopped
    from ...wire.messages.jobs import Result
    from ...wire.messages.watching import BatchView, Peeked, StepList, TurnsPeeked, Watched
    from .connection import AsyncServiceConnection


class AsyncViews:
    """What an operator sees of jobs and batches: `AsyncRolloutClient.views`.

    Each call raises `RequestTimeout` if the rollout broker does not answer in time, and `NotAllowed` with a trainer's
    key.
    """

    def __init__(self, service: AsyncServiceConnection) -> None:
        self._service = service

    async def changes(
        self,
        broker_id: str,
        since: int,
        before: int,
        limit: int,
        *,
        counts_ended: bool = False,
        timeout_s: float | None = None,
    ) -> Watched:
        """Name the jobs that have changed; see `Watch`. `watching.Watcher` keeps a whole table by it."""
        request = Watch(new_id(), broker_id, since, before, limit, counts_ended)
        reply: Watched = await self._service.ask(request, self._service.until(timeout_s))
        return reply

    async def peek(self, job_id: str, *, timeout_s: float | None = None) -> tuple[Result, Trajectory | None]:
        """Return what an ended job brought, whoever's it is; it stays where it is.

        There is no trajectory where the broker does not have the block: its node does (`kept` of the result says
        where), or only the client that has collected it.

        Raises:
            UnknownJob: the job has not ended, or it is long ago that its client had the result.
        """
        check_job_ids((job_id,))
        frames = await self._service.ask_frames(Peek(new_id(), job_id), self._service.until(timeout_s))
        reply: Peeked = read_reply(frames)
        if reply.result.tokens and not reply.has_block:
            return reply.result, None
        return reply.result, read_trajectory(reply.result, frames[1] if reply.has_block else b"")

    async def turns(
        self, job_id: str, *, known_attempt: int = 0, known_tokens: int = 0, timeout_s: float | None = None
    ) -> tuple[TurnsPeeked, TokenArrays | None]:
        """Return how far a job has come that has not ended, and the arrays of its last turns.

        There are no arrays before the conversation begins, or if the attempt has come no further than the known tokens.

        Raises:
            UnknownJob: the job has ended (`ended`), or there is none.
            RequestTimeout: its stage process does not answer either.
        """
        check_job_ids((job_id,))
        request = PeekTurns(new_id(), job_id, known_attempt, known_tokens)
        frames = await self._service.ask_frames(request, self._service.until(timeout_s), held_s=TURNS_WAIT_S)
        reply: TurnsPeeked = read_reply(frames)
        so_far = reply.so_far
        if so_far is None or not so_far.shown_tokens:
            return reply, None
        return reply, read_arrays(frames[1:], so_far.shown_tokens, so_far.shown_turns)

    async def result(self, job_id: str, *, timeout_s: float | None = None) -> Result:
        """Return what `peek` does, without the trajectory."""
        check_job_ids((job_id,))
        request = Peek(new_id(), job_id, only_result=True)
        reply: Peeked = await self._service.ask(request, self._service.until(timeout_s))
        return reply.result

    async def batch(self, batch_id: str, *, timeout_s: float | None = None) -> BatchView:
        """Show a batch, by its id or a beginning of it: its groups, their rollouts, and what it waits for.

        Of one that was closed not long ago, only what it came to.

        Raises:
            UnknownBatch: there is none of that id (any more), or more than one.
        """
        reply: BatchView = await self._service.ask(ViewBatch(new_id(), batch_id), self._service.until(timeout_s))
        return reply

    async def steps(self, *, timeout_s: float | None = None) -> StepList:
        """List the batches that were closed last, as the steps of trainings, and when weights changed."""
        reply: StepList = await self._service.ask(ListSteps(new_id()), self._service.until(timeout_s))
        return reply

    async def sessions(self, *, timeout_s: float | None = None) -> SessionList:
        """List the sessions that hold jobs, results, batches or carried groups at the rollout broker."""
        reply: SessionList = await self._service.ask(ListSessions(new_id()), self._service.until(timeout_s))
        return reply

    async def end_session(self, session: str, *, timeout_s: float | None = None) -> SessionStopped:
        """End a session: cancel its jobs, close its batches, drop its results. Returns how many there were.

        Raises:
            UnknownSession: it holds nothing here.
        """
        request = EndSession(new_id(), session)
        reply: SessionStopped = await self._service.ask(request, self._service.until(timeout_s))
        return reply
