"""Decode and check the rows of the rollout broker's journal (see `journal`), each by itself.

Each cell is validated as a message would be. A row that fails is `Damaged`: it stays in the file, and reading
continues. If the row still names its job, `Damaged` has a result that reports the loss to the client. Of a packed job
only the structure is checked; `JobRecord` decodes it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from ...errors import JobsLost
from ...wire.messages.base import ATTEMPT_LIMIT, Attempt, Identifier, JobIdentifier, Seconds
from ...wire.messages.jobs import Outcome, Phase, Result, SandboxHandle
from ...wire.messages.stages import PhaseDone, PhaseFailed  # noqa: TC001 - msgspec reads the annotations at run time
from .records import Finished, JobState, StoredBlock, Submission, job_digest
from .segment_store import Place

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterator

JOBS = """SELECT sequence, session, job_id, task, stage_wait_s, packed, coalesce(phase, 'init'),
    coalesce(stage_id, ''), coalesce(attempt, 1), coalesce(attempts_given_back, 0), coalesce(progress, x''),
    coalesce(history, x''), segment, offset, size_bytes, checksum, in_batch
    FROM jobs LEFT JOIN states USING (sequence) LEFT JOIN blocks USING (sequence) ORDER BY sequence"""
RESULTS = """SELECT sequence, session, job_id, digest, result, history, packed, segment, offset, size_bytes, checksum,
    in_batch
    FROM results LEFT JOIN blocks USING (sequence) ORDER BY sequence"""
BLOCKS = "SELECT sequence, segment, offset, size_bytes, checksum FROM blocks"

DAMAGE = (msgspec.MsgspecError, TypeError, ValueError, RecursionError)
"""Errors of a cell whose content is invalid."""

Sequence = Annotated[int, Meta(ge=1, le=2**62)]


class Progress(NamedTuple):
    """Output of earlier phases, in one column."""

    sandbox: SandboxHandle | None = None
    phase_data: dict[str, Any] = {}  # noqa: RUF012 - never written to
    run: PhaseDone | PhaseFailed | None = None
    metrics: dict[str, float] = {}  # noqa: RUF012 - never written to
    timings: dict[str, float] = {}  # noqa: RUF012 - never written to
    last: PhaseDone | PhaseFailed | None = None


class Damaged(NamedTuple):
    sequence: int
    job_id: str
    """The row's job id; empty if missing."""
    problem: str
    loss: Finished | None
    """The client's result; None: the row names no job, or another row has that job."""


Flag = Annotated[int, Meta(ge=0, le=1)]
"""A boolean in SQLite."""


class _JobRow(msgspec.Struct, frozen=True, array_like=True):
    sequence: Sequence
    session: Identifier
    job_id: JobIdentifier
    task: Identifier
    stage_wait_s: Seconds
    packed: bytes
    phase: Phase
    stage_id: Annotated[str, Meta(pattern=r"^(?:[A-Za-z0-9_][A-Za-z0-9._:-]{0,127})?\Z")]
    attempt: Attempt
    attempts_given_back: Annotated[int, Meta(ge=0, le=ATTEMPT_LIMIT)]
    progress: bytes
    history: bytes
    place: Place | None
    in_batch: Flag


class _ResultRow(msgspec.Struct, frozen=True, array_like=True):
    sequence: Sequence
    session: Identifier
    job_id: JobIdentifier
    digest: bytes
    result: bytes
    history: bytes
    packed: bytes
    place: Place | None
    in_batch: Flag


class _Owner(msgspec.Struct, frozen=True, array_like=True):
    sequence: Sequence
    session: Identifier
    job_id: JobIdentifier


NOTHING = Progress()
_progress = msgspec.msgpack.Decoder(Progress).decode
_structure = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
_result = msgspec.msgpack.Decoder(Result).decode


def read_rows(
    connection: sqlite3.Connection, check: Callable[[Place], None]
) -> Iterator[JobState | Finished | Damaged]:
    """Yield the unacknowledged results, then the unfinished jobs, each oldest first.

    `check` raises `BlockLost` for a block that is not at its place.
    """
    seen: set[str] = set()
    one: JobState | Finished
    with any_text(connection):
        for row in connection.execute(RESULTS):
            try:
                one = _finished(msgspec.convert(_cells(row, 3, 4, 5, 6), _ResultRow), seen, check)
            except DAMAGE as error:
                yield _damaged(row, error, seen)
            else:
                yield one
        for row in connection.execute(JOBS):
            try:
                one = _job(msgspec.convert(_cells(row, 5, 10, 11), _JobRow), seen, check)
            except DAMAGE as error:
                yield _damaged(row, error, seen, row[3], row[5])
            else:
                yield one


