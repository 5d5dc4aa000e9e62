"""Read-only summary of a rollout broker's journal, which a running broker may have open."""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ...errors import ConfigError, JournalFailed
from ...system.file_system import LOCAL, file_system_of
from .journal import APPLICATION_ID, SCHEMA_VERSION
from .journal_file import PAGE_BYTES, check_kind, connect, failures, try_lock
from .journal_rows import BLOCKS, Damaged, any_text, place_of, read_rows
from .records import holder_of
from .segment_store import SegmentStore, segment_paths

if TYPE_CHECKING:
    import sqlite3
    from pathlib import Path


class SessionSummary(NamedTuple):
    session: str
    """The session's name, or that of its batches (see `holder_of`)."""
    queued: dict[str, int]
    """Queued jobs, by phase."""
    held: dict[str, int]
    """Jobs that a stage process held at the last write, by phase."""
    results: dict[str, int]
    """Unacknowledged results, by outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSummary:
    path: Path
    journal_id: str
    schema: int
    in_use: bool
    """Whether a broker has the file open."""
    size_bytes: int
    """Size of the file, its log and its segments."""
    free_bytes: int
    """Part of `size_bytes` that deleted rows and trajectories left."""
    jobs: int
    results: int
    trajectory_bytes: int
    oldest_job_at: float | None
    """When the oldest job was accepted, in seconds since 1970."""
    oldest_result_at: float | None
    """When the oldest result's job ended, in seconds since 1970."""
    sessions: tuple[SessionSummary, ...]


def has_begun(path: Path) -> bool:
    """Return whether a broker has created this journal completely; a killed creation leaves no data."""
    return _size(path) > 0 and not path.with_name(f"{path.name}-journal").exists()


def read_summary(path: Path) -> JournalSummary:
    in_use = _check(path)
    with failures(path, "read", at_start=True), contextlib.closing(_open(path, in_use)) as connection:
        connection.execute("BEGIN")  # one consistent snapshot
        ask = connection.execute
        schema = int(ask("PRAGMA user_version").fetchone()[0])
        if schema != SCHEMA_VERSION:
            raise ConfigError(
                f"{path} is a journal of schema version {schema}, and this version of prorl-zmq has {SCHEMA_VERSION}: "
                "let the version that wrote it end its jobs, or forget what it holds with "
                f"`prorl journal clear {path}`",
                key="journal",
            )
        jobs, oldest_job_at = ask(
            "SELECT count(*), min(CASE WHEN typeof(accepted_at) = 'real' THEN accepted_at END) FROM jobs"
        ).fetchone()
        results, oldest_result_at = ask(
            "SELECT count(*), min(CASE WHEN typeof(ended_at) = 'real' THEN ended_at END) FROM results"
        ).fetchone()
        trajectory_bytes = sum(place_of(row[1:]).size_bytes for row in ask(BLOCKS))
        return JournalSummary(
            path=path,
            journal_id=next((row[0] for row in ask("SELECT value FROM meta WHERE key = 'journal_id'")), ""),
            schema=schema,
            in_use=in_use,
            size_bytes=size_of(path),
            free_bytes=PAGE_BYTES * int(ask("PRAGMA freelist_count").fetchone()[0])
            + max(0, sum(map(_size, segment_paths(path))) - trajectory_bytes),
            jobs=jobs,
            results=results,
            trajectory_bytes=trajectory_bytes,
            oldest_job_at=oldest_job_at,
            oldest_result_at=oldest_result_at,
            sessions=tuple(_sessions(connection)),
        )


def count_damaged(path: Path) -> int:
    """Read all rows; return how many are invalid or refer to missing trajectories."""
    in_use = _check(path)
    # A running broker may remove trajectories of rows in this snapshot.
    check = (lambda _: None) if in_use else SegmentStore(path, 0).check
    with failures(path, "read", at_start=True), contextlib.closing(_open(path, in_use)) as connection:
        return sum(isinstance(row, Damaged) for row in read_rows(connection, check))


def parts(path: Path) -> tuple[Path, ...]:
    """Return the paths of a journal's files: the database, SQLite's companion files, and the segments."""
    beside = (path.with_name(path.name + suffix) for suffix in ("-wal", "-shm", "-journal"))
    return (path, *beside, *segment_paths(path))


def size_of(path: Path) -> int:
    """Return the total size of a journal's files in bytes."""
    return sum(map(_size, parts(path)))


def _check(path: Path) -> bool:
    """Return whether a broker has the journal open."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"the journal {path} cannot be read: {error.strerror}", key="journal") from error
    try:
        if os.fstat(descriptor).st_size == 0:
            raise ConfigError(f"{path} is empty: no broker has begun a journal there", key="journal")
        check_kind(path, descriptor, APPLICATION_ID)
        return not try_lock(path, descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _open(path: Path, in_use: bool) -> sqlite3.Connection:
    kind = file_system_of(path)
    if in_use and kind not in LOCAL:
        raise JournalFailed(
            f"the journal {path} is in use by a broker, and on this file system ({kind or 'unknown'}) no other process "
            "can read it meanwhile; ask the broker with `prorl status`, or stop it",
            path=str(path),
        )
    return connect(path, read_only=True)


def _sessions(connection: sqlite3.Connection) -> list[SessionSummary]:
    sessions: dict[str, SessionSummary] = {}

    def of(session: object, in_batch: object) -> SessionSummary:
        name = holder_of(str(session), in_batch=in_batch == 1)  # a damaged row may have any value
        return sessions.setdefault(name, SessionSummary(name, {}, {}, {}))

    query = """SELECT session, in_batch, coalesce(phase, 'init'), coalesce(stage_id, '') != '', count(*)
        FROM jobs LEFT JOIN states USING (sequence) GROUP BY 1, 2, 3, 4"""
    with any_text(connection):
        for session, in_batch, phase, held, count in connection.execute(query):
            one = of(session, in_batch)
            (one.held if held else one.queued)[str(phase)] = count
        query = "SELECT session, in_batch, outcome, count(*) FROM results GROUP BY 1, 2, 3"
        for session, in_batch, outcome, count in connection.execute(query):
            of(session, in_batch).results[str(outcome)] = count
    return list(sessions.values())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0
