"""Jobs from a data file: each row becomes an instance of the task whose form it has.

Three kinds of rows: of a published data set (`FORMS`, or those of your own handlers), instances as they are (their
columns are the instance's fields, and `task` is named by the caller), and whole jobs as `prorl submit` takes them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import ConfigError, InvalidRecord
from ..wire.messages.jobs import Job, PhaseLimits
from .long_integers import long_integers
from .records import read_records
from .row_format import Record, RowFormat, as_it_is, recognise, unique
from .row_formats import FORMS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

JOB_FORM = "job"
"""The form of rows that are whole jobs."""
NAMES = ("instance_id", "task_id", "question_id", "problem_id", "unique_id", "id", "name")
"""Columns that may name a row, the best first."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a data file that became a job."""

    number: int
    """Its line, from 1; of parquet, its row."""
    name: str
    """What its data set calls it; of a row without a name, its number."""
    form: str
    job: Job


def load_jobs(
    path: Path | str,
    *,
    task: str = "",
    form: str = "",
    forms: Sequence[RowFormat] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Iterator[Job]:
    """Give a job for each row of a data file, in its order, one at a time.

    Args:
        path: `.jsonl`, `.parquet`, `.csv`, or `.json` with a list (see `records`).
        task: consider forms of this task only; empty: of all. For a task without forms that are known, rows are
            taken to be its instances as they are.
        form: take all rows to have this form; empty: see which one each has.
        forms: those that are known; None: those of the package.
        options: fields of all instances, in the place of what the rows say of them, such as `{"tools": ["ipython"]}`.

    Raises:
        InvalidRecord: a row has no known form, or is wrong (`line`, `field`).
        ConfigError: the file cannot be read, is empty, or no form has that name.
    """
    known = FORMS if forms is None else forms
    if task and not form and not any(each.task == task for each in known):
        known = (as_it_is(task),)
    for row in load_rows(path, task=task, form=form, forms=known, options=options):
        if isinstance(row, InvalidRecord):
            raise row
        yield row.job


def load_rows(
    path: Path | str,
    *,
    task: str = "",
    form: str = "",
    forms: Sequence[RowFormat] = FORMS,
    options: Mapping[str, Any] | None = None,
) -> Iterator[Row | InvalidRecord]:
    """Give what became of each row; a wrong one as the error that says so (see `load_jobs`).

    Raises:
        ConfigError: the file cannot be read, is empty, or no form has that name.
    """
    path = Path(path)
    considered = chosen(forms, task, form)
    empty = True
    for number, record in read_records(path):
        empty = False
        try:
            if isinstance(record, InvalidRecord):
                raise record
            yield _row(number, record, considered, task, form, options or {})
        except InvalidRecord as error:
            yield InvalidRecord(f"{path.name}, line {number}: {error.message}", **{**error.fields, "line": number})
    if empty:
        raise ConfigError(f"{path} has no rows in it", key="file")


def chosen(forms: Iterable[RowFormat], task: str, name: str) -> tuple[RowFormat, ...]:
    """Give the forms of a task, or the one of a name.

    Raises:
        ConfigError: there is none.
    """
    known = unique(forms)
    kept = tuple(each for each in known if task in ("", each.task) and name in ("", each.name))
    if name:
        kept = tuple(replace(each, fits=None) for each in kept)
    if not kept and (named := [each for each in known if each.name == name]):
        raise ConfigError(f"the form {name} is of task {named[0].task}, not of {task}", key="form")
    if not kept:
        there = ", ".join(sorted({each.task if task else each.name for each in known}))
        what = f"task {task}" if task else f"name {name}"
        raise ConfigError(f"there is no form of {what}; there are {there}", key="form")
    return kept


def _row(
    number: int, record: Record, forms: Sequence[RowFormat], task: str, form_name: str, options: Mapping[str, Any]
) -> Row:
    name = next((str(record[column]) for column in NAMES if record.get(column) not in (None, "")), str(number))
    if {"task", "instance"} <= record.keys():
        return Row(number, name, JOB_FORM, _whole_job(record, task, form_name, options))
    form = None
    try:
        form = recognise(record, forms)
        with long_integers():
            instance: dict[str, Any] = msgspec.to_builtins(form.convert(record))
    except InvalidRecord:
        raise
    except Exception as error:  # of a form that somebody else wrote
        what = f"form {form.name}" if form is not None else "a form that looked at it"
        raise InvalidRecord(f"{what} raised {type(error).__name__}: {error}") from error
    job = Job(task=form.task, instance={**instance, **options}, limits=form.limits or PhaseLimits())
    try:
        msgspec.msgpack.encode(job)
    except (UnicodeError, OverflowError, ValueError, RecursionError) as error:
        raise InvalidRecord(f"it cannot be sent: {error}") from error
    return Row(number, name, form.name, job)


def _whole_job(record: Record, task: str, form_name: str, options: Mapping[str, Any]) -> Job:
    try:
        job = msgspec.convert(dict(record), Job)
    except msgspec.ValidationError as error:
        raise InvalidRecord(f"it is no job: {error}", field="instance") from error
    if form_name:
        raise InvalidRecord(f"it is a whole job, not of the form {form_name}", field="instance")
    if task not in ("", job.task):
        raise InvalidRecord(f"it is a job of task {job.task}, not of {task}", field="task")
    return msgspec.structs.replace(job, instance={**job.instance, **options})
