"""An SQLite file that one broker owns: locked against a second one, checked before it is written, bounded in size.

WAL mode: a commit is one append to the log next to the file, so a killed process leaves the last commit whole.
`synchronous=NORMAL` never waits for the disk at a commit: a process that dies loses nothing, a machine that loses its
power may lose the last commits, and never the order between them; `sync` waits each time. Rows that are deleted leave
room that is used again, so the file grows to the most that was ever held, and not beyond its limit.

The lock is a `flock` on the file itself, which the kernel drops with the process. What cannot be a journal of this kind
and version is refused before it is touched; nothing is migrated, and a file that SQLite finds damaged is not mended.

WAL mode has an index in shared memory, which network file systems do not have. On them, and on those not known, SQLite
keeps the index to itself (`locking_mode = EXCLUSIVE`): no other process can read the file while a broker has it. It
takes no locks of its own there, since NFS makes of our `flock` a lock on the same bytes, which would keep SQLite out.
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
from .file_system import LOCAL, file_system_of

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
"""How long another program that writes to the file may keep us waiting."""
CHECKPOINT_PAGES = 16_000
"""After so many pages (64 MiB) the log is copied into the file."""
LOG_LIMIT_BYTES = 80 * 2**20
"""Longest log that is left behind after that."""
FULL_SHARE = 0.9
"""How full the file may be before new jobs are refused, so that there is room for what those will bring."""

ROW_ERRORS = (
    *(OverflowError, TypeError, ValueError),
    *(sqlite3.InterfaceError, sqlite3.ProgrammingError, sqlite3.DataError, sqlite3.IntegrityError),
)
"""What a row raises that SQLite cannot hold, on any disk."""

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_MAGIC = b"SQLite format 3\0"
_ID_PLACE = 68
"""Where in the file's header the application id is."""


class JournalFile:
    """The open file (mode 0600), created if it is missing; without a path, a database in memory.

    Raises `ConfigError` if it is not a journal of this kind (`application_id`) and version (`schema`) or cannot be
    opened, `JournalFailed` if another process has it or the disk fails.
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
            os.close(self._lock)  # after the connection: closing any descriptor of a file drops SQLite's own locks
            self._lock = -1

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit what is executed inside, or nothing of it."""
        with failures(self.path, "written"):
            try:
                self.connection.execute("BEGIN IMMEDIATE")
                yield self.connection
                self.connection.execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise

    def to_the_last(self, act: Callable[[], Returned]) -> Returned:
        """Do something; if the disk is full, with the room of the reserve."""
        try:
            return act()
        except JournalFailed as error:
            if not (_is_full(error.__cause__) and self._reserve is not None and self._reserve.give()):
                raise
            return act()

    @contextlib.contextmanager
    def waiting_for_the_disk(self) -> Iterator[None]:
        """Have commits inside wait until the disk has them."""
        before = self._pragma("synchronous")
        self.connection.execute("PRAGMA synchronous = FULL")
        try:
            yield
        finally:
            self.connection.execute(f"PRAGMA synchronous = {before}")

    def run(self, *statements: tuple[str, Sequence[Sequence[Any]]]) -> None:
        """Run each statement for each of its rows, in one transaction, in half the time of `transaction`.

        Raises one of `ROW_ERRORS` if SQLite cannot hold a row; then nothing was done, as after a `JournalFailed`.
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
        """Return which rows SQLite cannot hold, by their places, and why; changes nothing."""
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
        """What the rows take, without the room that deleted ones have left."""
        return PAGE_BYTES * (self._pragma("page_count") - self._pragma("freelist_count"))

    @property
    def size_bytes(self) -> int:
        return PAGE_BYTES * self._pragma("page_count")

    def check_room(self, more_bytes: int, beside_bytes: int = 0) -> None:
        """Raise `JournalFailed` if it is too full to begin something new that takes `more_bytes` at once.

        `beside_bytes` is what other files hold that its limit is for too.
        """
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
        """Return the room that deleted rows have left to the disk."""
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
        if self._pragma("user_version") == 0:  # before WAL mode, so that the file's own header says what it is
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
    """Turn SQLite's errors into ours; that the file is damaged is a `ConfigError` when a broker starts with it."""
    try:
        yield
    except sqlite3.Error as error:
        if at_start and _is_damage(error):
            raise ConfigError(_failure(path, what, error).message, key="journal") from error
        raise _failure(path, what, error) from error


def _is_damage(error: sqlite3.Error) -> bool:
    """Tell an error that says what is in the file, from one that says what the disk does."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED


def _failure(path: Path, what: str, error: sqlite3.Error) -> JournalFailed:
    if _is_damage(error):
        message = (
            f"the journal {path} is damaged ({error}): keep a copy of it and of the files beside it, and make way for "
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
        """Make the file unless it is there; return whether it is there now."""
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
        """Remove the file; return whether it was there."""
        try:
            self._path.unlink()
        except OSError:
            return False
        return True


def _is_full(error: BaseException | None) -> bool:
    """Return whether the disk had no room: SQLite calls it an I/O error too, for the file of its index."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def lock_journal(path: Path, *, create: bool = False) -> int:
    """Open a journal's file and lock it against brokers until the descriptor that is returned is closed."""
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
    """Lock an open journal; return whether no other process has it, on NFS including other machines."""
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
    """Raise `ConfigError` unless an open file is empty, or was made as a journal of one of these kinds."""
    header = os.pread(descriptor, _ID_PLACE + 4, 0)
    found = int.from_bytes(header[_ID_PLACE:], "big")
    if header and (not header.startswith(_MAGIC) or found not in application_ids):
        raise ConfigError(
            f"{path} is not a journal of this broker, and is left unchanged; name another file", key="journal"
        )
