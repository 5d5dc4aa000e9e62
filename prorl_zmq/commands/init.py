"""`prorl init`."""

from __future__ import annotations

from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from ..config import ENGINE_KINDS
from ..errors import ConfigError
from ..system.plugins import offered


class Trainer(StrEnum):
    """The trainers that there is an example for."""

    TRL = "trl"


def init(
    path: Annotated[
        Path | None, typer.Argument(metavar="PATH", help="The file to write (topology.toml), or the trainer's folder.")
    ] = None,
    trainer: Annotated[
        Trainer | None, typer.Option("--trainer", help="Write an example of training with this framework.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over files that are there.")] = False,
) -> None:
    """Write a commented topology file with every key at its default; or a folder with a trainer's example."""
    if trainer is not None:
        _write_example(trainer, path or Path(f"{trainer}-example"), force=force)
    else:
        _write_topology(path or Path("topology.toml"), force=force)


def _write_example(trainer: Trainer, folder: Path, *, force: bool) -> None:
    files_there = files("prorl_zmq.examples").joinpath(trainer)
    names = [file.name for file in files_there.iterdir() if file.is_file() and file.name != "__init__.py"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not force and (there := sorted(name for name in names if (folder / name).exists())):
            raise ConfigError(f"{folder / there[0]} is there already; --force writes over it")
        for name in names:
            (folder / name).write_text(files_there.joinpath(name).read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from error
    print(f"wrote {', '.join(sorted(names))} into {folder}; begin with {folder / 'README.md'}")


def _write_topology(path: Path, *, force: bool) -> None:
    from ..tools.sandbox.kinds import known_kinds

    template = files("prorl_zmq.service").joinpath("topology.toml").read_text(encoding="utf-8")
    template = template.replace("SANDBOX_KINDS", ", ".join(known_kinds()))
    if further := [name for name in offered(ENGINE_KINDS) if f'"{name}"' not in template]:
        note = f"# Further kinds of engines are installed: {', '.join(further)}."
        template = template.replace("\n[[backends]]\n", f"\n{note}\n[[backends]]\n", 1)
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(template)
    except FileExistsError:
        raise ConfigError(f"{path} is there already; --force writes over it") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    print(f"wrote {path}; start the service with: prorl serve --config {path}")
