"""Decides whether `prorl serve` continues the training that announced weights in its run folder."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import typer

from ..errors import ConfigError
from ..system.held_file import holder
from ..system.logs import say

if TYPE_CHECKING:
    from pathlib import Path

    from ..config import Topology

Noted = TypeVar("Noted")

SUFFIX = ".training"
"""Suffix of the file next to the backend broker's journal that names the training."""


class Journals(NamedTuple):
    """The journals of a service that store the announced weights."""

    backends: Path
    rollouts: tuple[Path, ...]
    lock: Path
    """The file that a service locks while it has them open."""

    @property
    def training(self) -> Path:
        return self.backends.with_name(self.backends.name + SUFFIX)


class Training(msgspec.Struct, frozen=True):
    """A service's training, as far as its topology identifies it."""

    models: tuple[str, ...]
    """The engines' models, in alphabetical order; engines that name none are left out."""
    topology: str = ""
    """The topology file, in a run folder that several services may share; empty: none, or it does not matter."""

    def __str__(self) -> str:
        models = " and ".join(self.models) or "no model of a name"
        return f"{models} ({self.topology})" if self.topology else models


def training_of(topology: Topology, config: Path | None = None) -> Training:
    """Return the training of a service; `config` is its topology file, if only that identifies it."""
    models = {
        "the embedded policy" if one.kind == "embedded" and not one.model else one.model or one.tokenizer
        for one in topology.backends
    }
    return Training(tuple(sorted(models - {""})), str(config.resolve()) if config is not None else "")


def continue_training(journals: Journals, ours: Training, *, forget: bool | None) -> None:
    """Report which weights an earlier training announced, or forget them; with None, ask on a terminal.

    Raises:
        ConfigError: it was another training, and there is no terminal to ask on; or the folder cannot be written.
        JournalFailed: they are to be forgotten, and a broker has a journal open.
    """
    if holder(journals.lock):  # the start fails for that reason
        return
    if version := announced_version(journals):
        _continue(journals, ours, version, forget=forget)
    try:
        journals.training.write_bytes(msgspec.json.encode(ours))
    except OSError as error:
        raise ConfigError(f"{journals.training} cannot be written: {error.strerror}", key="run_dir") from error


def _continue(journals: Journals, ours: Training, version: int, *, forget: bool | None) -> None:
    where, theirs = journals.backends.parent, training_before(journals) or ours
    if forget is None and sys.stdin.isatty() and sys.stderr.isatty():
        of = f" of {theirs}" if theirs != ours else ""
        question = f"A training{of} announced weights {version} in {where}. Begin a new training, and forget them?"
        forget = typer.confirm(question, default=False, err=True)
    if forget is None and theirs != ours:
        raise ConfigError(
            f"{where} has weights {version} of another training, of {theirs}; this one is of {ours}. Start it under a "
            "name (`prorl serve --name NAME`; PRORL_NAME=NAME for its clients), or add --new-training, which forgets "
            "those weights, or --continue-training, if it is the same training after all",
            key="name",
        )
    if forget:
        forget_weights(journals)
        say("prorl serve", f"a new training: weights {version} of the one before are forgotten")
        return
    say(
        "prorl serve",
        f"continuing the training that announced weights {version} in {where}; for a new training, begin with "
        "--new-training, or under a name of its own: --name NAME (clients: PRORL_NAME=NAME)",
    )


def training_before(journals: Journals) -> Training | None:
    """Return the training of a folder's last service; None: it stored none, or none that can be read."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(journals.training.read_bytes(), type=Training)
    return None


def announced_version(journals: Journals) -> int:
    """Return the highest weight version of any model in a journal; 0: none, or unreadable."""
    from ..brokers.backends.backend_records import WeightsRecord

    wanted = [record.wanted for record in _read(journals.backends, "SELECT record FROM weights", WeightsRecord)]
    for path in journals.rollouts:
        wanted += (version for _, version in _read_notes(path))
    return max(wanted, default=0)


def forget_weights(journals: Journals) -> None:
    from ..brokers.backends.backend_journal import BackendJournal
    from ..brokers.journal.journal import Journal
    from ..brokers.journal.journal_summary import has_begun

    if journals.backends.exists():
        with BackendJournal(journals.backends) as backends:
            backends.write({}, ())
    for path in journals.rollouts:
        if has_begun(path):
            with Journal(path) as rollouts:
                rollouts.write([], [], [], notes={name: None for name, _ in _read_notes(path)})


def _read_notes(path: Path) -> list[tuple[str, int]]:
    """Return the names and versions of a rollout broker's notes of weights."""
    from ..brokers.batches.batch_notes import WEIGHTS

    query = f"SELECT note, name FROM notes WHERE name = '{WEIGHTS}' OR name GLOB '{WEIGHTS}:*'"  # noqa: S608 - a constant
    return [(row[1], version) for row, version in _read_rows(path, query, int)]


def _read(path: Path, query: str, kind: type[Noted]) -> list[Noted]:
    return [noted for _, noted in _read_rows(path, query, kind)]


def _read_rows(path: Path, query: str, kind: type[Noted]) -> list[tuple[tuple[Any, ...], Noted]]:
    """Return the rows of a query and their decoded first columns, even while a broker writes.

    The brokers report a damaged journal.
    """
    from ..brokers.journal.journal_file import connect
    from ..brokers.journal.journal_summary import has_begun

    with contextlib.suppress(sqlite3.Error, msgspec.MsgspecError):
        if has_begun(path):
            with contextlib.closing(connect(path, read_only=True)) as connection:
                return [(row, msgspec.msgpack.decode(row[0], type=kind)) for row in connection.execute(query)]
    return []