def place_of(cells: tuple[Any, ...]) -> Place:
    """Return the place of a block, or that of a lost block if the cells are invalid."""
    try:
        return msgspec.convert(cells, Place)
    except msgspec.ValidationError:
        return Place(0, 0, 0, 0)


def read_notes(connection: sqlite3.Connection) -> dict[str, bytes]:
    """Return the notes by name, without invalid rows."""
    with any_text(connection):
        rows = connection.execute("SELECT name, note FROM notes").fetchall()
    return {name: note for name, note in rows if isinstance(name, str) and isinstance(note, bytes)}


def read_submissions(connection: sqlite3.Connection) -> list[Submission]:
    """Return the last submissions, oldest first, without invalid rows."""
    with any_text(connection):
        rows = connection.execute("SELECT session, request_id, new FROM submissions ORDER BY number").fetchall()
    return [
        Submission(session, request_id, new)
        for session, request_id, new in rows
        if isinstance(session, str) and isinstance(request_id, str) and isinstance(new, int)
    ]


def _job(row: _JobRow, seen: set[str], check: Callable[[Place], None]) -> JobState:
    sandbox, phase_data, run, metrics, timings, last = _progress(row.progress) if row.progress else NOTHING
    _structure(row.packed)
    block = _block(row.sequence, row.place, check)
    _note(row.job_id, seen)
    place = (row.phase, row.stage_id, row.attempt, row.attempts_given_back)
    job = (row.sequence, row.session, row.job_id, row.task, row.stage_wait_s, row.packed)
    more = (row.history, bool(row.in_batch), last)
    return JobState(*job, *place, sandbox, phase_data, run, block, metrics, timings, *more)


def _finished(row: _ResultRow, seen: set[str], check: Callable[[Place], None]) -> Finished:
    result = _result(row.result)
    block = _block(row.sequence, row.place, check)
    has_block = result.tokens > 0 and result.kept is None
    if result.job_id != row.job_id or (block is not None) != has_block:
        raise ValueError("the result is not that of its row")
    if row.packed:
        _structure(row.packed)
    _note(row.job_id, seen)
    finished = (row.session, result, block, row.digest, row.sequence, row.history, bool(row.in_batch))
    return Finished(*finished, row.packed)


def _cells(row: tuple[Any, ...], *binary: int) -> tuple[Any, ...]:
    """Return a row with its block's place as one cell; raise `TypeError` if a binary cell is not bytes."""
    for place in binary:
        if not isinstance(row[place], bytes):
            raise TypeError(f"{type(row[place]).__name__} in place of bytes - at `$[{place}]`")
    return (*row[:-5], row[-5:-1] if row[-5] is not None else None, row[-1])


def _note(job_id: str, seen: set[str]) -> None:
    if job_id in seen:
        raise ValueError("another row has this job_id")
    seen.add(job_id)


def _block(sequence: int, place: Place | None, check: Callable[[Place], None]) -> StoredBlock | None:
    if place is None:
        return None
    check(place)
    return StoredBlock(sequence, place.size_bytes)


def _damaged(
    row: tuple[Any, ...], error: Exception, seen: set[str], task: object = None, packed: object = None
) -> Damaged:
    problem = str(error) or type(error).__name__
    try:
        owner = msgspec.convert(row[:3], _Owner)
    except DAMAGE:
        return Damaged(row[0], str(row[2])[:64], problem, None)
    if owner.job_id in seen:
        return Damaged(owner.sequence, owner.job_id, problem, None)
    seen.add(owner.job_id)
    result = lost_result(owner.job_id, _name(task))
    digest = job_digest(packed) if isinstance(packed, bytes) else b""
    loss = Finished(owner.session, result, None, digest, owner.sequence, in_batch=row[-1] == 1)
    return Damaged(owner.sequence, owner.job_id, problem, loss)


def lost_result(job_id: str, task: str) -> Result:
    """Return the error result for a job or a result that is missing from the journal."""
    message = f"the journal is damaged where it held job {job_id}, so the job cannot continue; submit it again"
    error = JobsLost(message, count=1, job_ids=job_id).info()
    return Result(job_id=job_id, task=task, outcome=Outcome.INFRASTRUCTURE_ERROR, error=error)


def _name(task: object) -> str:
    try:
        return msgspec.convert(task, Identifier)
    except msgspec.ValidationError:
        return "unknown"


@contextmanager
def any_text(connection: sqlite3.Connection) -> Iterator[None]:
    """Decode invalid UTF-8 with replacement characters inside; otherwise the query would fail."""
    before, connection.text_factory = connection.text_factory, _text
    try:
        yield
    finally:
        connection.text_factory = before


def _text(cell: bytes) -> str:
    return cell.decode(errors="replace")
