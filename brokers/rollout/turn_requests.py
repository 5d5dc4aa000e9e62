"""`TurnRequests`: answers requests for the turns of unfinished jobs (`PeekTurns`).

For a job in RUN, the broker asks the job's stage process, once for all equal requests, and holds the replies until the
process answers or `TURNS_WAIT_S` have passed. For a job in EVAL or SCORE, the broker has the trajectory itself, unless
a node stores it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import zmq
from msgspec.structs import replace

from ...data.last_turns import turns_so_far
from ...data.trajectory import array_views, block_bytes
from ...errors import Busy, MalformedMessage, RequestTimeout, UnknownJob
from ...wire.messages.base import Refused
from ...wire.messages.jobs import Phase
from ...wire.messages.stages import ShowTurns
from ...wire.messages.watching import TURNS_WAIT_S, TurnsPeeked, TurnsSoFar
from ..journal.records import StoredBlock
from ..journal.segment_store import BlockLost
from .job_record import JobStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...wire.messages.front_door import FrontDoorReply
    from ...wire.messages.stages import StageCommand, TurnsShown
    from ...wire.messages.watching import PeekTurns
    from ...wire.sockets import Frame
    from .job_record import JobRecord
    from .jobs import Jobs

HELD_LIMIT = 256
"""Most replies held at one time."""


class _Question(NamedTuple):
    job_id: str
    attempt: int
    known_tokens: int


@dataclass
class _Asked:
    reply: TurnsPeeked
    until: float
    envelopes: dict[str, Sequence[Frame]] = field(default_factory=dict)
    """Envelopes of the replies, by request id."""


class TurnRequests:
    """`answer` sends a reply behind an envelope, `tell` sends a command to a stage process."""

    def __init__(
        self,
        jobs: Jobs,
        answer: Callable[[Sequence[Frame], FrontDoorReply, Sequence[Frame]], object],
        tell: Callable[[str, StageCommand], None],
    ) -> None:
        self._jobs = jobs
        self._answer = answer
        self._tell = tell
        self._asked: dict[_Question, _Asked] = {}

    def handle(self, envelope: Sequence[Frame], request: PeekTurns, now: float) -> None:
        """Answer a request, now or when the stage process has answered.

        Raises:
            UnknownJob: the job has ended or is unknown.
            Busy: too many replies are held.
            JournalFailed: the trajectory cannot be read now.
        """
        table, job_id = self._jobs.table, request.job_id
        if job_id not in table:
            known = self._jobs.results.get(job_id) is not None or self._jobs.recent.get(job_id) is not None
            message = "has ended: ask for its result" if known else "is not at work here"
            raise UnknownJob(f"job {job_id} {message}", job_id=job_id, ended=known)
        record = table.record(job_id)
        known_tokens = request.known_tokens if request.known_attempt == record.attempt else 0
        if record.phase != Phase.RUN or record.status != JobStatus.HELD:
            so_far, block = self._recorded(record, known_tokens)
            self._answer(envelope, replace(self._where(record), request_id=request.request_id, so_far=so_far), block)
            return
        question = _Question(job_id, record.attempt, known_tokens)
        asked = self._asked.get(question)
        if sum(len(one.envelopes) for one in self._asked.values()) >= HELD_LIMIT:
            raise Busy(f"{HELD_LIMIT} requests for turns are held; ask again later", retry_after_s=TURNS_WAIT_S)
        if asked is None or asked.reply.stage_id != record.stage_id:
            asked = self._asked[question] = _Asked(self._where(record), now + TURNS_WAIT_S)
            self._tell(record.stage_id, ShowTurns(job_id=job_id, attempt=record.attempt, known_tokens=known_tokens))
        asked.envelopes[request.request_id] = envelope

    def shown(self, event: TurnsShown, block: Frame | None) -> None:
        """Forward a stage process's answer; raise `MalformedMessage` if its block has the wrong size."""
        question = _Question(event.job_id, event.attempt, event.known_tokens)
        asked = self._asked.get(question)
        if asked is None or asked.reply.stage_id != event.stage_id:
            return
        so_far = event.so_far
        if so_far is not None and so_far.shown_tokens:
            size_bytes = block_bytes(so_far.shown_tokens, so_far.shown_turns)
            if block is None or len(block) != size_bytes:
                raise MalformedMessage(f"the turns of job {event.job_id} do not have {size_bytes} bytes")
        del self._asked[question]
        # A copy per reply: a received frame belongs to the message with which it is sent.
        blocks = [block.bytes if isinstance(block, zmq.Frame) else block] if block is not None else []
        for request_id, envelope in asked.envelopes.items():
            self._answer(envelope, replace(asked.reply, request_id=request_id, so_far=so_far), blocks)

    def next_deadline(self) -> float | None:
        return min((asked.until for asked in self._asked.values()), default=None)

    def refuse_late(self, now: float) -> None:
        """Refuse requests whose stage process has not answered in time."""
        for question, asked in tuple(self._asked.items()):
            if asked.until > now:
                continue
            del self._asked[question]
            stage_id, node = asked.reply.stage_id, asked.reply.node
            error = RequestTimeout(
                f"stage process {stage_id} of node {node} runs job {question.job_id}, and has not shown "
                f"its turns within {TURNS_WAIT_S:g} s: it was stopped, its link is cut, or the task's code blocks it",
                timeout_s=TURNS_WAIT_S,
                stage_id=stage_id,
                node=node,
            )
            for request_id, envelope in asked.envelopes.items():
                self._answer(envelope, Refused(request_id, error.info()), [])

    def _where(self, record: JobRecord) -> TurnsPeeked:
        """Return a reply with a job's phase and place."""
        held = record.status == JobStatus.HELD
        stage = self._jobs.table.stages.get(record.stage_id) if held else None
        return TurnsPeeked(
            "unknown",
            job_id=record.job_id,
            attempt=record.attempt,
            phase=record.phase,
            place="held" if held else "queued",
            stage_id=record.stage_id if held else "",
            node=stage.node if stage is not None else "",
        )

    def _recorded(self, record: JobRecord, known_tokens: int) -> tuple[TurnsSoFar | None, Sequence[Frame]]:
        """Return RUN's turns of a job in EVAL or SCORE."""
        run, block = record.run, record.block
        if run is None or record.phase not in (Phase.EVAL, Phase.SCORE):
            return None, []
        if isinstance(block, StoredBlock):
            try:
                block = self._jobs.writes.block(block)
            except BlockLost:
                block = None
        if block is None:
            return TurnsSoFar(backend=run.backend, turns=run.turns, tokens=run.tokens), []
        arrays = array_views(block, run.tokens, run.turns, run.records)
        so_far, shown = turns_so_far(arrays, run.backend, run.steps, known_tokens)
        return so_far, [] if shown is None else [shown.data]
