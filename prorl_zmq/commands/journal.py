"""`prorl journal`: show, compact or remove the jobs and results that a rollout broker resumes after a restart."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.table import Table

from ..errors import ConfigError
from ..wire.messages.jobs import Phase
from .option_groups import OptionGroup, ProcessOptions
from .options import Config, Name, RunDir, named
from .tables import console, size_text, table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..brokers.journal.journal_summary import JournalSummary, SessionSummary

SESSIONS_SHOWN = 20

commands = typer.Typer(
    help="Show, compact or clear the rollout broker's journal, from which a restart resumes.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
File = Annotated[
    Path | None, typer.Argument(metavar="[FILE]", help="The journal. [default: that of --config, --run-dir or --name]")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalOptions(OptionGroup):
    file: File = None
    config: Config = None
    run_dir: RunDir = None
    name: Name = None

    def path(self) -> Path:
        """Return the journal's file, which need not exist."""
        if self.file is not None:
            return self.file
        path = named(ProcessOptions(run_dir=self.run_dir).topology(self.config), self.name, self.run_dir).journal
        if path is None:
            words = "this service keeps its journal in memory: rollout_broker.journal is empty"
            raise ConfigError(words, key="journal")
        return path

    def existing(self) -> Path:
        path = self.path()
        if not path.exists():
            raise ConfigError(f"there is no journal {path}", key="journal")
        return path


@commands.command()
def show(chosen: JournalOptions) -> None:
    """Show its content; a broker may be running."""
    from ..brokers.journal.journal_summary import count_damaged, read_summary

    path = chosen.path()
    console().print(summary_tables(read_summary(path), count_damaged(path), time.time()))


@commands.command()
def compact(chosen: JournalOptions) -> None:
    """Free the disk space of collected results. The broker must not be running."""
    from ..brokers.journal.journal import Journal
    from ..brokers.journal.journal_summary import size_of

    path = chosen.existing()
    before = size_of(path)
    with Journal(path) as journal:
        journal.compact()
    print(f"{path}: {size_text(before)} before, {size_text(size_of(path))} now")


@commands.command()
def clear(chosen: JournalOptions) -> None:
    """Remove a broker's journal, of any version or damaged, and forget what it holds. No broker may have it open.

    The file may also be the backend broker's, `backends.journal`.
    """
    from ..brokers.backends import backend_journal
    from ..brokers.journal.journal import APPLICATION_ID
    from ..brokers.journal.journal_file import RESERVE_SUFFIX, check_kind, lock_journal
    from ..brokers.journal.journal_summary import parts

    path = chosen.existing()
    lock = lock_journal(path)
    try:
        check_kind(path, lock, APPLICATION_ID, backend_journal.APPLICATION_ID)
        for part in (*reversed(parts(path)), path.with_name(path.name + RESERVE_SUFFIX)):
            part.unlink(missing_ok=True)
    finally:
        os.close(lock)
    print(f"{path} is removed; its jobs are lost, which their clients hear as an error; add backends once more")


def summary_tables(summary: JournalSummary, damaged: int, now: float) -> Group:
    """Lay out a journal's content for the terminal: `damaged` of its rows; `now` is in seconds since 1970."""
    facts = Table.grid(padding=(0, 2))
    facts.add_row("file", f"{summary.path}{', in use by a broker' if summary.in_use else ''}")
    size, free = size_text(summary.size_bytes), size_text(summary.free_bytes)
    facts.add_row("size", f"{size}, of which {free} are free for new rows")
    facts.add_row("schema", f"version {summary.schema}, journal {summary.journal_id}")
    facts.add_row("jobs", f"{summary.jobs} that have not ended{_age(summary.oldest_job_at, now)}")
    blocks = f"{size_text(summary.trajectory_bytes)} of trajectories"
    facts.add_row("results", f"{summary.results} uncollected{_age(summary.oldest_result_at, now)}, {blocks}")
    if damaged:
        facts.add_row("damaged", f"{damaged} of these; their clients hear that they are lost")
    has_score = any(Phase.SCORE in {*one.queued, *one.held} for one in summary.sessions)
    phases = [phase for phase in Phase if phase != Phase.SCORE or has_score]
    counts = [header for phase in phases for header in (f">{phase.upper()} queued", ">held")]
    cells = (_session_cells(one, phases) for one in summary.sessions[:SESSIONS_SHOWN])
    sessions = [table("session", *counts, "results", rows=cells, title="sessions")] if summary.sessions else []
    more = len(summary.sessions) - SESSIONS_SHOWN
    return Group(facts, *sessions, *([f"and {more} more sessions"] if more > 0 else []))


def _session_cells(one: SessionSummary, phases: Iterable[Phase]) -> list[str]:
    counts = [str(counts.get(phase, 0)) for phase in phases for counts in (one.queued, one.held)]
    results = ", ".join(f"{count} {outcome}" for outcome, count in sorted(one.results.items())) or "none"
    return [one.session, *counts, results]


def _age(at: float | None, now: float) -> str:
    if at is None:
        return ""
    seconds = max(0.0, now - at)
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f", the oldest {seconds / length:.0f} {unit} old"
    return f", the oldest {seconds:.0f} s old"
