"""`BatchRequestHandler`: answers trainers' batch requests and holds long polls. It owns no socket.

A group is sent to one client at a time: again to that client if it asks for more without having acknowledged the group,
and to any client of the session after `REDELIVER_S`. A live client remembers the groups it has seen, so it gets each
exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import MalformedMessage, ProrlError
from ...wire import codec
from ...wire.messages.base import Done, Refused
from ...wire.messages.batches import (
    BatchClosed,
    BatchOpened,
    CloseBatch,
    Fed,
    Feed,
    GroupGiven,
    NextGroup,
    OpenBatch,
    SessionAlive,
)
from ...wire.messages.engines import WeightUpdate
from .result_store import REDELIVER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...security.rights import Sender
    from ...wire.messages.front_door import FrontDoorReply
    from ...wire.sockets import Frame
    from ..batches.batch_records import BatchRecord
    from ..batches.rollout_group import RolloutGroup
    from ..journal.records import Finished
    from .batch_runner import BatchRunner
    from .jobs import Jobs

SERVED = ("load", "end", "set")
"""Steps of a `WeightUpdate` after which engines serve its weights."""
BatchRequest = OpenBatch | Feed | NextGroup | CloseBatch | SessionAlive | WeightUpdate


@dataclass(frozen=True, slots=True)
class _HeldPoll:
    envelope: Sequence[Frame]
    request: NextGroup
    sender: Sender
    until: float


class BatchRequestHandler:
    def __init__(
        self,
        runner: BatchRunner,
        jobs: Jobs,
        answer: Callable[[Sequence[Frame], FrontDoorReply, Sequence[Frame]], bool],
        look_again: Callable[[Sender], Sender],
    ) -> None:
        self._runner = runner
        self._jobs = jobs
        self._answer = answer
        self._look_again = look_again
        self._polls: dict[tuple[str, str], _HeldPoll] = {}
        """By batch and client."""

    def handle(
        self, envelope: Sequence[Frame], request: BatchRequest, rest: list[bytes], sender: Sender, now: float
    ) -> None:
        """Answer one request; raise a `ProrlError` to refuse it."""
        if rest and not isinstance(request, Feed):
            raise MalformedMessage(f"{len(rest)} unexpected frames behind the header")
        reply: FrontDoorReply
        match request:
            case OpenBatch():
                batch = self._runner.open(request.session, request.batch_id, request.options, now)
                reply = BatchOpened(request.request_id, batch.fed, self._runner.wanted_prompts(batch))
            case Feed():
                batch = self._runner.find(request.session, request.batch_id)
                self._runner.feed(batch, request.start, rest, now, last=request.last)
                reply = Fed(request.request_id, batch.fed)
            case NextGroup():
                self._next_group(envelope, request, sender, now)
                return
            case CloseBatch():
                reply = self._close(request, now)
            case SessionAlive():
                self._runner.heard(request.session, now)
                reply = Done(request.request_id)
            case WeightUpdate(step="remove"):
                self._runner.remove_model(request.model)
                reply = Done(request.request_id)
            case WeightUpdate(step="cancel") if self._runner.keep_model(request.model):
                reply = Done(request.request_id)
            case WeightUpdate():
                if request.step not in SERVED:
                    message = f"a `{request.step}` of weights is asked of the backend broker, which has no batches"
                    raise MalformedMessage(message, field="$.step")
                self._runner.set_version(request.model, request.weight_version, now)
                reply = Done(request.request_id)
        self._jobs.writes.then(lambda: self._answer(envelope, reply, ()))

    def next_deadline(self) -> float | None:
        return min((poll.until for poll in self._polls.values()), default=None)

    def take_held(self, session: str) -> list[tuple[Sequence[Frame], str]]:
        """Remove the held polls of a session; return their envelopes and request ids."""
        keys = [key for key, poll in self._polls.items() if poll.request.session == session]
        return [(poll.envelope, poll.request.request_id) for poll in map(self._polls.pop, keys)]

    def answer_held(self, now: float) -> None:
        """Answer the held polls that have news, have expired, or belong to a revoked key."""
        for key, poll in tuple(self._polls.items()):
            try:
                if poll.sender.user_id and self._look_again(poll.sender).revoked:
                    raise poll.sender.revocation()
                batch = self._runner.find(poll.request.session, poll.request.batch_id)
                answered = self._answer_poll(poll.envelope, poll.request, batch, now, final=poll.until <= now)
            except ProrlError as error:
                self._answer(poll.envelope, Refused(poll.request.request_id, error.info()), ())
                answered = True
            if answered:
                del self._polls[key]

    def _close(self, request: CloseBatch, now: float) -> BatchClosed:
        known = self._runner.closed(request.session, request.request_id)
        if known is not None:  # the reply was lost
            return known
        batch = self._runner.find(request.session, request.batch_id)
        self._runner.acknowledge(batch, request.acknowledge)
        return self._runner.close(batch, request.request_id, now)

    def _next_group(self, envelope: Sequence[Frame], request: NextGroup, sender: Sender, now: float) -> None:
        batch = self._runner.find(request.session, request.batch_id)
        self._runner.heard(request.session, now)
        self._runner.acknowledge(batch, request.acknowledge)
        key = (request.batch_id, request.client_id)
        self._polls.pop(key, None)
        if not self._answer_poll(envelope, request, batch, now, final=request.wait_s == 0):
            self._polls[key] = _HeldPoll(envelope, request, sender, now + request.wait_s)

    def _answer_poll(
        self, envelope: Sequence[Frame], request: NextGroup, batch: BatchRecord, now: float, *, final: bool
    ) -> bool:
        found = self._next_ready(batch, request.client_id, now)
        wanted = self._runner.wanted_prompts(batch) if request.feeds else 0
        ended = batch.state != "open" and not batch.ready
        if found is None and not wanted and not ended and not final:
            return False
        group, results = found if found is not None else (None, [])
        reply = GroupGiven(
            request.request_id,
            batch=self._runner.status(batch),
            group_id=group.group_id if group is not None else "",
            prompt_id=group.prompt.job.job_id if group is not None else "",
            rollouts=len(results),
            wanted=wanted,
            ended=ended,
            report=batch.stats.report(),
        )
        frames = [frame for finished in results for frame in self._frames(finished)]
        if self._answer(envelope, reply, frames) and group is not None:
            self._runner.mark_given(group, request.client_id, now)
        return True

    def _next_ready(self, batch: BatchRecord, client_id: str, now: float) -> tuple[RolloutGroup, list[Finished]] | None:
        for group in batch.ready.values():
            if group.given_to in ("", client_id) or group.given_at + REDELIVER_S <= now:
                results = self._runner.results(group)
                if results is not None:
                    return group, results
        return None

    def _frames(self, finished: Finished) -> list[Frame]:
        result, blocks = self._jobs.delivery(finished)
        return [codec.encode(result), *blocks]
