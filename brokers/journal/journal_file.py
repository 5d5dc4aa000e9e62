"""`JournalFile`: an SQLite file that one broker owns; locked, checked before it is written, and bounded in size.

WAL mode: a commit appends to the log next to the file, so a killed process keeps its last commit. With
`synchronous=NORMAL` a power loss may lose the last commits, but never their order; with `sync` each commit waits for
the disk. SQLite reuses the space of deleted rows. A file of another kind or version is rejected before it is written;
there is no migration and no repair. The lock is a `flock` on the file, which the kernel releases with the process.

WAL mode needs an index in shared memory, which network file systems lack. On file systems outside `LOCAL`, SQLite keeps
the index private (`locking_mode = EXCLUSIVE`), so no other process can read the file while a broker has it open. There
SQLite takes no locks (`unix-none`): NFS turns our `flock` into a lock on the bytes that SQLite locks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import ConfigError, JournalFailed
from ...system.file_system import LOCAL, file_system_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Returned = TypeVar("Returned")

IN_MEMORY = Path(":memory:")
"""SQLite's name for a database without a file."""
PAGE_BYTES = 4096
MIN_LIMIT_BYTES = 2**20
RESERVE_BYTES = 16 * 2**20
MIN_RESERVE_BYTES = 256 * 1024
RESERVE_SUFFIX = ".reserve"
LOCKED_S = 1.0
"""How many seconds a commit waits for another program that writes to the file."""
CHECKPOINT_PAGES = 16_000
"""Pages (64 MiB) after which the log is copied into the file."""
LOG_LIMIT_BYTES = 80 * 2**20
"""Longest log that remains after a checkpoint."""
FULL_SHARE = 0.9
"""Share of the limit above which new jobs are refused, to leave room for accepted ones."""

ROW_ERRORS = (
    *(OverflowError, TypeError, ValueError),
    *(sqlite3.InterfaceError, sqlite3.ProgrammingError, sqlite3.DataError, sqlite3.IntegrityError),
)
"""Errors of a row that SQLite cannot store on any disk."""

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_MAGIC = b"SQLite format 3\0"
_ID_PLACE = 68
"""Offset of the application id in the file's header."""


