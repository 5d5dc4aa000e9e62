"""`prorl keys`: own key pairs, and the list of keys that the service allows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..security.keys import PUBLIC, KeyFolder, default_folder
from ..wire.messages.base import KeyRole
from .tables import print_table, text

commands = typer.Typer(
    help="Make keys for connections over TCP, and allow or revoke keys of others. The folder is --keys, or "
    "$PRORL_KEYS, or ~/.config/prorl/keys; it must be private to this user.",
    rich_markup_mode=None,
)

Folder = Annotated[Path | None, typer.Option("--keys", metavar="FOLDER", help="The key folder.", show_default=False)]
Role = Annotated[
    KeyRole,
    typer.Option(
        help="What it is for. trainer: submits jobs, collects trajectories, updates weights. stage: a node's stage "
        "processes and engine hosts. operator: status, cancel, backends. service: the brokers."
    ),
]


@commands.command("new")
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The key's name: its owner, such as alice or gpu-7.")],
    role: Role,
    folder: Folder = None,
) -> None:
    """Make a key pair: NAME.secret, which stays here, and NAME.pub, which may be passed on."""
    place = _folder(folder)
    key = place.new(name, role)
    print(
        f"made {place.path / key.name}.secret, which only its owner may have, and {key.name}{PUBLIC}: {key.public_key}"
    )


@commands.command("bearer")
def bearer(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The token's name: its owner, such as alice.")],
    role: Role,
    folder: Folder = None,
) -> None:
    """Make a bearer token for `prorl gateway`, allow it, and print it: only its SHA-256 is stored."""
    print(_folder(folder).new_bearer(name, role))


@commands.command("allow")
def allow(
    file: Annotated[Path, typer.Argument(metavar="FILE.pub", help="The public key.")],
    role: Role,
    folder: Folder = None,
) -> None:
    """Allow a key in this role, whatever role its file claims. Takes effect at once."""
    key = _folder(folder).allow(file, role)
    print(f"the key {key.name} is allowed as {key.role}: {key.public_key}")


@commands.command("revoke")
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `prorl keys list` shows it.")],
    folder: Folder = None,
) -> None:
    """Revoke a key or a bearer token. Takes effect within two seconds, also on open connections."""
    _folder(folder).revoke(name)
    print(f"the key {name} is no longer allowed")


@commands.command("list")
def list_(folder: Folder = None) -> None:
    """List own keys, known services' keys, and the keys and tokens that the service allows."""
    place = _folder(folder)
    own, known, allowed = place.listing()
    kinds = (("ours", own), ("known", known), ("allowed", allowed))
    rows = [(key.name, key.role, what, key.public_key) for what, keys in kinds for key in keys]
    rows += [(bearer.name, bearer.role, "allowed", "a bearer token") for bearer in place.bearers()]
    print_table("name", "role", "this key is", "=public key", rows=rows, title=text(place.path))


def _folder(folder: Path | None) -> KeyFolder:
    return KeyFolder((folder or default_folder()).expanduser())
