"""`prorl init`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from ..config import ENGINE_KINDS
from ..errors import ConfigError
from ..system.plugins import offered

EXAMPLES = files("prorl_zmq.examples").joinpath("trainers")
"""A folder per trainer; those whose topology loads `letters.py` get `shared` too, a tiny task and model."""
TRAINERS = sorted(each.name.replace("_", "-") for each in EXAMPLES.iterdir() if each.joinpath("README.md").is_file())


def _check_trainer(trainer: str | None) -> str | None:
    if trainer is not None and trainer not in TRAINERS:
        raise typer.BadParameter(f"{trainer!r} is not one of {', '.join(TRAINERS)}")
    return trainer


def init(
    path: Annotated[
        Path | None, typer.Argument(metavar="PATH", help="The file to write (topology.toml), or the trainer's folder.")
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(TRAINERS),
            callback=_check_trainer,
            help="Write an example of training with it.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over files that are there.")] = False,
) -> None:
    """Write a commented topology file with every key at its default; or a folder with a trainer's example."""
    if trainer is not None:
        _write_example(trainer, path or Path(f"{trainer}-example"), force=force)
    else:
        _write_topology(path or Path("topology.toml"), force=force)


def _write_example(trainer: str, folder: Path, *, force: bool) -> None:
    texts = dict(_files(EXAMPLES.joinpath(trainer.replace("-", "_"))))
    if "letters.py" in texts["topology.toml"]:
        texts |= _files(EXAMPLES.joinpath("shared"))
    try:
        if not force and (there := sorted(name for name in texts if (folder / name).exists())):
            raise ConfigError(f"{folder / there[0]} is there already; --force writes over it")
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from error
    print(f"wrote {', '.join(sorted(texts))} into {folder}; begin with {folder / 'README.md'}")


def _files(folder: Traversable, under: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names and texts of all files of an example."""
    for entry in folder.iterdir():
        name = f"{under}{entry.name}"
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from _files(entry, f"{name}/")
        else:
            yield name, entry.read_text(encoding="utf-8")


def _write_topology(path: Path, *, force: bool) -> None:
    from ..tools.containers.kinds import known_kinds

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
