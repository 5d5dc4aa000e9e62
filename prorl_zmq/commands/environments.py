"""`prorl env`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError, HandlerFailed
from ..system.logs import say
from .images import build_progress
from .options import Verbose, Wait
from .tables import print_table

if TYPE_CHECKING:
    from ..stages.environments.environment_store import EnvironmentStore

commands = typer.Typer(
    help="Install and try environments of other packages. Try: prorl env install reasoning-gym, then prorl env list.",
    rich_markup_mode=None,
)

Name = Annotated[str, typer.Argument(metavar="NAME[==VERSION]", help="The environment, as `prorl env list` shows.")]
Into = Annotated[
    Path | None,
    typer.Option(
        "--into",
        metavar="FOLDER",
        help="Where environments are kept. [default: $PRORL_ENVIRONMENTS, or ~/.cache/prorl/environments]",
    ),
]


@commands.command()
def install(
    name: Name,
    requirements: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="REQUIREMENT",
            help="For an environment of your own: what pip installs for it, such as a folder. May be given again.",
        ),
    ] = None,
    adapter: Annotated[
        str,
        typer.Option(
            metavar="PLACE",
            help="Its class, as module:Class or file.py:Class. [default: the entry point NAME of what is installed]",
        ),
    ] = "",
    into: Into = None,
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="How long pip may take.")] = 1800.0,
    wait: Wait = 3600.0,
    verbose: Verbose = False,
) -> None:
    """Install an environment in a virtual environment of its own; print its folder.

    Example: prorl env install gem
    """
    with build_progress("prorl env", verbose=verbose) as (say, heard):
        installed = environment_store(into).install(
            name,
            say=say,
            heard=heard,
            timeout_s=timeout,
            wait_s=wait,
            requirements=tuple(requirements or ()),
            adapter=adapter,
        )
    print(installed.folder)


@commands.command("list")
def list_(into: Into = None) -> None:
    """List the known environments and those that are installed."""
    from ..stages.environments.environment_store import KNOWN

    store = environment_store(into)
    installed, rows = store.list(), []
    for name, known in KNOWN.items():
        if known.package is None:
            rows.append((name, "any", "", "needs no package"))
        elif not any(each.name == name for each in installed):
            rows.append((name, "not installed", "", f"{known.package.package} {known.package.version}"))
    rows += [(one.name, one.version, f"{one.size_bytes / 1e6:.0f}", one.package or one.adapter) for one in installed]
    print_table("environment", "=version", ">MB", "from", rows=sorted(rows), title=f"environments in {store.root}")


@commands.command()
def remove(name: Name, into: Into = None, wait: Wait = 3600.0) -> None:
    """Remove a version of an environment, or all of them. Workers that play it lose its files."""
    with build_progress("prorl env", verbose=False) as (say, _):
        environment_store(into).remove(name, say=say, wait_s=wait)


@commands.command("test")
def try_(
    name: Name,
    args: Annotated[str, typer.Option(metavar="JSON", help="The `args` of an instance.")] = "{}",
    seed: Annotated[int, typer.Option(help="The `seed` of an instance.")] = 1,
    says: Annotated[
        list[str] | None,
        typer.Option(
            "--say",
            metavar="TEXT",
            help="What the next player that acts says. May be given again.",
        ),
    ] = None,
    into: Into = None,
) -> None:
    """Open an installed environment as a rollout does, and show what the players see.

    Exit code 1, with the reason, if it cannot be played. Example: prorl env test gem --args '{"id": "game:Sudoku-v0"}'
    """
    import msgspec

    from ..errors import EnvironmentFailed
    from ..stages.environments.trial import try_environment

    try:
        given = msgspec.json.decode(args, type=dict)
    except msgspec.MsgspecError as error:
        raise ConfigError(f'--args must be a JSON object, such as \'{{"id": "…"}}\': {error}', key="args") from error
    try:
        place = environment_store(into).place(name)
        say("prorl env", f"starting {name}")
        print(asyncio.run(try_environment(place, given, seed, says or [])))
    except EnvironmentFailed as error:
        hint = "" if given or error.fields["reason"] == "missing" else "; --args is empty: give what it needs"
        raise HandlerFailed(f"{error.message}{hint}") from error


def environment_store(root: Path | None) -> EnvironmentStore:
    """Return the environments in a folder; None: the default one."""
    from ..stages.environments.environment_store import EnvironmentStore

    return EnvironmentStore(root)
