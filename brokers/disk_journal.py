"""The rollout broker's journal on disk: one SQLite file (see `JournalFile`), whatever dies.

    jobs      (sequence, session, job, …, packed)       one row per job that has not ended, written once
    states    (sequence, phase, stage, attempt, …)      where it is, written once per round in which it moved
    blocks    (sequence, block)                         RUN's trajectory, as it came; the result keeps it
    results   (sequence, session, job, …, result)       one row per result that was not acknowledged

All rows of a job carry its number, so nothing else is indexed. A round's changes are one transaction. At a start jobs
are read and not decoded, and blocks stay on disk until a client asks for them.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec

from ..errors import ConfigError
from ..logs import of_job
from ..messages import Phase, PhaseDone, PhaseFailed, Result, SandboxHandle, new_id
from .journal import JobState, Recovered, StoredBlock
from .journal_file import JournalFile, failures
from .outbox import Finished

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ..sockets import Frame

APPLICATION_ID = int.from_bytes(b"PRLJ", "big")
SCHEMA_VERSION = 1
"""Raised with every change of the tables, and of the messages that lie in them."""
TABLES = (
    """CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE jobs (sequence INTEGER PRIMARY KEY, session TEXT NOT NULL, job_id TEXT NOT NULL,
        task TEXT NOT NULL, stage_wait_s REAL NOT NULL, accepted_at REAL NOT NULL, packed BLOB NOT NULL)""",
    """CREATE TABLE states (sequence INTEGER PRIMARY KEY, phase TEXT NOT NULL, stage_id TEXT NOT NULL,
        attempt INTEGER NOT NULL, attempts_given_back INTEGER NOT NULL, progress BLOB NOT NULL,
        history BLOB NOT NULL)""",
    """CREATE TABLE blocks (sequence INTEGER PRIMARY KEY, block BLOB NOT NULL)""",
    """CREATE TABLE results (sequence INTEGER PRIMARY KEY, session TEXT NOT NULL, job_id TEXT NOT NULL,
        outcome TEXT NOT NULL, ended_at REAL NOT NULL, digest BLOB NOT NULL, result BLOB NOT NULL,
        history BLOB NOT NULL)""",
)
ROW_BYTES = 400
"""What an accepted job takes beside its packed bytes, about."""

log = logging.getLogger("prorl.rollout_broker")


class _Progress(NamedTuple):
    """What earlier phases left, in one column."""

    sandbox: SandboxHandle | None
    carry: dict[str, Any]
    run: PhaseDone | PhaseFailed | None
    metrics: dict[str, float]
    timings: dict[str, float]


_encode = msgspec.msgpack.Encoder().encode
_progress = msgspec.msgpack.Decoder(_Progress).decode
_result = msgspec.msgpack.Decoder(Result).decode


class DiskJournal:
    """A journal that outlives its process and its machine; `close` it at the end.

    Args:
        path: of the file, which is made if there is none.
        limit_bytes: largest size; new jobs are refused somewhat before it.
        sync: wait for the disk at each commit, so that a power loss takes nothing either.

    Raises:
        ConfigError: the file is not a journal of this version, is damaged, or cannot be opened for writing.
        JournalFailed: another broker has it, or the disk fails.
    """

    def __init__(self, path: Path, limit_bytes: int = 2**34, *, sync: bool = False) -> None:
        self._file = JournalFile(path, APPLICATION_ID, SCHEMA_VERSION, TABLES, limit_bytes, sync=sync)
        try:
            self._blocks = self._read_blocks()
            """Jobs and results whose block has a row; and that block, while it is in memory too."""
            self.journal_id = self._read_id()
            """Names this record for as long as the file is there."""
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; may be called again."""
        self._file.close()

    def accept(self, jobs: Sequence[JobState]) -> None:
        """Note new jobs, all or none.

        Raises:
            JournalFailed: the file is full or cannot be written; nothing was noted.
        """
        self._file.check_room(sum(len(job.packed) + ROW_BYTES for job in jobs))
        now = time.time()
        rows = [(job.sequence, job.session, job.job_id, job.task, job.stage_wait_s, now, job.packed) for job in jobs]
        self._file.run(("INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?)", rows))

    def write(self, states: Sequence[JobState], ended: Sequence[Finished], acknowledged: Sequence[int]) -> None:
        """Note a round's changes, all or none (see `Journal.write`).

        Raises:
            JournalFailed: the file is full or cannot be written; nothing was noted.
        """
        rows = list(_state_rows(states))
        now = time.time()
        results = [
            (one.sequence, one.session, one.result.job_id, one.result.outcome.value, now, one.job_digest,
             _encode(one.result), one.history)
            for one in ended
        ]  # fmt: skip
        both: list[JobState | Finished] = [*states, *ended]
        new = {one.sequence: one.block for one in both if self._is_new(one.sequence, one.block)}
        gone = {one.sequence for one in both if one.block is None and one.sequence in self._blocks}
        gone.update(sequence for sequence in acknowledged if sequence in self._blocks)
        over = [(one.sequence,) for one in ended]
        self._file.run(
            # First what makes room.
            ("DELETE FROM blocks WHERE sequence = ?", [(sequence,) for sequence in gone]),
            ("DELETE FROM results WHERE sequence = ?", [(sequence,) for sequence in acknowledged]),
            ("DELETE FROM jobs WHERE sequence = ?", over),
            ("DELETE FROM states WHERE sequence = ?", over),
            ("INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?, ?, ?, ?)", rows),
            ("INSERT OR REPLACE INTO blocks VALUES (?, ?)", [(key, _buffer(block)) for key, block in new.items()]),
            ("INSERT INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?)", results),
        )
        for sequence in gone:
            del self._blocks[sequence]
        self._blocks.update(new)

    def recover(self) -> Recovered:
        """Give all that there is.

        Raises:
            ConfigError: the file is damaged.
        """
        try:
            with failures(self._file.path, "read"):
                jobs = list(self._read_jobs())
                results = list(self._read_results())
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"the journal {self._file.path} is damaged ({error}); keep a copy, and forget what it holds with "
                "`prorl journal clear`",
                key="journal",
            ) from error
        last = [*(job.sequence for job in jobs[-1:]), *(one.sequence for one in results[-1:])]
        return Recovered(jobs, results, max(last, default=0))

    def block(self, stored: StoredBlock) -> Frame:
        """Give a trajectory's block.

        Raises:
            JournalFailed: it cannot be read.
        """
        with failures(self._file.path, "read"):
            row = self._file.connection.execute("SELECT block FROM blocks WHERE sequence = ?", (stored.sequence,))
            block: bytes = row.fetchone()[0]
        return block

    def unloaded(self, finished: Finished) -> Finished:
        """Give a result that is safe without its block in memory."""
        if finished.block is None or isinstance(finished.block, StoredBlock):
            return finished
        self._blocks[finished.sequence] = None
        return finished._replace(block=StoredBlock(finished.sequence, len(finished.block)))

    def compact(self) -> None:
        """Give the room that acknowledged results have left back to the disk.

        Raises:
            JournalFailed: there is no room for the copy that this makes.
        """
        self._file.compact()

    def _is_new(self, sequence: int, block: Any) -> bool:
        return not (block is None or isinstance(block, StoredBlock) or self._blocks.get(sequence) is block)

    def _read_blocks(self) -> dict[int, Any]:
        with failures(self._file.path, "read"):
            return dict.fromkeys(row[0] for row in self._file.connection.execute("SELECT sequence FROM blocks"))

    def _read_id(self) -> str:
        with failures(self._file.path, "read"):
            row = self._file.connection.execute("SELECT value FROM meta WHERE key = 'journal_id'").fetchone()
        if row is not None:
            return str(row[0])
        journal_id = new_id()
        with self._file.transaction() as connection:
            connection.execute("INSERT INTO meta VALUES ('journal_id', ?)", (journal_id,))
        return journal_id

    def _read_jobs(self) -> Iterator[JobState]:
        query = """SELECT sequence, session, job_id, task, stage_wait_s, packed, coalesce(phase, 'init'),
            coalesce(stage_id, ''), coalesce(attempt, 1), coalesce(attempts_given_back, 0), coalesce(progress, x''),
            coalesce(history, x''), length(block)
            FROM jobs LEFT JOIN states USING (sequence) LEFT JOIN blocks USING (sequence) ORDER BY sequence"""
        phases = {phase.value: phase for phase in Phase}
        for row in self._file.connection.execute(query):
            sequence, session, job_id, task, wait_s, packed, phase, stage_id, *attempts, progress, history, size = row
            sandbox, carry, run, metrics, timings = _progress(progress) if progress else _NOTHING
            block = StoredBlock(sequence, size) if size is not None else None
            job = (sequence, session, job_id, task, wait_s, packed)
            place = (phases[phase], stage_id, attempts[0], attempts[1])
            yield JobState(*job, *place, sandbox, carry, run, block, metrics, timings, history)

    def _read_results(self) -> Iterator[Finished]:
        query = """SELECT sequence, session, digest, result, history, length(block)
            FROM results LEFT JOIN blocks USING (sequence) ORDER BY sequence"""
        for row in self._file.connection.execute(query):
            sequence, session, digest, result, history, size = row
            block = StoredBlock(sequence, size) if size is not None else None
            yield Finished(session, _result(result), block, digest, sequence, history)


_NOTHING = _Progress(None, {}, None, {}, {})


def _state_rows(states: Sequence[JobState]) -> Iterator[tuple[Any, ...]]:
    for state in states:
        progress = _Progress(state.sandbox, state.carry, state.run, state.metrics, state.timings)
        try:
            packed = b"" if progress == _NOTHING else _encode(progress)
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
            # Nor could the next phase be sent; after a restart the job goes on from where it was before.
            fields = of_job(state.job_id, state.attempt, state.phase)
            log.error("the job's state cannot be written down: %s", error, extra=fields)  # noqa: TRY400
            continue
        place = (state.phase.value, state.stage_id, state.attempt, state.attempts_given_back)
        yield (state.sequence, *place, packed, state.history)


def _buffer(block: Any) -> Any:
    """Give what SQLite takes for a frame."""
    return getattr(block, "buffer", block)
