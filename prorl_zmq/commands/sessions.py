"""`prorl sessions`."""

from __future__ import annotations

import logging
from typing import Annotated

import msgspec
import typer
from rich.table import Column, Table

from ..errors import UnknownSession
from ..system.duration import duration
from ..system.logs import say
from ..wire.messages.base import Identifier
from .options import columns, console
from .target import Target

commands = typer.Typer(
    help="List the sessions of a service, and end one. A session is the name under which jobs, results and batches are "
    "kept. With keys, these commands take one of role `operator`.",
    rich_markup_mode=None,
)


@commands.command("list")
def list_(
    target: Target,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """List the sessions that hold something: jobs that wait or run, results that were not collected, batches.

    A session without a name ends when its client has been silent for its lease; the column `ends in` says when. A named
    one lasts. The exit code is 1 if a rollout broker did not answer; what others say is shown all the same.
    """
    with target.brokers() as brokers:
        answers = brokers.ask(lambda client: client.views.sessions())
    answers.check()
    rows = [row for listed in answers.found.values() for row in listed.sessions]
    left_out = sum(listed.left_out for listed in answers.found.values())
    if as_json:
        whole = [msgspec.structs.asdict(row) for row in rows]
        print(msgspec.json.encode({"sessions": whole, "left_out": left_out, "problems": answers.silent()}).decode())
    else:
        numbers = columns("queued", "running", "results", "batches", "carried", "ends in", justify="right")
        table = Table(Column("session", overflow="fold"), *numbers)
        for row in rows:
            ends = duration(max(0.0, row.lease_s - (row.silent_s or 0.0))) if row.lease_s is not None else ""
            counts = (row.queued, row.running, row.results, row.batches, row.carried_groups)
            table.add_row(row.session, *map(str, counts), ends)
        console().print(table)
        if left_out:
            print(f"and {left_out} more")
        for problem in answers.silent():
            say("prorl sessions list", problem, logging.ERROR)
    if answers.problems:
        raise typer.Exit(1)


@commands.command()
def end(
    target: Target,
    session: Annotated[str, typer.Argument(metavar="NAME", help="As `prorl sessions list` shows it.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """End a session: cancel its jobs, close its batches, and drop its results for good.

    Its client, if it still runs, gets the error `session_ended`. The exit code is 2 if no session has this name.
    """
    try:
        msgspec.convert(session, Identifier)
    except msgspec.ValidationError:
        raise typer.BadParameter(
            f"{session!r} is no name of a session, which is 1 to 128 letters, digits and `._:-`"
        ) from None
    with target.brokers() as brokers:
        answers = brokers.ask(lambda client: client.views.end_session(session))
    silent = {name: error for name, error in answers.problems.items() if not isinstance(error, UnknownSession)}
    if not answers.found:
        raise next(iter(silent.values() or answers.problems.values()))
    jobs, results, batches = (
        sum(getattr(stopped, what) for stopped in answers.found.values()) for what in ("jobs", "results", "batches")
    )
    if as_json:
        print(msgspec.json.encode({"session": session, "jobs": jobs, "results": results, "batches": batches}).decode())
    else:
        print(f"{session}: {jobs} jobs cancelled, {results} results dropped, {batches} batches closed")
