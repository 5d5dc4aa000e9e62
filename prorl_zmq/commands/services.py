"""`prorl services`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from ..service.run_dir import LOCK
from ..system.held_file import holder
from ..system.run_places import base_run_dir
from . import options
from .earlier_training import Journals, announced_version, training_before
from .tables import print_json, print_table

if TYPE_CHECKING:
    from pathlib import Path

STATES = {True: "running", False: "ended"}
BACKENDS, ROLLOUTS = "backends.journal", "rollout.journal"


class ServiceRow(msgspec.Struct, frozen=True):
    """One service of this account on this machine, running or not."""

    name: str
    """Empty: a service without a name."""
    running: bool
    weights: int
    """The version that its training announced last; 0: none."""
    models: tuple[str, ...]
    run_dir: str


def services(
    as_json: options.AsJson = False,
) -> None:
    """List the services of this account on this machine: those that run, and those that left a journal.

    `--name NAME` of other commands, `RolloutClient("NAME")` and PRORL_NAME=NAME reach one that has a name. Services of
    other places (--run-dir, `run_dir` of a topology file, --service DIR) are not listed.
    """
    from ..service.leftovers import usual_run_folders

    folders = dict.fromkeys(filter(_is_service, usual_run_folders()))
    rows = [_row(folder) for folder in folders]
    if as_json:
        print_json({"services": rows})
    elif rows:
        cells = (
            (
                row.name or "(none)",
                "running" if row.running else "ended",
                row.weights,
                ", ".join(row.models),
                row.run_dir,
            )
            for row in rows
        )
        print_table("name", "=state", ">weights", "models", "run folder", rows=cells)
    else:
        print("no service of this account is here")


def _is_service(folder: Path) -> bool:
    try:
        return folder.stat().st_uid == os.getuid() and (folder / BACKENDS).is_file()
    except OSError:  # another account's
        return False


def _row(folder: Path) -> ServiceRow:
    base = base_run_dir()
    named = folder.parent == base.parent and folder.name.startswith(f"{base.name}-")
    journals = Journals(folder / BACKENDS, (folder / ROLLOUTS,), folder / LOCK)
    training = training_before(journals)
    return ServiceRow(
        folder.name.removeprefix(f"{base.name}-") if named else "",
        bool(holder(journals.lock)),
        announced_version(journals),
        training.models if training is not None else (),
        str(folder),
    )
