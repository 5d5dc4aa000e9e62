"""The rollout broker's journal: one SQLite file (see `JournalFile`), and trajectories in files next to it.

    jobs      (sequence, session, job, …, packed)       one row per unfinished job, written once
    states    (sequence, phase, stage, attempt, …)      the job's position, written once per round that changes it
    blocks    (sequence, segment, offset, …)            the place of the trajectory (see `SegmentStore`)
    results   (sequence, session, job, …, result)       one row per unacknowledged result
    notes     (name, note)                              batches (see `batch_notes`) and session leases
    submissions (number, session, request_id, new)      the last requests that submitted jobs

All rows of a job have its number, the only index. The changes of a round are one transaction; its trajectories are
appended before. The journal skips a row that cannot be written and leaves the earlier row in place. An unreadable row
stays until the job's client has acknowledged the loss (see `journal_rows`). At start the broker reads everything but
the content of jobs and trajectories.

Without a path, the tables are in memory and refer to the trajectories: a broker restarted with the same object
continues, and a new process starts empty.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import msgspec

from ...errors import JournalFailed
from ...system.logs import of_job
from ...wire.messages.base import new_id
from .journal_file import ROW_ERRORS, JournalFile, failures
from .journal_rows import (
    BLOCKS,
    NOTHING,
    Damaged,
    Progress,
    any_text,
    place_of,
    read_notes,
    read_rows,
    read_submissions,
)
from .records import SUBMISSIONS, Finished, JobState, Recovered, StoredBlock
from .segment_store import BlockLost, NoSegments, Place, SegmentStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from ...wire.sockets import Frame
    from .records import Submission

    Row = tuple[Any, ...]

APPLICATION_ID = int.from_bytes(b"PRLJ", "big")
SCHEMA_VERSION = 8
"""Increment with every change of the tables and of the messages stored in them."""
TABLES = (
    """CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE jobs (sequence INTEGER PRIMARY KEY, session TEXT NOT NULL, job_id TEXT NOT NULL,
        task TEXT NOT NULL, stage_wait_s REAL NOT NULL, accepted_at REAL NOT NULL, packed BLOB NOT NULL,
        in_batch INTEGER NOT NULL)""",
    """CREATE TABLE states (sequence INTEGER PRIMARY KEY, phase TEXT NOT NULL, stage_id TEXT NOT NULL,
        attempt INTEGER NOT NULL, attempts_given_back INTEGER NOT NULL, progress BLOB NOT NULL,
        history BLOB NOT NULL)""",
    """CREATE TABLE blocks (sequence INTEGER PRIMARY KEY, segment INTEGER NOT NULL, offset INTEGER NOT NULL,
        size_bytes INTEGER NOT NULL, checksum INTEGER NOT NULL)""",
    """CREATE TABLE results (sequence INTEGER PRIMARY KEY, session TEXT NOT NULL, job_id TEXT NOT NULL,
        outcome TEXT NOT NULL, ended_at REAL NOT NULL, digest BLOB NOT NULL, result BLOB NOT NULL,
        history BLOB NOT NULL, in_batch INTEGER NOT NULL, packed BLOB NOT NULL)""",
    """CREATE TABLE notes (name TEXT PRIMARY KEY, note BLOB NOT NULL)""",
    """CREATE TABLE submissions (number INTEGER PRIMARY KEY, session TEXT NOT NULL, request_id TEXT NOT NULL,
        new INTEGER NOT NULL)""",
)
ROW_BYTES = 400
"""Approximate size of an accepted job's row without its packed bytes."""
WORTH_COPYING = 0.75
"""To make room, only segments with less than this share of wanted bytes are copied."""
COPIED_SEGMENTS = 4
"""Most segments that are copied at once to make room."""

log = logging.getLogger("prorl.rollout_broker")


