"""Checks stage events, and reads and joins the trajectory blocks that come with them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

import zmq
from msgspec.structs import replace

from ...data.conversations import LARGEST_REWARD, rewards_problem
from ...data.records import padded, read_scores, records_bytes, with_record
from ...data.trajectory import TOKEN_ID_BYTES, block_bytes, records_in
from ...errors import MalformedMessage
from ...wire.messages.jobs import Outcome, Phase
from ...wire.messages.stages import BlockSent, PhaseEnd, PhaseFailed, TurnsShown
from ...wire.records import TEACHER
from ...wire.sockets import MAX_FRAME_BYTES
from ..dropped_records import without_records
from ..journal.records import StoredBlock
from ..journal.segment_store import BlockLost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...wire.messages.stages import StageEvent, StartPhase
    from ...wire.sockets import Frame
    from .job_record import JobRecord
    from .jobs import Jobs

    End = TypeVar("End", bound=PhaseEnd)

QUOTA_FULL = "the session's quota was full"

log = logging.getLogger("prorl.rollout_broker")


def checked_block(event: StageEvent, rest: Sequence[Frame]) -> Frame | None:
    """Check an event, and return the block that comes with it.

    Raises:
        MalformedMessage: the block, a reward, the outcome, the turns, segments or records are not as the event says or
            may be.
    """
    if isinstance(event, BlockSent | TurnsShown):
        expected = not event.lost if isinstance(event, BlockSent) else event.has_block
        if len(rest) != expected:
            raise MalformedMessage(f"{type(event).__name__}: expected {expected:d} block frames, got {len(rest)}")
        return rest[0] if rest else None
    tokens, kept = (event.tokens, event.kept is not None) if isinstance(event, PhaseEnd) else (0, False)
    scored = event.records if isinstance(event, PhaseEnd) and event.phase == Phase.SCORE else ()
    has_block = (tokens > 0 or bool(scored)) and not kept
    if len(rest) != has_block:
        raise MalformedMessage(f"{_name(event)}: expected {has_block:d} block frames, got {len(rest)}")
    if not isinstance(event, PhaseEnd):
        return None
    if scored and (tokens or [form.name for form in scored] != [TEACHER]):
        names = ", ".join(form.name for form in scored)
        raise MalformedMessage(f"{_name(event)}: expected the record {TEACHER}, got {names} and {tokens} tokens")
    if isinstance(event, PhaseFailed) and event.outcome == Outcome.COMPLETED:
        raise MalformedMessage(f"job {event.job_id} is said to have failed with outcome `completed`")
    has_several = event.conversations or event.turn_rewards or event.rewards
    if not (has_several or abs(event.reward or 0.0) <= LARGEST_REWARD):
        raise MalformedMessage(f"job {event.job_id} has the reward {event.reward}")
    if has_several and (problem := rewards_problem(event, event.rewards.values())):
        raise MalformedMessage(f"job {event.job_id}: {problem}")
    if not tokens and event.turns:
        raise MalformedMessage(f"job {event.job_id} has {event.turns} turns and no tokens")
    if not rest:
        return None
    size_bytes = records_bytes(scored) if scored else block_bytes(tokens, event.turns, event.records)
    if len(rest[0]) != size_bytes:
        raise MalformedMessage(f"{_name(event)}: the block has {len(rest[0])} bytes; its header announces {size_bytes}")
    try:
        if scored:
            read_scores(rest[0], scored)
        else:
            records_in(rest[0], event)
    except MalformedMessage as error:
        raise MalformedMessage(f"{_name(event)}: {error.message}") from error
    return rest[0]


def _name(event: StageEvent) -> str:
    job_id = getattr(event, "job_id", "")
    return f"{type(event).__name__} of job {job_id}" if job_id else type(event).__name__


def stored_end(jobs: Jobs, event: End, block: Frame | None) -> tuple[End, Frame | None]:
    """Return the end of a phase and its trajectory's block as the broker stores them.

    SCORE's block is the one of RUN with the scores behind it. Records are dropped if their session has no room.

    Raises:
        JournalFailed: RUN's block cannot be read now.
    """
    record = jobs.table.records.get(event.job_id)
    if record is None or block is None or not record.is_current(event):  # type: ignore[arg-type]
        return event, block
    if event.phase != Phase.SCORE:
        has_room = jobs.quota.has_room(record.holder, len(block))
        return (event, block) if has_room else without_records(event, block, QUOTA_FULL)
    before = _stored(jobs, record)
    size_bytes = padded(len(before)) + len(block)
    if not before:
        why = "the trajectory is lost"
    elif size_bytes > MAX_FRAME_BYTES:
        why = "the trajectory would be too large"
    elif not jobs.quota.has_room(record.holder, size_bytes - len(before)):  # the rest counts already
        why = QUOTA_FULL
    else:
        return event, with_record(before, block)
    return replace(event, records=(), records_dropped={TEACHER: why}), None


def token_ids(jobs: Jobs, command: StartPhase) -> tuple[Frame, ...]:
    """Return the token ids that SCORE starts with, unless the node has them; empty if they are lost.

    Raises:
        JournalFailed: they cannot be read now.
    """
    text = command.text
    if text is None or text.kept is not None:
        return ()
    record = jobs.table.records.get(command.job_id)
    return (_stored(jobs, record)[: TOKEN_ID_BYTES * text.tokens] if record is not None else b"",)


def _stored(jobs: Jobs, record: JobRecord) -> memoryview:
    """Return the block of a job's trajectory; empty if it is lost."""
    block = record.block
    try:
        if isinstance(block, StoredBlock):
            block = jobs.writes.block(block)
    except BlockLost as error:
        log.warning("the trajectory of job %s is not scored: %s", record.job_id, error)
        block = b""
    return memoryview(block.buffer if isinstance(block, zmq.Frame) else block or b"")
