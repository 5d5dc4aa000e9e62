"""`prorl tasks make-swe`."""

from __future__ import annotations

import asyncio
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError, ProrlError
from ..system.installation import how_to_install
from .images import build_progress
from .options import Images, Verbose
from .tables import console, table

if TYPE_CHECKING:
    from rich.table import Table

    from ..make_swe.recipe import Order
    from ..make_swe.search import Made

NEEDED = ("swebench", "packaging")
"""Modules of the tasks extra that it imports."""


def make_swe(
    projects: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROJECT…", help="A folder, a git URL, or NAME==VERSION of a package index."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE.jsonl", help="File for the instances; written at the end.")
    ] = Path("swe.jsonl"),
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME|FILE.toml", help="Make a set instead: swe-mini, or one of your own.")
    ] = None,
    instances: Annotated[
        int, typer.Option("--instances", "-n", min=1, max=1000, help="Of each project, unless a recipe says it.")
    ] = 4,
    seed: Annotated[int | None, typer.Option(help="Seed of the choice of bugs. [default: the recipe's; 0]")] = None,
    base: Annotated[
        str,
        typer.Option(
            metavar="NAME|SOURCE",
            help="Image with Python 3.9 or newer and git: a name of `prorl image list`, or a source as of `prorl image "
            "build`. [default: python-git, built if it is not there]",
        ),
    ] = "",
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, max=256, help="Sandboxes at a time.")] = 2,
    require: Annotated[
        list[str] | None,
        typer.Option(metavar="REQUIREMENT", help="Another package that the tests need; may be repeated."),
    ] = None,
    tests: Annotated[
        list[str] | None, typer.Option(metavar="PATH", help="A folder with tests; may be repeated.")
    ] = None,
    most_failing: Annotated[float, typer.Option(min=0.001, max=0.9, help="Share of tests a bug may break.")] = 0.2,
    limit: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="How long all tests may take.")] = 300.0,
    images: Images = None,
    verbose: Verbose = False,
) -> None:
    """Make software-engineering instances from Python projects with tests, each verified by running them.

    It puts a bug into a function that tests reach, so that a few tests fail; the agent has to find it. Each project
    gets an image with its repository and its test dependencies. Run an interrupted command again, and it continues.
    The project's tests run in sandboxes; but pip asks the build backend of NAME==VERSION for metadata on this machine,
    as any installation does.

    Example: prorl tasks make-swe ./my-project --instances 10 --out mine.jsonl
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(f"make-swe needs {', '.join(missing)}: {how_to_install('tasks')}", key="tasks")
    from ..make_swe.maker import Maker
    from ..make_swe.project import check_source
    from ..make_swe.recipe import Settings
    from ..tools.images.image import default_root
    from ..tools.images.image_store import ImageStore

    orders, recipe_seed = _orders(projects or [], recipe, instances, require or [], tests or [])
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {out.absolute().parent} for {out.name}", key="out")
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder; name a file, such as {out / 'swe.jsonl'}", key="out")
    for order in orders:
        check_source(order.source)
    settings = Settings(
        seed=recipe_seed if seed is None else seed, base=base, jobs=jobs, most_failing=most_failing, limit_s=limit
    )
    parts = out.with_name(f"{out.name}.parts")
    with build_progress("prorl tasks make-swe", verbose=verbose) as (say, heard):
        maker = Maker(ImageStore(default_root() if images is None else images), settings, say, heard)
        results = asyncio.run(maker.make(orders, parts))
    _conclude(results, orders, out, parts, images)


def _conclude(
    results: list[Made | ProrlError], orders: list[Order], out: Path, parts: Path, images: Path | None
) -> None:
    """Write the instances, and report what could not be made.

    Raises:
        ProrlError: a project failed, or nothing could be made.
    """
    from ..make_swe.maker import write_atomically
    from ..make_swe.search import encode

    made = [each for each in results if not isinstance(each, ProrlError)]
    errors = [each for each in results if isinstance(each, ProrlError)]
    if made:
        console(stderr=True).print(_table(made))
    found = sum(len(each.instances) for each in made)
    if found:
        try:
            write_atomically(out, encode(made))
        except OSError as error:
            raise ConfigError(f"{out}: {error.strerror}; what was made is kept in {parts}", key="out") from error
        print(out)
        folder = f" --image-folder {images}" if images is not None else ""
        console(stderr=True).print(f"next: prorl eval {out} --sandbox apptainer{folder}")
    if errors and len(orders) == 1:
        raise errors[0]
    if errors:
        raise ProrlError(f"{len(errors)} of {len(orders)} projects came to nothing; the lines above say why")
    short = [each.label for each, order in zip(made, orders, strict=True) if len(each.instances) < order.instances]
    if not found:
        raise ProrlError("no instance could be made; the table says why. More tests, or --most-failing, would help")
    if short:
        console(stderr=True).print(f"fewer than asked for, since no other bugs would do: {', '.join(short)}")
    shutil.rmtree(parts, ignore_errors=True)


def _orders(
    projects: list[str], recipe: str | None, instances: int, require: list[str], tests: list[str]
) -> tuple[list[Order], int]:
    from ..make_swe.recipe import Order, load_recipe

    if (recipe is None) == (not projects):
        raise ConfigError("name projects or a recipe, one of both: prorl tasks make-swe ./my-project", key="projects")
    if recipe is not None:
        if require or tests:
            raise ConfigError("--require and --tests are for projects; a recipe says both itself", key="recipe")
        loaded = load_recipe(recipe)
        return list(loaded.project), loaded.seed
    if len(set(projects)) < len(projects):
        raise ConfigError("a project is named twice", key="projects")
    more, paths = tuple(require), tuple(tests)
    return [Order(name, instances, more_requirements=more, tests=paths) for name in projects], 0


def _table(made: list[Made]) -> Table:
    rows = (
        (
            *(each.label, len(each.instances), each.tests, each.unreliable + each.flaky, each.tried),
            round(each.busy_s),
            "; ".join(f"{n} {reason}" for reason, n in sorted(each.dropped.items(), key=lambda item: -item[1])),
        )
        for each in made
    )
    headers = ("project", ">instances", ">tests", ">unreliable", ">tried", ">busy s", "mutations dropped")
    return table(*headers, rows=rows, title="what became of each project")
