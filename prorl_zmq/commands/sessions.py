"""`prorl sessions`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ..errors import UnknownSession
from ..system.duration import duration
from ..wire.messages.base import Identifier
from . import options
from .tables import end_with, print_json, print_table
from .target import Target

if TYPE_CHECKING:
    from ..wire.messages.front_door import SessionRow

commands = typer.Typer(
    help="List the sessions of a service, and end one. A session is the name under which jobs, results and batches are "
    "kept. With keys, these commands take one of role `operator`.",
    rich_markup_mode=None,
)


@commands.command("list")
def list_(
    target: Target,
    as_json: options.AsJson = False,
) -> None:
    """List the sessions that hold something: jobs that wait or run, results that were not collected, batches.

    A session without a name ends when its client has been silent for its lease; the column `ends in` says when. A named
    one lasts. The exit code is 1 if a rollout broker did not answer; what the others report is shown.
    """
    with target.brokers() as brokers:
        answers = brokers.ask(lambda client: client.views.sessions())
    answers.check()
    rows = [row for listed in answers.found.values() for row in listed.sessions if any(_counts(row))]
    left_out = sum(listed.left_out for listed in answers.found.values())
    if as_json:
        whole = [msgspec.structs.asdict(row) for row in rows]
        print_json({"sessions": whole, "left_out": left_out, "problems": answers.silent()})
        end_with(answers.silent())
        return
    cells = ((row.session, *_counts(row), _ends_in(row)) for row in rows)
    print_table("session", ">queued", ">running", ">results", ">batches", ">carried", ">ends in", rows=cells)
    if left_out:
        print(f"and {left_out} more")
    end_with(answers.silent(), "prorl sessions list")


def _counts(row: SessionRow) -> tuple[int, ...]:
    return row.queued, row.running, row.results, row.batches, row.carried_groups


def _ends_in(row: SessionRow) -> str:
    return duration(max(0.0, row.lease_s - (row.silent_s or 0.0))) if row.lease_s is not None else ""


@commands.command()
def end(
    target: Target,
    session: Annotated[str, typer.Argument(metavar="NAME", help="As `prorl sessions list` shows it.")],
    as_json: options.AsJson = False,
) -> None:
    """End a session: cancel its jobs, close its batches, and drop its results for good.

    Its client, if it still runs, gets the error `session_ended`. The exit code is 2 if no session has this name.
    """
    try:
        msgspec.convert(session, Identifier)
    except msgspec.ValidationError:
        raise typer.BadParameter(
            f"{session!r} is not a name of a session, which is 1 to 128 letters, digits and `._:-`"
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
        print_json({"session": session, "jobs": jobs, "results": results, "batches": batches})
    else:
        print(f"{session}: {jobs} jobs cancelled, {results} results dropped, {batches} batches closed")