class JournalFile:
    """The open file (mode 0600), created if missing; without a path, a database in memory.

    Raises `ConfigError` if the file has another `application_id` or `schema` or cannot be opened, `JournalFailed` if
    another process has it open or the disk fails.
    """

    def __init__(
        self,
        path: Path | None,
        application_id: int,
        schema: int,
        tables: Sequence[str],
        limit_bytes: int = 2**34,
        *,
        sync: bool = False,
    ) -> None:
        self.path = path or IN_MEMORY
        self.limit_bytes = max(limit_bytes, MIN_LIMIT_BYTES)
        self._reserve = Reserve(path, limit_bytes) if path is not None else None
        self._lock = -1
        with contextlib.ExitStack() as stack:
            if path is not None:
                self._lock = lock_journal(path, create=True)
                stack.callback(os.close, self._lock)
                check_kind(path, self._lock, application_id)
            with failures(self.path, "opened", at_start=True):
                self.connection = connect(self.path)
                stack.callback(self.connection.close)
                self._check_schema(schema)
                self._set_up(application_id, schema, tables, sync)
            stack.pop_all()
        if self._reserve is not None:
            self._reserve.take()

    def close(self) -> None:
        self.connection.close()
        if self._lock >= 0:
            os.close(self._lock)  # last: closing any descriptor drops SQLite's locks on the file
            self._lock = -1

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit the statements executed inside, all or nothing."""
        with failures(self.path, "written"):
            try:
                self.connection.execute("BEGIN IMMEDIATE")
                yield self.connection
                self.connection.execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise

    def to_the_last(self, act: Callable[[], Returned]) -> Returned:
        """Call `act`; if the disk is full, remove the reserve and call `act` once more."""
        try:
            return act()
        except JournalFailed as error:
            if not (_is_full(error.__cause__) and self._reserve is not None and self._reserve.give()):
                raise
            return act()

    @contextlib.contextmanager
    def waiting_for_the_disk(self) -> Iterator[None]:
        """Make commits inside wait for the disk."""
        before = self._pragma("synchronous")
        self.connection.execute("PRAGMA synchronous = FULL")
        try:
            yield
        finally:
            self.connection.execute(f"PRAGMA synchronous = {before}")

    def run(self, *statements: tuple[str, Sequence[Sequence[Any]]]) -> None:
        """Run each statement for each of its rows in one transaction; takes half the time of `transaction`.

        Raises `JournalFailed`, or one of `ROW_ERRORS` if SQLite cannot store a row; nothing is written then.
        """
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            for statement, rows in statements:
                if rows:
                    self.connection.executemany(statement, rows)
            self.connection.execute("COMMIT")
        except BaseException as error:
            self._roll_back()
            if isinstance(error, sqlite3.Error) and not isinstance(error, ROW_ERRORS):
                raise _failure(self.path, "written", error) from error
            raise

    def refused(self, statement: str, rows: Sequence[Sequence[Any]]) -> dict[int, Exception]:
        """Return the errors of rows that SQLite cannot store, by index; changes nothing."""
        refused: dict[int, Exception] = {}
        with failures(self.path, "written"):
            try:
                self.connection.execute("BEGIN IMMEDIATE")
                for place, row in enumerate(rows):
                    try:
                        self.connection.execute(statement, row)
                    except ROW_ERRORS as error:
                        refused[place] = error
            finally:
                self._roll_back()
        return refused

    @property
    def used_bytes(self) -> int:
        """Bytes that rows use, without the free pages."""
        return PAGE_BYTES * (self._pragma("page_count") - self._pragma("freelist_count"))

    @property
    def size_bytes(self) -> int:
        return PAGE_BYTES * self._pragma("page_count")

    def check_room(self, more_bytes: int, beside_bytes: int = 0) -> None:
        """Raise `JournalFailed` without room for `more_bytes`; `beside_bytes` are other files under the same limit."""
        if self._reserve is not None and not self._reserve.take():
            raise JournalFailed(
                f"the disk of the journal {self.path} is full: what is left is for jobs that it has; make room there",
                path=str(self.path),
            )
        limit = self.limit_bytes
        with failures(self.path, "read"):
            used = self.used_bytes + beside_bytes
        if used + more_bytes > FULL_SHARE * limit:
            raise JournalFailed(
                f"the journal {self.path} is full: it holds {used >> 20} MiB, and its limit (journal_limit_bytes) is "
                f"{limit >> 20} MiB; collect results, which makes room, or raise the limit",
                path=str(self.path),
            )

    def compact(self) -> None:
        """Return free pages to the disk."""
        with failures(self.path, "compacted"):
            self.connection.execute("VACUUM")
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _roll_back(self) -> None:
        if self.connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self.connection.execute("ROLLBACK")

    def _pragma(self, name: str) -> int:
        return int(self.connection.execute(f"PRAGMA {name}").fetchone()[0])

    def _check_schema(self, schema: int) -> None:
        found = self._pragma("user_version")
        if found and found != schema:
            raise ConfigError(
                f"{self.path} is a journal of schema version {found}, and this version of prorl-zmq has {schema}: let "
                "the version that wrote it end its jobs, name another file, or forget what it holds with "
                f"`prorl journal clear {self.path}`",
                key="journal",
            )

    def _set_up(self, application_id: int, schema: int, tables: Sequence[str], sync: bool) -> None:
        execute = self.connection.execute
        execute(f"PRAGMA max_page_count = {self.limit_bytes // PAGE_BYTES}")
        if self._pragma("user_version") == 0:  # before WAL mode, so that the file's header has the id
            execute(f"PRAGMA page_size = {PAGE_BYTES}")
            execute("BEGIN IMMEDIATE")
            execute(f"PRAGMA application_id = {application_id}")
            for statement in tables:
                execute(statement)
            execute(f"PRAGMA user_version = {schema}")
            execute("COMMIT")
        execute("PRAGMA journal_mode = WAL")
        execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
        execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        execute(f"PRAGMA journal_size_limit = {LOG_LIMIT_BYTES}")


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    is_local = path == IN_MEMORY or file_system_of(path) in LOCAL
    flags = [*(["mode=ro"] if read_only else []), *([] if is_local else ["vfs=unix-none"])]
    connection = sqlite3.connect(
        str(path) if path == IN_MEMORY else f"{path.absolute().as_uri()}?{'&'.join(flags)}",
        timeout=LOCKED_S,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
        uri=True,
    )
    if not is_local:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # before the file is first read
    return connection


@contextlib.contextmanager
def failures(path: Path, what: str, *, at_start: bool = False) -> Iterator[None]:
    """Convert SQLite's errors to `JournalFailed`, or to `ConfigError` for a damaged file if `at_start`."""
    try:
        yield
    except sqlite3.Error as error:
        if at_start and _is_damage(error):
            raise ConfigError(_failure(path, what, error).message, key="journal") from error
        raise _failure(path, what, error) from error


