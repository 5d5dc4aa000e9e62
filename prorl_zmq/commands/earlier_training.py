"""Whether `prorl serve` continues the training that announced weights in its run folder, or begins a new one."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
import typer

from ..system.logs import say

if TYPE_CHECKING:
    from pathlib import Path

Noted = TypeVar("Noted")


class Journals(NamedTuple):
    """The journals of a service that remember the announced weights."""

    backends: Path
    rollouts: tuple[Path, ...]


def continue_training(journals: Journals, *, forget: bool) -> None:
    """Say which weights an earlier training announced, or forget them; on a terminal, ask which.

    Raises:
        JournalFailed: they are to be forgotten, and a broker has a journal open.
    """
    version = announced_version(journals)
    if not version:
        return
    where = journals.backends.parent
    if not forget and sys.stdin.isatty() and sys.stderr.isatty():
        question = f"A training announced weights {version} in {where}. Begin a new training, and forget them?"
        forget = typer.confirm(question, default=False, err=True)
    if forget:
        forget_weights(journals)
        say("prorl serve", f"a new training: weights {version} of the one before are forgotten")
        return
    say(
        "prorl serve",
        f"continuing the training that announced weights {version} in {where}; for a new training, begin with "
        "--new-training, or in a run folder of its own: --run-dir DIR (clients: PRORL_RUN_DIR=DIR)",
    )


def announced_version(journals: Journals) -> int:
    """Return the highest weight version that a journal remembers; 0: none, or none that can be read."""
    from ..brokers.backends.backend_records import WeightsRecord
    from ..brokers.batches.batch_notes import WEIGHTS

    wanted = [record.wanted for record in _read(journals.backends, "SELECT record FROM weights", WeightsRecord)]
    for path in journals.rollouts:
        wanted += _read(path, f"SELECT note FROM notes WHERE name = '{WEIGHTS}'", int)  # noqa: S608 - a constant
    return max(wanted, default=0)


def forget_weights(journals: Journals) -> None:
    from ..brokers.backends.backend_journal import BackendJournal
    from ..brokers.backends.backend_records import WeightsRecord
    from ..brokers.batches.batch_notes import WEIGHTS
    from ..brokers.journal.disk_journal import DiskJournal
    from ..brokers.journal.journal_summary import has_begun

    if journals.backends.exists():
        with BackendJournal(journals.backends) as backends:
            backends.write({}, WeightsRecord())
    for path in journals.rollouts:
        if has_begun(path):
            with DiskJournal(path) as rollouts:
                rollouts.write([], [], [], notes={WEIGHTS: None})


def _read(path: Path, query: str, kind: type[Noted]) -> list[Noted]:
    """Return the rows of a query, whatever a broker does meanwhile; a damaged journal is the brokers' to report."""
    from ..brokers.journal.journal_file import connect
    from ..brokers.journal.journal_summary import has_begun

    with contextlib.suppress(sqlite3.Error, msgspec.MsgspecError):
        if has_begun(path):
            with contextlib.closing(connect(path, read_only=True)) as connection:
                return [msgspec.msgpack.decode(row[0], type=kind) for row in connection.execute(query)]
    return []
