"""`prorl tasks`: known row formats, errors in a data file, and the images that it needs."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError, InvalidJob, InvalidRecord, ProrlError
from ..system.logs import one_line, say
from .harbor_oracle import prove_tasks
from .images import BaseImages, image_store
from .make_swe import make_swe
from .options import Images, RowFormatName, TaskModule, TaskName
from .tables import console, print_table, text
from .task_folders import images_of_folders, validate_folders
from .try_task import show_task, try_task

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

    from ..stages.handler import AgentHandler
    from ..tasks.loading import Row

commands = typer.Typer(
    help="Check data files, and list and try tasks. Try: prorl tasks list, then prorl tasks validate FILE, and "
    "prorl eval FILE, or prorl_zmq.tasks.loading.load_jobs in a trainer.",
    rich_markup_mode=None,
)
commands.command("make-swe")(make_swe)
commands.command("oracle")(prove_tasks)
commands.command("show")(show_task)
commands.command("try")(try_task)

File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="Rows of known formats: .jsonl, .parquet, .csv, or .json with a list; or a folder of Harbor tasks.",
    ),
]
SHOWN = 20
"""Wrong rows that are shown, unless all are requested."""


@commands.command("list")
def list_row_formats() -> None:
    """List the tasks that are installed, and the row formats that become jobs of them.

    A row has the first of these formats all of whose columns are there. `task` and `instance` make a row a whole job,
    as `prorl submit` takes it.
    """
    from ..stages.handler import load_handlers
    from ..stages.known_row_formats import known_row_formats

    known = known_row_formats(load_handlers(warn=partial(say, "prorl tasks")))
    rows = ((each.task, each.name, each.about, ", ".join(sorted(each.required))) for each in known)
    headers = ("task", "row format", "data sets", "recognised by its columns")
    print_table(*headers, rows=rows, title="row formats, the first that fits is taken")


@commands.command()
def validate(
    file: File,
    task: TaskName = "",
    task_module: TaskModule = None,
    row_format: RowFormatName = "",
    every: Annotated[bool, typer.Option("--all", help=f"Show all wrong rows, not only the first {SHOWN}.")] = False,
) -> None:
    """Check a data file, or a folder of Harbor tasks, and list its errors; the exit code is 1 if there are any.

    Each row is made into a job and its instance checked as the service would. Of a task folder, every key of task.toml
    and every instruction of its Dockerfile is checked. Nothing is run.
    """
    if file.is_dir():
        validate_folders(file, every=every)
        return
    counts: Counter[tuple[str, str]] = Counter()
    names: dict[str, int] = {}
    named_again: list[str] = []
    wrong = 0
    for number, problem, row in _checked(file, task, row_format, task_module or ()):
        if problem:
            wrong += 1
            if every or wrong <= SHOWN:
                print(f"line {number}: {one_line(problem)}")
            continue
        if row is not None:
            counts[row.job.task, row.row_format] += 1
            if (before := names.setdefault(row.name, number)) != number:
                named_again.append(f"{one_line(row.name)} in lines {before} and {number}")
    if wrong > SHOWN and not every:
        print(f"… and {wrong - SHOWN} more wrong rows: --all shows them")
    rows = [(*of, count) for of, count in sorted(counts.items())] + ([("", "wrong", wrong)] if wrong else [])
    print_table("task", "row format", ">rows", rows=rows, title=one_line(str(file)))
    if len({task_name for task_name, _ in counts}) > 1:
        print("no error: the rows are of several tasks; --task or --row-format chooses one")
    if named_again:
        print(f"no error: {len(named_again)} rows have a name that is there already, such as {named_again[0]}")
    if wrong:
        raise typer.Exit(1)


@commands.command("images")
def images_of(
    file: File,
    build: Annotated[bool, typer.Option("--build", help="Build those that are missing, one after the other.")] = False,
    base: BaseImages = None,
    bases: Annotated[
        Path | None, typer.Option(metavar="FILE", help='TOML with a line "NAME" = "SOURCE" for each --base.')
    ] = None,
    dockerfiles: Annotated[
        bool, typer.Option("--dockerfiles", help="Build from a task's Dockerfile although it names a published image.")
    ] = False,
    row_format: RowFormatName = "",
    images: Images = None,
) -> None:
    """List the images that swe rows or Harbor tasks need, and which are missing; --build makes those.

    The exit code is 1 if any is missing at the end, or if a row or folder is wrong.

    prorl tasks images tasks/ --build --base ubuntu:24.04=docker-archive:ubuntu.tar
    """
    store = image_store(images)
    if file.is_dir():
        images_of_folders(file, store, build=build, dockerfiles=dockerfiles, base=base or (), bases=bases)
        return
    if base or bases or dockerfiles:
        raise ConfigError(f"{file} is no folder of Harbor tasks, which --base, --bases and --dockerfiles are for")
    needed: dict[str, str] = {}
    wrong = 0
    for _, problem, row in _checked(file, "", row_format):
        wrong += bool(problem)
        if row is not None and row.job.task == "swe" and (name := row.job.instance.get("image")):
            needed.setdefault(str(name), str(row.job.instance.get("image_source", "")))
    if wrong:
        print(f"{wrong} rows are wrong, and their images are left out: prorl tasks validate {file}")
    if not needed and not wrong:
        raise ConfigError(f"{file} has no rows of the swe task", key="file")
    rows, missing = [], 0
    for name, source in sorted(needed.items()):
        state = _state(store, name)
        if state == "missing" and build and source:
            try:
                console(stderr=True).print(text(f"building {name} from {source}"))
                store.build(source, name)
                state = "built"
            except ProrlError as error:
                state = f"missing: {error.message}"
        missing += state.startswith("missing")
        rows.append((name, state, source))
    print_table("image", "state", "source", rows=rows, title=f"images of {one_line(str(file))}")
    if missing or wrong:
        raise typer.Exit(1)


def _state(store: Any, name: str) -> str:
    if name.startswith("/"):
        return "there" if Path(name).exists() else "missing"
    return "there" if any(store.find(each) is not None for each in (name, f"{name}.sif")) else "missing"


def _checked(
    file: Path, task: str, row_format: str, task_modules: Iterable[Path] = ()
) -> Iterator[tuple[int, str, Row | None]]:
    """Return each row's number, its error, and its job if it has no error."""
    from ..stages.known_row_formats import known_row_formats
    from ..stages.own_tasks import all_handlers, own_handlers
    from ..tasks.loading import load_rows

    handlers: Mapping[str, AgentHandler[Any]] = all_handlers(task_modules, warn=partial(say, "prorl tasks"))
    known = known_row_formats(handlers, own_handlers(task_modules))
    for row in load_rows(file, task=task, row_format=row_format, row_formats=known):
        if isinstance(row, InvalidRecord):
            yield int(row.fields.get("line") or 0), row.message.partition(": ")[2] or row.message, None
            continue
        handler = handlers.get(row.job.task)
        if handler is None:
            yield row.number, f"no installed package has a handler for the task {row.job.task}", None
            continue
        try:
            handler.parse_instance(row.job)
        except InvalidJob as error:
            yield row.number, error.message, None
        else:
            yield row.number, "", row
