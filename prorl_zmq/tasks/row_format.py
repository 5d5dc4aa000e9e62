"""A row format: the columns of one published data set, and the instance that a row becomes.

Formats are recognised row by row by their required columns, so a file may mix them. Pure: `records.py` reads files.
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
"""How many of a row's columns an error names."""
ALIKE = 0.75
"""From which likeness on, by `difflib`, a column's name may be a misspelling of another."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How the rows of one published data set become instances of a task."""

    name: str
    """As `prorl tasks list` names it, such as `swe-bench`."""
    task: str
    """The task whose instances the rows become."""
    about: str
    """Which data sets have this format, for people."""
    required: frozenset[str]
    """A row with all of these columns has this format, unless an earlier row format fits as well."""
    convert: Callable[[Record], Any]
    """Makes the instance of a row: a Struct, or plain data.

    Raises:
        InvalidRecord: a column is missing or wrong; `field` names it.
    """
    fits: Callable[[Record], bool] | None = None
    """A further condition, where two data sets have the same columns."""
    limits: PhaseLimits | None = None
    """The limits of the jobs that the rows become; None: a job's default ones."""


def recognise(record: Record, row_formats: Iterable[RowFormat]) -> RowFormat:
    """Return the first row format that fits a row; the error names the nearest, if the row has some of its columns."""
    row_formats = tuple(row_formats)
    for row_format in row_formats:
        if row_format.required <= record.keys() and (row_format.fits is None or row_format.fits(record)):
            return row_format
    has = ", ".join(sorted(map(str, record))[:SHOWN_COLUMNS]) or "no columns"
    raise InvalidRecord(f"it has no known row format: it has {has}; {_nearest(record, row_formats)}")


def _nearest(record: Record, row_formats: Iterable[RowFormat]) -> str:
    """Describe the row format of which a row lacks the fewest columns; a missing column may be there, misspelt."""
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
    """Drop the row formats whose name an earlier one has."""
    known: dict[str, RowFormat] = {}
    for row_format in row_formats:
        known.setdefault(row_format.name, row_format)
    return tuple(known.values())


def formats_of(task: str, limits: PhaseLimits | None = None) -> Callable[..., RowFormat]:
    """Return what makes the row formats of a task."""

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

    Where no field is required, a row has no other columns than these; else it would take all that no other one knows.
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
    """Return the row format of instances of a task that is not known here; the service checks them."""
    return RowFormat(task, task, f"instances of {task}, not checked", frozenset(), dict)


def text(record: Record, name: str, default: str | None = None) -> str:
    """Return a column of text, which may be missing or null if there is a default."""
    value = record.get(name)
    if value is None:
        if default is None:
            raise InvalidRecord(f"{name} is missing", field=name)
        return default
    if not isinstance(value, str):
        raise InvalidRecord(f"{name} must be text, and is {_kind(value)}", field=name)
    return value


def filled(record: Record, name: str) -> str:
    """Return a column of text that must not be blank."""
    value = text(record, name)
    if not value.strip():
        raise InvalidRecord(f"{name} is empty", field=name)
    return value


def texts(record: Record, name: str, default: list[str] | None = None) -> list[str]:
    """Return a column that is a list of texts, or JSON text of one."""
    value = record.get(name)
    if value is None and default is not None:
        return default
    value = parsed_json(record, name)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InvalidRecord(f"{name} must be a list of texts", field=name)
    return value


def parsed_json(record: Record, name: str) -> Any:
    """Return a column that is plain data, or JSON text of it; missing or null is an error."""
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
    """Return a column that is a map, or JSON text of one; `content` is what it should have, for the error."""
    value = parsed_json(record, name)
    if not isinstance(value, Mapping):
        raise InvalidRecord(f"{name} must be a map {content}", field=name)
    return value


def _kind(value: Any) -> str:
    names = {bool: "a truth value", int: "a number", float: "a number", list: "a list", dict: "a map"}
    return names.get(type(value), f"of type {type(value).__name__}")