FORGET_SUBMISSIONS = "DELETE FROM submissions WHERE number <= (SELECT max(number) FROM submissions) - ?"
INSERT_STATE = "INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?, ?, ?, ?)"
INSERT_BLOCK = "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?, ?)"
INSERT_NOTE = "INSERT OR REPLACE INTO notes VALUES (?, ?)"
INSERT_RESULT = "INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"

Written = TypeVar("Written", JobState, Finished)
_encode = msgspec.msgpack.Encoder().encode


class _Block(NamedTuple):
    """A stored trajectory."""

    place: Place
    in_memory: Any
    """The block itself, while a result or a state refers to it too."""


class Journal:
    """The record of jobs accepted, moved, ended and acknowledged. Every method may raise `JournalFailed`.

    Args:
        path: the file; None: the journal is in memory.
        limit_bytes: the largest size; new jobs are refused at 90 % of it.
        sync: whether each commit waits for the disk, so that a power loss loses nothing.
    """

    def __init__(self, path: Path | None = None, limit_bytes: int = 2**34, *, sync: bool = False) -> None:
        self._file = JournalFile(path, APPLICATION_ID, SCHEMA_VERSION, TABLES, limit_bytes, sync=sync)
        try:
            limit_bytes = self._file.limit_bytes
            self._segments = NoSegments() if path is None else SegmentStore(path, limit_bytes, sync=sync)
            self._blocks = self._read_blocks()
            """By job number, for jobs and results."""
            self._segments.take_up(block.place for block in self._blocks.values())
            self.journal_id = self._read_id()
            """Random id of this journal, stored in the file."""
            self._left: set[int] = set()
            """Jobs whose row remains although their end was sent; the row is deleted when the client acknowledges."""
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._segments.close()
        self._file.close()

    @property
    def size_bytes(self) -> int:
        """Bytes used on disk, or in memory without the trajectories."""
        return self._file.size_bytes + self._segments.size_bytes

    def check_room(self, size_bytes: int) -> None:
        """Raise `JournalFailed` unless there is room for new jobs of that size."""
        self._file.check_room(size_bytes, self._segments.wanted_bytes)

    def accept(
        self, jobs: Sequence[JobState], submission: Submission | None = None, replaced: Sequence[int] = ()
    ) -> None:
        """Write new jobs and the request that submitted them, all or nothing, and delete `replaced` results by number.

        Only the last `SUBMISSIONS` requests are stored, which clients may still resend.
        """
        self.check_room(sum(len(job.packed) + ROW_BYTES for job in jobs))
        now = time.time()
        rows = [
            (job.sequence, job.session, job.job_id, job.task, job.stage_wait_s, now, job.packed, job.in_batch)
            for job in jobs
        ]
        requests = [submission] if submission is not None else []
        self._file.run(
            ("DELETE FROM results WHERE sequence = ?", [(sequence,) for sequence in replaced]),
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
        """Write the changes of a round, all or nothing.

        `ended` results replace their jobs. `acknowledged` results and `discarded` jobs, whose results no client will
        fetch, are deleted by number. A note of None is deleted by name.
        """
        now = time.time()
        both: list[JobState | Finished] = [*states, *ended]
        by_number: dict[int, JobState | Finished] = {one.sequence: one for one in both}
        blocks, without = self._new_blocks(by_number)
        rows = _packed_rows(_state_row, [one for one in states if one.sequence not in without])
        results = _packed_rows(lambda one: _result_row(one, now), [one for one in ended if one.sequence not in without])
        gone = (acknowledged, discarded)
        notes = notes or {}
        places = dict(zip(blocks, self._append(list(blocks.values())), strict=True))
        try:
            try:
                self._write(by_number, rows, results, places, gone, notes)
            except ROW_ERRORS:
                rows = self._fitting(by_number, INSERT_STATE, rows)
                results = self._fitting(by_number, INSERT_RESULT, results)
                self._write(by_number, rows, results, places, gone, notes)
        except BaseException:  # whatever it was, no row names the blocks that were appended
            self._segments.rewind()
            raise
        if self._segments.is_wasteful:
            with contextlib.suppress(JournalFailed):  # the round itself is written
                self._copy_on(1.0)

    def _write(
        self,
        by_number: Mapping[int, JobState | Finished],
        rows: Sequence[Row],
        results: Sequence[Row],
        places: Mapping[int, Place],
        over: tuple[Sequence[int], Sequence[int]],
        notes: Mapping[str, bytes | None],
    ) -> None:
        """Write the packed rows; a job whose result was not packed stays unchanged."""
        acknowledged, discarded = over
        written = {row[0] for row in (*rows, *results)}
        no_job = [(row[0],) for row in results]
        no_job += [(sequence,) for sequence in acknowledged if sequence in self._left]
        no_job += [(sequence,) for sequence in discarded]
        gone = {key for key in written if by_number[key].block is None and key in self._blocks}
        gone.update(sequence for sequence in (*acknowledged, *discarded) if sequence in self._blocks)
        statements = (
            # Deletions come first, to make room.
            ("DELETE FROM blocks WHERE sequence = ?", [(sequence,) for sequence in gone]),
            ("DELETE FROM results WHERE sequence = ?", [(sequence,) for sequence in acknowledged]),
            ("DELETE FROM jobs WHERE sequence = ?", no_job),
            ("DELETE FROM states WHERE sequence = ?", no_job),
            ("DELETE FROM notes WHERE name = ?", [(name,) for name, note in notes.items() if note is None]),
            (INSERT_NOTE, [(name, note) for name, note in notes.items() if note is not None]),
            (INSERT_STATE, rows),
            (INSERT_BLOCK, [(key, *place) for key, place in places.items() if key in written]),
            (INSERT_RESULT, results),
        )
        self._file.to_the_last(lambda: self._file.run(*statements))
        self._keep({key: _Block(places[key], by_number[key].block) for key in places if key in written}, gone)
        self._left.difference_update(acknowledged, discarded)
        ended = {key for key, one in by_number.items() if isinstance(one, Finished)}
        self._left.update(ended - written)

    def _fitting(
        self,
        by_number: Mapping[int, JobState | Finished],
        statement: str,
        rows: Sequence[Row],
    ) -> list[Row]:
        refused = self._file.refused(statement, rows)
        problems = {rows[place][0]: error for place, error in refused.items()}
        for sequence, error in problems.items():
            _log_left_out(by_number[sequence], error)
        return [row for row in rows if row[0] not in problems]

    def recover(self) -> Recovered:
        """Return the whole content, with a loss result for each damaged row of a known job."""
        jobs: list[JobState] = []
        results: list[Finished] = []
        last = 0
        with failures(self._file.path, "read", at_start=True):
            for one in read_rows(self._file.connection, self._segments.check):
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
        """Return a trajectory's block; raise `BlockLost` if the block is damaged or missing."""
        block = self._blocks[stored.sequence]
        if isinstance(self._segments, NoSegments):
            return block.in_memory  # type: ignore[no-any-return]
        return self._segments.read(block.place)

    def unloaded(self, one: Written) -> Written:
        """Return a written result or state with its block replaced by a `StoredBlock`, if it can be read from disk."""
        known = self._blocks.get(one.sequence)
        if isinstance(self._segments, NoSegments) or one.block is None or known is None:
            return one
        if known.in_memory is not one.block:  # unloaded before, or its row could not be written
            return one
        self._blocks[one.sequence] = known._replace(in_memory=None)
        return one._replace(block=StoredBlock(one.sequence, len(one.block)))

    def compact(self) -> None:
        while self._copy_on(1.0):
            pass
        self._file.compact()

    def _new_blocks(
        self, by_number: Mapping[int, JobState | Finished]
    ) -> tuple[dict[int, memoryview], dict[int, Exception]]:
        """Return the blocks not yet written, and the errors of blocks that can never be written."""
        blocks: dict[int, memoryview] = {}
        without: dict[int, Exception] = {}
        for key, one in by_number.items():
            known = self._blocks.get(key)
            if one.block is None or isinstance(one.block, StoredBlock) or (known and known.in_memory is one.block):
                continue
            try:
                blocks[key] = memoryview(getattr(one.block, "buffer", one.block)).cast("B")
            except TypeError as error:
                without[key] = error
                _log_left_out(one, error)
        return blocks, without

    def _append(self, blocks: Sequence[memoryview]) -> list[Place]:
        """Write blocks to a segment, after making room within the limit."""
        if not blocks:
            return []
        segments = self._segments
        room = self._file.limit_bytes - self._file.size_bytes - sum(map(len, blocks)) - segments.segment_bytes
        for _ in range(COPIED_SEGMENTS):
            if segments.size_bytes <= room or not self._copy_on(WORTH_COPYING):
                break
        if segments.size_bytes > room:
            raise JournalFailed(
                f"the journal {self._file.path} is full: with its trajectories it would be larger than its limit "
                f"(journal_limit_bytes), {self._file.limit_bytes >> 20} MiB; collect results, or raise the limit",
                path=str(self._file.path),
            )
        return self._file.to_the_last(lambda: segments.append(blocks))

    def _copy_on(self, wanted_share: float) -> bool:
        """Copy the wanted blocks of the emptiest segment and remove its file; return False if no segment qualifies.

        The copy is synced before the file is removed: the original may have been on disk for days.
        """
        number = self._segments.emptiest(wanted_share)
        if number is None:
            return False
        found: dict[int, bytes | memoryview] = {}
        moved: dict[int, Place] = {}
        for key, block in self._blocks.items():
            if block.place.segment == number:
                try:
                    found[key] = self._segments.read(block.place)
                except BlockLost:
                    moved[key] = block.place._replace(segment=0)
        copies = self._segments.append([memoryview(block) for block in found.values()], sync=True)
        moved |= zip(found, copies, strict=True)
        try:
            with self._file.waiting_for_the_disk():
                self._file.run((INSERT_BLOCK, [(key, *place) for key, place in moved.items()]))
        except BaseException:  # whatever it was, no row names the blocks that were appended
            self._segments.rewind()
            raise
        self._keep({key: self._blocks[key]._replace(place=place) for key, place in moved.items()})
        return True

    def _keep(self, new: Mapping[int, _Block], gone: Iterable[int] = ()) -> None:
        """Update the places of blocks after a commit."""
        removed = [self._blocks.pop(key).place for key in (*gone, *new) if key in self._blocks]
        self._blocks.update(new)
        self._segments.commit([block.place for block in new.values()], removed)

    def _read_blocks(self) -> dict[int, _Block]:
        with failures(self._file.path, "read", at_start=True), any_text(self._file.connection):
            return {row[0]: _Block(place_of(row[1:]), None) for row in self._file.connection.execute(BLOCKS)}

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
            _log_left_out(one, error)  # such a row could not be sent either
    return rows


def _state_row(state: JobState) -> Row:
    progress = Progress(state.sandbox, state.phase_data, state.run, state.metrics, state.timings, state.last)
    packed = b"" if progress == NOTHING else _encode(progress)
    phase, place = str(state.phase), (state.stage_id, state.attempt, state.attempts_given_back)
    return (state.sequence, phase, *place, packed, state.history)


def _result_row(one: Finished, now: float) -> Row:
    result = one.result
    ended = (one.session, result.job_id, str(result.outcome), now, one.job_digest)
    return (one.sequence, *ended, _encode(result), one.history, one.in_batch, one.packed)


def _log_left_out(one: JobState | Finished, error: Exception) -> None:
    """Log that a job's row stays unchanged; a restarted broker continues from that row."""
    result = one.result if isinstance(one, Finished) else None
    what, job_id = ("state", one.job_id) if isinstance(one, JobState) else ("result", one.result.job_id)
    attempt = result.attempt if result is not None else one.attempt  # type: ignore[union-attr]
    log.error("the job's %s cannot be written down: %s", what, error, extra=of_job(job_id, attempt))
