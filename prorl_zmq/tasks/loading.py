"""`load_jobs`: jobs from a data file, or from a folder of Harbor tasks.

A row has a known row format (`ROW_FORMATS`, or those of other handlers), is an instance of a named `task`, or is a
whole job, as for `prorl submit`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import ConfigError, InvalidRecord
from ..wire.messages.jobs import Job, PhaseLimits
from .harbor_folder import find_task_folders, read_task_folder
from .long_integers import long_integers
from .records import read_records
from .row_format import Record, RowFormat, recognise, unchecked, unique
from .row_formats import ROW_FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

JOB_FORMAT = "job"
"""The row format's name of whole jobs."""
HARBOR = "harbor"
"""The task and the row format of task folders."""
NAMES = ("instance_id", "task_id", "question_id", "problem_id", "unique_id", "id", "name")
"""Columns that may name a row, in order of preference."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a data file as a job."""

    number: int
    """Its line, from 1; of parquet, its row; of task folders, its place in their order."""
    name: str
    """The row's name in its data set; else its number. Of a task folder, its path below the given one."""
    row_format: str
    job: Job


def load_jobs(
    path: Path | str,
    *,
    task: str = "",
    row_format: str = "",
    row_formats: Sequence[RowFormat] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Iterator[Job]:
    """Yield a job for each row of a data file, in the file's order.

    Args:
        path: `.jsonl`, `.parquet`, `.csv`, or `.json` with a list (see `records`); or a folder of Harbor tasks, or one
            such task, whose jobs come in the order of their paths.
        task: consider row formats of this task only; empty: of all. Where none is known for the task, the rows are
            taken to be its instances.
        row_format: the name of the row format of all rows; empty: recognise it row by row, by the columns.
        row_formats: the known ones; None: those of the package.
        options: fields of all instances, which replace those of the rows, such as `{"tools": ["ipython"]}`.

    Raises:
        InvalidRecord: a row has no known row format, or is wrong; `line` and `field` say where.
        ConfigError: the file cannot be read, is empty, or no row format has that name.
    """
    known = ROW_FORMATS if row_formats is None else row_formats
    if task and not row_format and not any(each.task == task for each in known):
        known = (unchecked(task),)
    for row in load_rows(path, task=task, row_format=row_format, row_formats=known, options=options):
        if isinstance(row, InvalidRecord):
            raise row
        yield row.job


def load_rows(
    path: Path | str,
    *,
    task: str = "",
    row_format: str = "",
    row_formats: Sequence[RowFormat] = ROW_FORMATS,
    options: Mapping[str, Any] | None = None,
) -> Iterator[Row | InvalidRecord]:
    """Yield each row with its job, or the error that it has; arguments as of `load_jobs`."""
    path = Path(path)
    if path.is_dir():
        if task not in ("", HARBOR) or row_format not in ("", HARBOR):
            raise ConfigError(f"{path} is a folder, so its rows are Harbor tasks, of task and row format {HARBOR}")
        yield from _task_folders(path, options or {})
        return
    considered = chosen(row_formats, task, row_format)
    empty = True
    for number, record in read_records(path):
        empty = False
        try:
            if isinstance(record, InvalidRecord):
                raise record
            yield read_row(number, record, considered, task, row_format, options or {})
        except InvalidRecord as error:
            yield InvalidRecord(f"{path.name}, line {number}: {error.message}", **{**error.fields, "line": number})
    if empty:
        raise ConfigError(f"{path} has no rows in it", key="file")


def _task_folders(root: Path, options: Mapping[str, Any]) -> Iterator[Row | InvalidRecord]:
    for number, folder in enumerate(find_task_folders(root), start=1):
        name = root.resolve().name if folder == root else folder.relative_to(root).as_posix()
        try:
            read = read_task_folder(folder)
            instance: dict[str, Any] = msgspec.to_builtins(read.task)
            yield Row(number, name, HARBOR, Job(task=HARBOR, instance={**instance, **options}, limits=read.limits()))
        except InvalidRecord as error:
            yield InvalidRecord(f"{name}: {error.message}", **{**error.fields, "line": number})


def chosen(row_formats: Iterable[RowFormat], task: str, name: str) -> tuple[RowFormat, ...]:
    """Return the row formats of a task, or the one with a name."""
    known = unique(row_formats)
    kept = tuple(each for each in known if task in ("", each.task) and name in ("", each.name))
    if name:
        kept = tuple(replace(each, fits=None) for each in kept)
    if not kept and (named := [each for each in known if each.name == name]):
        raise ConfigError(f"the row format {name} is of task {named[0].task}, not of {task}", key="row_format")
    if not kept:
        there = ", ".join(sorted({each.task if task else each.name for each in known}))
        what = f"task {task}" if task else f"name {name}"
        raise ConfigError(f"there is no row format of {what}; there are {there}", key="row_format")
    return kept


def read_row(
    number: int,
    record: Record,
    row_formats: Sequence[RowFormat],
    task: str = "",
    format_name: str = "",
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Row:
    """Return one row with its job, or raise `InvalidRecord`."""
    name = next((str(record[column]) for column in NAMES if record.get(column) not in (None, "")), str(number))
    if {"task", "instance"} <= record.keys():
        return Row(number, name, JOB_FORMAT, _whole_job(record, task, format_name, options))
    row_format = None
    try:
        row_format = recognise(record, row_formats)
        with long_integers():
            instance: dict[str, Any] = msgspec.to_builtins(row_format.convert(record))
    except InvalidRecord:
        raise
    except Exception as error:  # the row format may be of another package
        what = f"row format {row_format.name}" if row_format is not None else "a row format that looked at it"
        raise InvalidRecord(f"{what} raised {type(error).__name__}: {error}") from error
    job = Job(task=row_format.task, instance={**instance, **options}, limits=row_format.limits or PhaseLimits())
    try:
        msgspec.msgpack.encode(job)
    except (UnicodeError, OverflowError, ValueError, RecursionError) as error:
        raise InvalidRecord(f"it cannot be sent: {error}") from error
    return Row(number, name, row_format.name, job)


def _whole_job(record: Record, task: str, format_name: str, options: Mapping[str, Any]) -> Job:
    try:
        job = msgspec.convert(dict(record), Job)
    except msgspec.ValidationError as error:
        raise InvalidRecord(f"it is not a job: {error}", field="instance") from error
    if format_name:
        raise InvalidRecord(f"it is a whole job, not of the row format {format_name}", field="instance")
    if task not in ("", job.task):
        raise InvalidRecord(f"it is a job of task {job.task}, not of {task}", field="task")
    return msgspec.structs.replace(job, instance={**job.instance, **options})
