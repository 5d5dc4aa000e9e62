"""`prorl init`."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from ..config import ENGINE_KINDS
from ..errors import ConfigError
from ..system.plugins import offered


def init(
    path: Annotated[Path, typer.Argument(metavar="TOPOLOGY.toml", help="The file to write.")] = Path("topology.toml"),
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write a commented topology file with every key at its default."""
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
