"""`RowFormat`: the columns of one published data set, and how a row becomes an instance.

A row's format is recognised by its columns, so a file may mix formats. No I/O: `records.py` reads files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import InvalidRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..wire.messages.jobs import PhaseLimits

Record = Mapping[str, Any]
"""One row of a data file, by column."""
SHOWN_COLUMNS = 12
"""Columns that an error names."""
ALIKE = 0.75
"""`difflib` ratio from which a column's name may be a misspelling."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How the rows of one published data set become instances of a task."""

    name: str
    """As `prorl tasks list` names it, such as `swe-bench`."""
    task: str
    """The task whose instances the rows become."""
    about: str
    """The data sets that have this format, for people."""
    required: frozenset[str]
    """A row with all of these columns has this format, unless an earlier format fits."""
    convert: Callable[[Record], Any]
    """Converts a row to an instance: a Struct, or plain data.

    Raises:
        InvalidRecord: a column is missing or invalid; `field` names it."""
    fits: Callable[[Record], bool] | None = None
    """A further condition, for data sets with the same columns."""
    limits: PhaseLimits | None = None
    """Limits of the rows' jobs; None: the defaults."""


def recognise(record: Record, row_formats: Iterable[RowFormat]) -> RowFormat:
    """Return the first row format that fits a row.

    Raises:
        InvalidRecord: none fits; the message names the nearest.
    """
    row_formats = tuple(row_formats)
    for row_format in row_formats:
        if row_format.required <= record.keys() and (row_format.fits is None or row_format.fits(record)):
            return row_format
    has = ", ".join(sorted(map(str, record))[:SHOWN_COLUMNS]) or "no columns"
    raise InvalidRecord(f"it has no known row format: it has {has}; {_nearest(record, row_formats)}")


def _nearest(record: Record, row_formats: Iterable[RowFormat]) -> str:
    """Describe the row format of which fewest columns are missing; a missing column may be misspelt."""
    columns = [str(column) for column in record]

    def spelt(column: str, row_format: RowFormat) -> list[str]:
        return get_close_matches(
            column, [each for each in columns if each not in row_format.required], n=1, cutoff=ALIKE
        )

    def lacks(row_format: RowFormat) -> tuple[float, int]:
        missing = [column for column in row_format.required if column not in record]
        unknown = sum(not spelt(column, row_format) for column in missing)
        return unknown / max(1, len(row_format.required)), len(missing)

    nearest = min(
        (row_format for row_format in row_formats if not row_format.required <= record.keys()), key=lacks, default=None
    )
    if nearest is None or lacks(nearest)[0] == 1:
        return "none is near it (`prorl tasks list` shows all)"
    missing = sorted(nearest.required - record.keys())
    wanted = [f"{column} (is that {found[0]}?)" if (found := spelt(column, nearest)) else column for column in missing]
    return f"the nearest, {nearest.name}, needs {', '.join(wanted)} too"


def unique(row_formats: Iterable[RowFormat]) -> tuple[RowFormat, ...]:
    """Return the row formats without later ones of the same name."""
    known: dict[str, RowFormat] = {}
    for row_format in row_formats:
        known.setdefault(row_format.name, row_format)
    return tuple(known.values())


def formats_of(task: str, limits: PhaseLimits | None = None) -> Callable[..., RowFormat]:
    """Return a constructor of a task's row formats."""

    def row_format(
        name: str,
        about: str,
        required: Iterable[str],
        convert: Callable[[Record], Any],
        fits: Callable[[Record], bool] | None = None,
    ) -> RowFormat:
        return RowFormat(name, task, about, frozenset(required), convert, fits, limits)

    return row_format


def native(task: str, instance_type: type[msgspec.Struct]) -> RowFormat:
    """Return the row format of rows whose columns are the fields of a task's instances.

    If no field is required, a row may have no other columns, or this format would take every unknown row.
    """
    fields = msgspec.structs.fields(instance_type)
    required = frozenset(field.encode_name for field in fields if field.required)
    known = frozenset(field.encode_name for field in fields)

    def convert(record: Record) -> msgspec.Struct:
        try:
            return msgspec.convert(dict(record), instance_type)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at `$.")
            field = where.rstrip("`") or what.partition("field `")[2].rstrip("`")
            raise InvalidRecord(str(error), field=field) from error

    fits = None if required else lambda record: bool(record) and record.keys() <= known
    return RowFormat(task, task, f"the fields of a {task} instance", required, convert, fits)


def unchecked(task: str) -> RowFormat:
    """Return the row format for an unknown task, whose instances the service checks."""
    return RowFormat(task, task, f"instances of {task}, not checked", frozenset(), dict)


def text(record: Record, name: str, default: str | None = None) -> str:
    """Return a column of text, which may be missing if there is a default."""
    value = record.get(name)
    if value is None:
        if default is None:
            raise InvalidRecord(f"{name} is missing", field=name)
        return default
    if not isinstance(value, str):
        raise InvalidRecord(f"{name} must be text, and is {_kind(value)}", field=name)
    return value


def filled(record: Record, name: str) -> str:
    """Return a column of text that is not blank."""
    value = text(record, name)
    if not value.strip():
        raise InvalidRecord(f"{name} is empty", field=name)
    return value


def texts(record: Record, name: str, default: list[str] | None = None) -> list[str]:
    """Return a column of a list of texts, or of its JSON text."""
    value = record.get(name)
    if value is None and default is not None:
        return default
    value = parsed_json(record, name)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InvalidRecord(f"{name} must be a list of texts", field=name)
    return value


def parsed_json(record: Record, name: str) -> Any:
    """Return a column of plain data or of JSON text; a missing one is an error."""
    value = record.get(name)
    if value is None:
        raise InvalidRecord(f"{name} is missing", field=name)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidRecord(f"{name} is not JSON: {error}", field=name) from error


def mapping(record: Record, name: str, content: str) -> Mapping[str, Any]:
    """Return a column of a map or of its JSON text; `content` describes the map in errors."""
    value = parsed_json(record, name)
    if not isinstance(value, Mapping):
        raise InvalidRecord(f"{name} must be a map {content}", field=name)
    return value


def _kind(value: Any) -> str:
    names = {bool: "a truth value", int: "a number", float: "a number", list: "a list", dict: "a map"}
    return names.get(type(value), f"of type {type(value).__name__}")
