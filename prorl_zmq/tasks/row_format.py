"""A form: how the rows of one published data set look, and what instance of a task such a row becomes.

A form is told by the columns that its rows must have. Which form a row has is decided row by row, so a file may mix
them. Pure: rows in, instances out; the files are read elsewhere (`records.py`).
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
"""How alike, by `difflib`, two names of columns are that may be meant as one."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """One published data set's rows."""

    name: str
    """As `prorl tasks list` names it, such as `swe-bench`."""
    task: str
    """The task whose instances they become."""
    about: str
    """Which data sets have it, for people."""
    required: frozenset[str]
    """The columns that tell it: a row with all of them has this form, unless a form before it fits as well."""
    convert: Callable[[Record], Any]
    """Makes the instance of a row: a Struct, or plain data.

    Raises:
        InvalidRecord: a column is not what the form says; `field` names it.
    """
    fits: Callable[[Record], bool] | None = None
    """What else tells it, where two data sets have the same columns: a row for which this is false has another form."""
    limits: PhaseLimits | None = None
    """Of the jobs that its rows become; None: a job's own."""


def recognise(record: Record, forms: Iterable[RowFormat]) -> RowFormat:
    """Give the first form that a row fits.

    Raises:
        InvalidRecord: it fits none; the message names the form that it comes closest to, if it has a part of one.
    """
    forms = tuple(forms)
    for form in forms:
        if form.required <= record.keys() and (form.fits is None or form.fits(record)):
            return form
    has = ", ".join(sorted(map(str, record))[:SHOWN_COLUMNS]) or "no columns"
    raise InvalidRecord(f"it has no form that is known: it has {has}; {_nearest(record, forms)}")


def _nearest(record: Record, forms: Iterable[RowFormat]) -> str:
    """Say which form a row comes closest to: the one of which it lacks least; a column may be there, misspelt."""
    columns = [str(column) for column in record]

    def spelt(column: str, form: RowFormat) -> list[str]:
        return get_close_matches(column, [each for each in columns if each not in form.required], n=1, cutoff=ALIKE)

    def lacks(form: RowFormat) -> tuple[float, int]:
        missing = [column for column in form.required if column not in record]
        unknown = sum(not spelt(column, form) for column in missing)
        return unknown / max(1, len(form.required)), len(missing)

    nearest = min((form for form in forms if not form.required <= record.keys()), key=lacks, default=None)
    if nearest is None or lacks(nearest)[0] == 1:
        return "none is near it (`prorl tasks list` shows all)"
    missing = sorted(nearest.required - record.keys())
    wanted = [f"{column} (is that {found[0]}?)" if (found := spelt(column, nearest)) else column for column in missing]
    return f"the nearest, {nearest.name}, needs {', '.join(wanted)} too"


def unique(forms: Iterable[RowFormat]) -> tuple[RowFormat, ...]:
    """Give forms without those whose name an earlier one has."""
    known: dict[str, RowFormat] = {}
    for form in forms:
        known.setdefault(form.name, form)
    return tuple(known.values())


def native(task: str, instance_type: type[msgspec.Struct]) -> RowFormat:
    """Give the form of rows whose columns are the fields of the task's own instances."""
    required = frozenset(field.encode_name for field in msgspec.structs.fields(instance_type) if field.required)

    def convert(record: Record) -> msgspec.Struct:
        try:
            return msgspec.convert(dict(record), instance_type)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at `$.")
            field = where.rstrip("`") or what.partition("field `")[2].rstrip("`")
            raise InvalidRecord(str(error), field=field) from error

    return RowFormat(task, task, f"the fields of a {task} instance", required, convert)


def as_it_is(task: str) -> RowFormat:
    """Give the form of rows that are instances of a task that is not known here; the service checks them."""

    def convert(record: Record) -> Any:
        return dict(record)

    return RowFormat(task, task, f"instances of {task}, not checked", frozenset(), convert)


# What converting functions share --------------------------------------------------------------------------------------


def text(record: Record, name: str, default: str | None = None) -> str:
    """Give a column of text.

    Raises:
        InvalidRecord: it is missing or null and there is no default, or it is not text.
    """
    value = record.get(name)
    if value is None:
        if default is None:
            raise InvalidRecord(f"{name} is missing", field=name)
        return default
    if not isinstance(value, str):
        raise InvalidRecord(f"{name} must be text, and is {_kind(value)}", field=name)
    return value


def filled(record: Record, name: str) -> str:
    """Give a column of text that must not be empty.

    Raises:
        InvalidRecord: see `text`; or it is blank.
    """
    value = text(record, name)
    if not value.strip():
        raise InvalidRecord(f"{name} is empty", field=name)
    return value


def texts(record: Record, name: str, default: list[str] | None = None) -> list[str]:
    """Give a column that is a list of texts, as it is or written as JSON.

    Raises:
        InvalidRecord: it is missing and there is no default, or it is something else.
    """
    value = record.get(name)
    if value is None and default is not None:
        return default
    value = parsed_json(record, name)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InvalidRecord(f"{name} must be a list of texts", field=name)
    return value


def parsed_json(record: Record, name: str) -> Any:
    """Give a column that is plain data, or JSON text of it.

    Raises:
        InvalidRecord: it is missing or null, or text that is not JSON.
    """
    value = record.get(name)
    if value is None:
        raise InvalidRecord(f"{name} is missing", field=name)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidRecord(f"{name} is not JSON: {error}", field=name) from error


def _kind(value: Any) -> str:
    names = {bool: "a truth value", int: "a number", float: "a number", list: "a list", dict: "a map"}
    return names.get(type(value), f"of type {type(value).__name__}")
