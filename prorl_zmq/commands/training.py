"""`prorl training`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Column, Table

from ..errors import UnknownSession
from ..system.duration import duration
from ..system.logs import say
from ..watching.training import trainings
from .options import columns, console
from .target import Target

if TYPE_CHECKING:
    from ..watching.training import Training


def training(
    target: Target,
    session: Annotated[
        str, typer.Option(metavar="NAME", help="Of the training; empty: the one whose last step is the newest.")
    ] = "",
    last: Annotated[int, typer.Option(min=1, max=2000, help="How many steps.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Show a training over its last steps: reward, tokens, staleness, overlap.

    A training is a session that closes batches, and a step is a batch. `overlap` is the share of a step's time in which
    rollouts and the trainer worked at the same time; the trainer counts as working from when it has a batch until it
    announces the next weights. Brokers keep the last 2,000 batches since they were started.
    """
    with target.brokers() as brokers:
        answers = brokers.ask(lambda client: client.views.steps())
    answers.check()
    found = trainings(answers.found)
    if session:
        found = [one for one in found if one.session == session]
    if not found:
        named = f" of session {session}" if session else ""
        raise UnknownSession(f"no batch{named} with rollouts was closed since the broker was started", session=session)
    one = msgspec.structs.replace(found[0], steps=found[0].steps[-last:])
    if as_json:
        print(msgspec.json.encode({"training": msgspec.to_builtins(one), "problems": answers.silent()}).decode())
    else:
        print(f"session {one.session}, {len(found[0].steps)} steps")
        console().print(table_of(one))
        for problem in answers.silent():
            say("prorl training", problem, logging.ERROR)
    if answers.problems:
        raise typer.Exit(1)


def table_of(training: Training) -> Table:
    """Return the steps, the oldest first."""
    names = ("version", "reward", "overlap", "tokens", "staleness", "took", "rollouts", "failed")
    table = Table(*columns(*names, justify="right"), Column("batch", overflow="fold"))
    for step in training.steps:
        table.add_row(
            str(step.weight_version),
            f"{step.reward:.3f}",
            f"{step.overlap:.0%}" if step.overlap is not None else "",
            f"{step.tokens:.0f}",
            f"{step.staleness:.2f}",
            duration(step.step_s) if step.step_s is not None else "",
            str(step.rollouts),
            str(step.failed),
            step.batch_id,
        )
    return table
