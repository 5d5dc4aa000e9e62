# Generated from ../asynchronous/views.py by `make client`; do not edit.
"""`Views`: an operator's read access to a service's sessions, jobs and batches, and `end_session`."""

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
    from .connection import ServiceConnection


class Views:
    """An operator's view of jobs and batches: `RolloutClient.views`.

    Each call raises `RequestTimeout` if the rollout broker does not answer, and `NotAllowed` with a trainer's key.
    """

    def __init__(self, service: ServiceConnection) -> None:
        self._service = service

    def changes(
        self,
        broker_id: str,
        since: int,
        before: int,
        limit: int,
        *,
        counts_ended: bool = False,
        timeout_s: float | None = None,
    ) -> Watched:
        """Return the jobs that have changed; see `Watch`. `watching.Watcher` maintains a whole table with it."""
        request = Watch(new_id(), broker_id, since, before, limit, counts_ended)
        reply: Watched = self._service.ask(request, self._service.until(timeout_s))
        return reply

    def peek(self, job_id: str, *, timeout_s: float | None = None) -> tuple[Result, Trajectory | None]:
        """Return an ended job's result and trajectory, of any session, without collecting them.

        The trajectory is None if the broker does not have the block: a node does (`kept` of the result says which), or
        only the client that has collected it.

        Raises:
            UnknownJob: the job has not ended, or its client collected the result too long ago.
        """
        check_job_ids((job_id,))
        frames = self._service.ask_frames(Peek(new_id(), job_id), self._service.until(timeout_s))
        reply: Peeked = read_reply(frames)
        if reply.result.tokens and not reply.has_block:
            return reply.result, None
        return reply.result, read_trajectory(reply.result, frames[1] if reply.has_block else b"")

    def turns(
        self, job_id: str, *, known_attempt: int = 0, known_tokens: int = 0, timeout_s: float | None = None
    ) -> tuple[TurnsPeeked, TokenArrays | None]:
        """Return the progress of a job that has not ended, and the arrays of its last turns.

        The arrays are None before the conversation begins, or if the attempt has no more than the known tokens.

        Raises:
            UnknownJob: the job has ended (`ended`), or is unknown.
            RequestTimeout: its stage process or the broker did not answer.
        """
        check_job_ids((job_id,))
        request = PeekTurns(new_id(), job_id, known_attempt, known_tokens)
        frames = self._service.ask_frames(request, self._service.until(timeout_s), held_s=TURNS_WAIT_S)
        reply: TurnsPeeked = read_reply(frames)
        so_far = reply.so_far
        if so_far is None or not so_far.shown_tokens:
            return reply, None
        return reply, read_arrays(frames[1:], so_far.shown_tokens, so_far.shown_turns)

    def result(self, job_id: str, *, timeout_s: float | None = None) -> Result:
        """Return an ended job's result, as `peek` does, without the trajectory."""
        check_job_ids((job_id,))
        request = Peek(new_id(), job_id, only_result=True)
        reply: Peeked = self._service.ask(request, self._service.until(timeout_s))
        return reply.result

    def batch(self, batch_id: str, *, timeout_s: float | None = None) -> BatchView:
        """Return a batch, by its id or a prefix: its groups, their rollouts, and what it waits for.

        For a batch that was closed recently, only the totals.

        Raises:
            UnknownBatch: no batch has that id (any more), or several have that prefix.
        """
        reply: BatchView = self._service.ask(ViewBatch(new_id(), batch_id), self._service.until(timeout_s))
        return reply

    def steps(self, *, timeout_s: float | None = None) -> StepList:
        """List the last closed batches, as training steps, and when weights changed."""
        reply: StepList = self._service.ask(ListSteps(new_id()), self._service.until(timeout_s))
        return reply

    def sessions(self, *, timeout_s: float | None = None) -> SessionList:
        """List the sessions that hold jobs, results, batches or carried groups at the rollout broker."""
        reply: SessionList = self._service.ask(ListSessions(new_id()), self._service.until(timeout_s))
        return reply

    def end_session(self, session: str, *, timeout_s: float | None = None) -> SessionStopped:
        """End a session: cancel its jobs, close its batches, drop its results. Return how many there were.

        Raises:
            UnknownSession: the rollout broker has nothing of this session.
        """
        request = EndSession(new_id(), session)
        reply: SessionStopped = self._service.ask(request, self._service.until(timeout_s))
        return reply
