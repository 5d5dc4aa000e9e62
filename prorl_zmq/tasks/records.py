"""`read_records`: the rows of a data file, one at a time: JSON Lines, parquet (`pyarrow`), CSV, or one JSON list.

A file may exceed memory, since only the current row or batch is held; a JSON list is read whole.
"""

from __future__ import annotations

import csv
import re
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import ConfigError, InvalidRecord
from ..system.installation import how_to_install

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .row_format import Record

_LINE_END = re.compile(r"\r\n?|\n")
CSV_FIELD_LIMIT = 16 * 2**20
BATCH_ROWS = 64
"""Rows of parquet in memory; one competition problem may have 100 MB of tests."""


def read_records(path: Path) -> Iterator[tuple[int, Record | InvalidRecord]]:
    """Yield the rows of a file with their line numbers, from 1; for parquet and lists, row numbers.

    An unreadable row is yielded as its error.
    """
    readers: dict[str, Callable[[Path], Iterator[tuple[int, Record | InvalidRecord]]]] = {
        ".parquet": _parquet,
        ".jsonl": _json_lines,
        ".ndjson": _json_lines,
        ".json": _json_lines,
        ".csv": _csv,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        if not path.exists():
            raise ConfigError(f"{path} does not exist", key="file")
        raise ConfigError(f"{path}: a data file ends in .jsonl, .json, .parquet or .csv", key="file")
    try:
        yield from reader(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}", key="file") from error


def _json_lines(path: Path) -> Iterator[tuple[int, Record | InvalidRecord]]:
    decoder = msgspec.json.Decoder(dict[str, Any])
    with path.open(encoding="utf-8-sig") as lines:
        if lines.read(1024).lstrip().startswith("["):
            yield from _json_list(path)
            return
        lines.seek(0)
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield number, decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                    yield number, InvalidRecord(f"not a JSON object: {error}", line=number)


def _json_list(path: Path) -> Iterator[tuple[int, Record | InvalidRecord]]:
    try:
        rows = msgspec.json.decode(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), type=list[Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{path}: no JSON list, nor one JSON object per line: {error}", key="file") from error
    for number, row in enumerate(rows, start=1):
        yield number, row if isinstance(row, dict) else InvalidRecord("not a JSON object", line=number)


def _csv(path: Path) -> Iterator[tuple[int, Record | InvalidRecord]]:
    csv.field_size_limit(CSV_FIELD_LIMIT)
    with path.open(encoding="utf-8-sig", newline="") as lines:
        try:
            rows = csv.DictReader(lines, strict=True)
            for row in rows:
                fields = chain.from_iterable(each if isinstance(each, list) else [each or ""] for each in row.values())
                number = rows.line_num - sum(len(_LINE_END.findall(field)) for field in fields)
                if None in row or None in row.values():
                    yield number, InvalidRecord("it has not as many fields as the first line has names", line=number)
                else:
                    yield number, row
        except csv.Error as error:
            raise ConfigError(f"{path}: no CSV that can be read: {error}", key="file") from error


def _parquet(path: Path) -> Iterator[tuple[int, Record | InvalidRecord]]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"parquet needs pyarrow: {how_to_install('tasks')}", key="file") from error
    try:
        with parquet.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=BATCH_ROWS)
            yield from enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), start=1)
    except (pa.ArrowException, OverflowError, ValueError) as error:
        raise ConfigError(f"{path}: no parquet that can be read: {error}", key="file") from error
