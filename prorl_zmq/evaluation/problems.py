"""The problems of an evaluation: the rows of a data file, each with the job template of its samples.

`tasks.loading` converts rows to jobs. A row may be a whole job, as for `prorl submit`: its sampling and limits hold
unless an option overrides them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import ConfigError, InvalidJob, InvalidRecord
from ..tasks.loading import load_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ..stages.handler import AgentHandler
    from ..tasks.row_format import RowFormat
    from ..wire.messages.jobs import Job

NAME_LIMIT = 120
SHOWN_ERRORS = 3


@dataclass(frozen=True, slots=True)
class Problem:
    name: str
    """The row's own name, or its number. Text of the file: clean it before it is shown."""
    line: int
    row_format: str
    job: Job
    """The template of its samples, without ids and seeds."""


def load_problems(
    path: Path,
    row_formats: Sequence[RowFormat],
    *,
    row_format: str = "",
    task: str = "",
    limit: int = 0,
    options: Mapping[str, Any] | None = None,
) -> list[Problem]:
    problems: list[Problem] = []
    wrong: list[str] = []
    for row in load_rows(path, task=task, row_format=row_format, row_formats=row_formats, options=options):
        if isinstance(row, InvalidRecord):
            wrong.append(row.message)
            continue
        name = " ".join(row.name.split())[:NAME_LIMIT] or str(row.number)
        problems.append(Problem(name, row.number, row.row_format, row.job))
        if len(problems) == limit:
            break
    if wrong:
        quoted = "; ".join(wrong[:SHOWN_ERRORS])
        more = f"; and {len(wrong) - SHOWN_ERRORS} more" if len(wrong) > SHOWN_ERRORS else ""
        raise ConfigError(f"{quoted}{more} (`prorl tasks validate {path}` lists all that is wrong)", key="file")
    return _with_own_names(problems)


def with_models(problems: Sequence[Problem], model_name: str, models: Mapping[str, str]) -> list[Problem]:
    """Return problems whose jobs are of a model, unless its name is empty, and talk to these models too."""

    def changed(job: Job) -> Job:
        return msgspec.structs.replace(job, model=model_name or job.model, models={**job.models, **models})

    return [replace(problem, job=changed(problem.job)) for problem in problems]


def check_instances(problems: Sequence[Problem], handlers: Mapping[str, AgentHandler[Any]], path: Path) -> Counter[str]:
    """Check the instances of installed tasks; return how many problems miss what, such as an image."""
    lacks: Counter[str] = Counter()
    for problem in problems:
        handler = handlers.get(problem.job.task)
        if handler is not None:
            try:
                instance = handler.parse_instance(problem.job)
            except InvalidJob as error:
                raise ConfigError(f"{path}, line {problem.line}: {error.message}", key=error.field) from error
            lacks[handler.lacks(problem.job, instance)] += 1
    del lacks[""]
    return lacks


def checksum(path: Path) -> str:
    """Return the digest of a file, or of the instances of a folder's tasks."""
    if path.is_dir():
        rows = hashlib.sha256()
        for row in load_rows(path):
            rows.update(msgspec.msgpack.encode(row.message if isinstance(row, InvalidRecord) else row.job.instance))
        return rows.hexdigest()
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", key="file") from error


def _with_own_names(problems: list[Problem]) -> list[Problem]:
    """Append its line to the name of a problem if an earlier one has this name; more rows change no name."""
    names: set[str] = set()
    own = []
    for problem in problems:
        taken = problem.name in names
        names.add(problem.name)
        own.append(replace(problem, name=f"{problem.name} (line {problem.line})") if taken else problem)
    return own
