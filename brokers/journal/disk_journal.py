"""The rollout broker's journal on disk: one SQLite file (see `JournalFile`).

    jobs      (sequence, session, job, …, packed)       one row per job that has not ended, written once
    states    (sequence, phase, stage, attempt, …)      where it is, written once per round in which it moved
    blocks    (sequence, block)                         RUN's trajectory, as it came; the result keeps it
    results   (sequence, session, job, …, result)       one row per result that was not acknowledged
    notes     (name, note)                              what the batches keep: groups, prompts (see `batch_notes`)
    submissions (number, session, request_id, new)      the last requests that brought jobs

All rows of a job carry its number, so nothing else is indexed. A round's changes are one transaction. At a start jobs
are read and not decoded, and blocks stay on disk until a client asks for them.

One row never stands for the others. A row that cannot be written is left out, with what it would have replaced kept; a
row that cannot be read is left where it is until the job's client has acknowledged the loss (see `journal_rows`).
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Self

import msgspec

from ...system.logs import of_job
from ...wire.messages.base import new_id
from .journal import Recovered
from .journal_file import ROW_ERRORS, JournalFile, failures
from .journal_rows import NOTHING, Damaged, Progress, read_notes, read_rows, read_submissions
from .records import SUBMISSIONS, Finished, JobState, StoredBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from ...wire.sockets import Frame
    from .records import Submission

    Row = tuple[Any, ...]

APPLICATION_ID = int.from_bytes(b"PRLJ", "big")
SCHEMA_VERSION = 4
"""Raised with every change of the tables, and of the messages that lie in them."""
TABLES = (
    """CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE jobs (sequence INTEGER PRIMARY KEY, session TEXT NOT NULL, job_id TEXT NOT NULL,
        task TEXT NOT NULL, stage_wait_s REAL NOT NULL, accepted_at REAL NOT NULL, packed BLOB NOT NULL,
        in_batch INTEGER NOT NULL)""",
    """CREATE TABLE states (sequence INTEGER PRIMARY KEY, phase TEXT NOT NULL, stage_id TEXT NOT NULL,
        attempt INTEGER NOT NULL, attempts_given_back INTEGER NOT NULL, progress BLOB NOT NULL,
        history BLOB NOT NULL)""",
    """CREATE TABLE blocks (sequence INTEGER PRIMARY KEY, block BLOB NOT NULL)""",
    """CREATE TABLE results (sequence INTEGER PRIMARY KEY, session TEXT NOT NULL, job_id TEXT NOT NULL,
        outcome TEXT NOT NULL, ended_at REAL NOT NULL, digest BLOB NOT NULL, result BLOB NOT NULL,
        history BLOB NOT NULL, in_batch INTEGER NOT NULL)""",
    """CREATE TABLE notes (name TEXT PRIMARY KEY, note BLOB NOT NULL)""",
    """CREATE TABLE submissions (number INTEGER PRIMARY KEY, session TEXT NOT NULL, request_id TEXT NOT NULL,
        new INTEGER NOT NULL)""",
)
ROW_BYTES = 400
"""What an accepted job takes beside its packed bytes, about."""

log = logging.getLogger("prorl.rollout_broker")


FORGET_SUBMISSIONS = "DELETE FROM submissions WHERE number <= (SELECT max(number) FROM submissions) - ?"
INSERT_STATE = "INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?, ?, ?, ?)"
INSERT_BLOCK = "INSERT OR REPLACE INTO blocks VALUES (?, ?)"
INSERT_NOTE = "INSERT OR REPLACE INTO notes VALUES (?, ?)"
INSERT_RESULT = "INSERT INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"

_encode = msgspec.msgpack.Encoder().encode


class DiskJournal:
    """A journal that outlives its process and its machine.

    New jobs are refused somewhat before `limit_bytes`; with `sync`, each commit waits for the disk, so that a power
    loss takes nothing either.
    """

    def __init__(self, path: Path, limit_bytes: int = 2**34, *, sync: bool = False) -> None:
        self._file = JournalFile(path, APPLICATION_ID, SCHEMA_VERSION, TABLES, limit_bytes, sync=sync)
        try:
            self._blocks = self._read_blocks()
            """Jobs and results whose block has a row; and that block, while it is in memory too."""
            self.journal_id = self._read_id()
            """Names this record for as long as the file is there."""
            self._left: set[int] = set()
            """Jobs whose row is still there although clients are told of their end; it goes when they have it."""
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def check_room(self, size_bytes: int) -> None:
        self._file.check_room(size_bytes)

    def accept(self, jobs: Sequence[JobState], submission: Submission | None = None) -> None:
        self.check_room(sum(len(job.packed) + ROW_BYTES for job in jobs))
        now = time.time()
        rows = [
            (job.sequence, job.session, job.job_id, job.task, job.stage_wait_s, now, job.packed, job.in_batch)
            for job in jobs
        ]
        requests = [submission] if submission is not None else []
        self._file.run(
            ("INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows),
            ("INSERT INTO submissions (session, request_id, new) VALUES (?, ?, ?)", requests),
            (FORGET_SUBMISSIONS, [(SUBMISSIONS,) for _ in requests]),
        )

    def write(
        self,
        states: Sequence[JobState],
        ended: Sequence[Finished],
        acknowledged: Sequence[int],
        discarded: Sequence[int] = (),
        notes: Mapping[str, bytes | None] | None = None,
    ) -> None:
        now = time.time()
        both: list[JobState | Finished] = [*states, *ended]
        by_number: dict[int, JobState | Finished] = {one.sequence: one for one in both}
        rows = _packed_rows(_state_row, states)
        results = _packed_rows(lambda one: _result_row(one, now), ended)
        blocks = {key: one.block for key, one in by_number.items() if self._is_new(key, one.block)}
        block_rows = [(key, _buffer(block)) for key, block in blocks.items()]
        gone = (acknowledged, discarded)
        notes = notes or {}
        try:
            self._write(by_number, rows, results, block_rows, gone, notes)
        except ROW_ERRORS:
            no_block = self._file.refused(INSERT_BLOCK, block_rows)
            without = {block_rows[place][0]: error for place, error in no_block.items()}
            rows = self._fitting(by_number, INSERT_STATE, rows, without)
            results = self._fitting(by_number, INSERT_RESULT, results, without)
            block_rows = [row for row in block_rows if row[0] not in without]
            self._write(by_number, rows, results, block_rows, gone, notes)

    def _write(
        self,
        by_number: Mapping[int, JobState | Finished],
        rows: Sequence[Row],
        results: Sequence[Row],
        block_rows: Sequence[Row],
        over: tuple[Sequence[int], Sequence[int]],
        notes: Mapping[str, bytes | None],
    ) -> None:
        """Write what was packed; a job whose result is not in it stays unchanged."""
        acknowledged, discarded = over
        written = {row[0] for row in (*rows, *results)}
        no_job = [(row[0],) for row in results]
        no_job += [(sequence,) for sequence in acknowledged if sequence in self._left]
        no_job += [(sequence,) for sequence in discarded]
        gone = {key for key in written if by_number[key].block is None and key in self._blocks}
        gone.update(sequence for sequence in (*acknowledged, *discarded) if sequence in self._blocks)
        self._file.run(
            # First what makes room.
            ("DELETE FROM blocks WHERE sequence = ?", [(sequence,) for sequence in gone]),
            ("DELETE FROM results WHERE sequence = ?", [(sequence,) for sequence in acknowledged]),
            ("DELETE FROM jobs WHERE sequence = ?", no_job),
            ("DELETE FROM states WHERE sequence = ?", no_job),
            ("DELETE FROM notes WHERE name = ?", [(name,) for name, note in notes.items() if note is None]),
            (INSERT_NOTE, [(name, note) for name, note in notes.items() if note is not None]),
            (INSERT_STATE, rows),
            (INSERT_BLOCK, [row for row in block_rows if row[0] in written]),
            (INSERT_RESULT, results),
            to_the_last=True,
        )
        for sequence in gone:
            del self._blocks[sequence]
        self._blocks.update((row[0], by_number[row[0]].block) for row in block_rows if row[0] in written)
        self._left.difference_update(acknowledged, discarded)
        ended = {key for key, one in by_number.items() if isinstance(one, Finished)}
        self._left.update(ended - written)

    def _fitting(
        self,
        by_number: Mapping[int, JobState | Finished],
        statement: str,
        rows: Sequence[Row],
        without: Mapping[int, Exception],
    ) -> list[Row]:
        refused = self._file.refused(statement, rows)
        problems = {rows[place][0]: error for place, error in refused.items()}
        problems |= {row[0]: without[row[0]] for row in rows if row[0] in without}
        for sequence, error in problems.items():
            _log_left_out(by_number[sequence], error)
        return [row for row in rows if row[0] not in problems]

    def recover(self) -> Recovered:
        jobs: list[JobState] = []
        results: list[Finished] = []
        last = 0
        with failures(self._file.path, "read", at_start=True):
            for one in read_rows(self._file.connection):
                last = max(last, one.sequence)
                match one:
                    case JobState():
                        jobs.append(one)
                    case Finished():
                        results.append(one)
                    case Damaged():
                        self._set_aside(one, results)
            notes = read_notes(self._file.connection)
            submissions = read_submissions(self._file.connection)
        results.sort(key=lambda one: one.sequence)
        return Recovered(jobs, results, last, notes, submissions)

    def _set_aside(self, damaged: Damaged, results: list[Finished]) -> None:
        log.error(
            "a row of the journal %s is damaged, and stays there until its job's client knows: %s",
            self._file.path,
            damaged.problem,
            extra=of_job(damaged.job_id or "unknown"),
        )
        if damaged.loss is not None:
            self._left.add(damaged.sequence)
            results.append(damaged.loss)

    def block(self, stored: StoredBlock) -> Frame:
        with failures(self._file.path, "read"):
            row = self._file.connection.execute("SELECT block FROM blocks WHERE sequence = ?", (stored.sequence,))
            block: bytes = row.fetchone()[0]
        return block

    def unloaded(self, finished: Finished) -> Finished:
        if finished.block is None or isinstance(finished.block, StoredBlock):
            return finished
        self._blocks[finished.sequence] = None
        return finished._replace(block=StoredBlock(finished.sequence, len(finished.block)))

    def compact(self) -> None:
        self._file.compact()

    def _is_new(self, sequence: int, block: Any) -> bool:
        return not (block is None or isinstance(block, StoredBlock) or self._blocks.get(sequence) is block)

    def _read_blocks(self) -> dict[int, Any]:
        with failures(self._file.path, "read", at_start=True):
            return dict.fromkeys(row[0] for row in self._file.connection.execute("SELECT sequence FROM blocks"))

    def _read_id(self) -> str:
        with failures(self._file.path, "read", at_start=True):
            row = self._file.connection.execute("SELECT value FROM meta WHERE key = 'journal_id'").fetchone()
        if row is not None:
            return str(row[0])
        journal_id = new_id()
        with self._file.transaction() as connection:
            connection.execute("INSERT INTO meta VALUES ('journal_id', ?)", (journal_id,))
        return journal_id


def _packed_rows(pack: Callable[[Any], Row], items: Iterable[JobState | Finished]) -> list[Row]:
    rows = []
    for one in items:
        try:
            rows.append(pack(one))
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
            _log_left_out(one, error)  # nor could it be sent
    return rows


def _state_row(state: JobState) -> Row:
    progress = Progress(state.sandbox, state.phase_data, state.run, state.metrics, state.timings)
    packed = b"" if progress == NOTHING else _encode(progress)
    place = (state.phase.value, state.stage_id, state.attempt, state.attempts_given_back)
    return (state.sequence, *place, packed, state.history)


def _result_row(one: Finished, now: float) -> Row:
    result = one.result
    ended = (one.session, result.job_id, result.outcome.value, now, one.job_digest)
    return (one.sequence, *ended, _encode(result), one.history, one.in_batch)


def _log_left_out(one: JobState | Finished, error: Exception) -> None:
    """Log that a job stays in the journal as it was: a broker that is restarted continues from there."""
    result = one.result if isinstance(one, Finished) else None
    what, job_id = ("state", one.job_id) if isinstance(one, JobState) else ("result", one.result.job_id)
    attempt = result.attempt if result is not None else one.attempt  # type: ignore[union-attr]
    log.error("the job's %s cannot be written down: %s", what, error, extra=of_job(job_id, attempt))


def _buffer(block: Any) -> Any:
    return getattr(block, "buffer", block)
