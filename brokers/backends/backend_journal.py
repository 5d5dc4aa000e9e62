"""`BackendJournal`: one row per backend in an SQLite file (see `journal_file`), and one per model's weights.

The file is written when a registration, a drained flag or a weight version changes, but not for assignments, which
stage processes report to a restarted broker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from ...errors import ConfigError
from ..journal.journal_file import JournalFile, failures
from .backend_records import BackendRecord, WeightsRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

Record = TypeVar("Record")

APPLICATION_ID = 0x70726262
SCHEMA_VERSION = 2
TABLES = (
    "CREATE TABLE backends (number INTEGER PRIMARY KEY, backend_id TEXT UNIQUE NOT NULL, record BLOB NOT NULL)",
    "CREATE TABLE services (service_id TEXT NOT NULL)",
    "CREATE TABLE weights (record BLOB NOT NULL)",
)
LIMIT_BYTES = 2**28
"""Largest file size, far above what the remembered backends need."""

_encode = msgspec.msgpack.Encoder().encode
_record = msgspec.msgpack.Decoder(BackendRecord).decode
_weights = msgspec.msgpack.Decoder(WeightsRecord).decode


class BackendJournal:
    def __init__(self, path: Path) -> None:
        self._file = JournalFile(path, APPLICATION_ID, SCHEMA_VERSION, TABLES, LIMIT_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def load(self) -> list[BackendRecord]:
        """Return all backends in the order of their first registration."""
        problem = "holds a backend that cannot be read ({}); remove the file, and add again what was added by hand"
        return self._read("SELECT record FROM backends ORDER BY number", _record, problem)

    def load_weights(self) -> list[WeightsRecord]:
        """Return the wanted weights of the models that were updated."""
        return self._read(
            "SELECT record FROM weights", _weights, "does not say which weights are wanted ({}); remove the file"
        )

    def _read(self, query: str, decode: Callable[[bytes], Record], problem: str) -> list[Record]:
        try:
            with failures(self._file.path, "read", at_start=True):
                return [decode(row[0]) for row in self._file.connection.execute(query)]
        except (msgspec.MsgspecError, TypeError) as error:
            raise ConfigError(f"{self._file.path} {problem.format(error)}", key="journal") from error

    def begin_service(self, service_id: str) -> bool:
        """Record the id of this run of `prorl serve` (may be empty); return whether an earlier run used the file."""
        with self._file.transaction() as connection:
            before = connection.execute("SELECT service_id FROM services").fetchone()
            connection.execute("DELETE FROM services")
            connection.execute("INSERT INTO services VALUES (?)", (service_id,))
        return before is not None and before[0] != service_id

    def write(
        self, changes: Mapping[str, BackendRecord | None], weights: Iterable[WeightsRecord] | None = None
    ) -> None:
        """Write changed backends (None: delete) and the weights of all models (None: unchanged), all or nothing."""
        with self._file.transaction() as connection:
            if weights is not None:
                connection.execute("DELETE FROM weights")
                connection.executemany("INSERT INTO weights VALUES (?)", [(_encode(record),) for record in weights])
            for backend_id, record in changes.items():
                if record is None:
                    connection.execute("DELETE FROM backends WHERE backend_id = ?", (backend_id,))
                else:
                    connection.execute(
                        "INSERT INTO backends (backend_id, record) VALUES (?, ?) "
                        "ON CONFLICT (backend_id) DO UPDATE SET record = excluded.record",
                        (backend_id, _encode(record)),
                    )