def _is_damage(error: sqlite3.Error) -> bool:
    """Return whether an error is about the file's content, not about the disk."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED


def _failure(path: Path, what: str, error: sqlite3.Error) -> JournalFailed:
    if _is_damage(error):
        message = (
            f"the journal {path} is damaged ({error}): keep a copy of it and of the files next to it, and make way for "
            f"a new one with `prorl journal clear {path}`, which forgets what it holds"
        )
    else:
        message = (
            f"the journal {path} cannot be {what}: {error}; see that its disk has room and can be written to, and that "
            "journal_limit_bytes is not reached"
        )
    return JournalFailed(message, path=str(path))


class Reserve:
    """Reserved disk space: a file next to the journal, removed when its space is needed."""

    def __init__(self, journal: Path, limit_bytes: int) -> None:
        self._path = journal.with_name(journal.name + RESERVE_SUFFIX)
        self._limit_bytes = limit_bytes

    def take(self) -> bool:
        """Create the file unless it exists; return whether it exists now."""
        if self._path.exists():
            return True
        try:
            disk = os.statvfs(self._path.parent)
            size = min(RESERVE_BYTES, self._limit_bytes // 4, disk.f_bavail * disk.f_frsize // 8)
            if size < MIN_RESERVE_BYTES:
                return False
            part = self._path.with_name(f".{self._path.name}")
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size)
                part.rename(self._path)
            except OSError:
                part.unlink()
                return False
            finally:
                os.close(descriptor)
        except OSError:
            return False
        return True

    def give(self) -> bool:
        """Remove the file; return whether it existed."""
        try:
            self._path.unlink()
        except OSError:
            return False
        return True


def _is_full(error: BaseException | None) -> bool:
    """Return whether the disk was full; SQLite reports that as an I/O error too, for its index file."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def lock_journal(path: Path, *, create: bool = False) -> int:
    """Open a journal and lock it until the returned descriptor is closed; `JournalFailed` if another process has it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    except OSError as error:
        raise ConfigError(
            f"the journal {path} cannot be opened for writing: {error.strerror}", key="journal"
        ) from error
    try:
        if not try_lock(path, descriptor, fcntl.LOCK_EX):
            raise JournalFailed(
                f"the journal {path} is in use by another process; stop that broker, or name another file",
                path=str(path),
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def try_lock(path: Path, descriptor: int, kind: int) -> bool:
    """Lock an open journal; return False if another process has the lock, on NFS also one of another machine."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            f"the journal {path} cannot be locked against a second broker ({error.strerror}): its file system "
            f"({file_system_of(path) or 'unknown'}) must be mounted with locks (Lustre: the option flock; NFS: not "
            "nolock), or name a file on another one",
            key="journal",
        ) from error
    return True


def check_kind(path: Path, descriptor: int, *application_ids: int) -> None:
    """Raise `ConfigError` unless the file is empty or has one of these application ids."""
    header = os.pread(descriptor, _ID_PLACE + 4, 0)
    found = int.from_bytes(header[_ID_PLACE:], "big")
    if header and (not header.startswith(_MAGIC) or found not in application_ids):
        raise ConfigError(
            f"{path} is not a journal of this broker, and is left unchanged; name another file", key="journal"
        )
