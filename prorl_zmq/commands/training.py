"""`prorl training`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ..errors import UnknownSession
from ..system.duration import duration
from ..watching.training import trainings
from . import options
from .tables import end_with, print_json, print_table
from .target import Target

if TYPE_CHECKING:
    from ..watching.training import TrainingStep


def training(
    target: Target,
    session: Annotated[
        str, typer.Option(metavar="NAME", help="Of the training; empty: the one whose last step is the newest.")
    ] = "",
    last: Annotated[int, typer.Option(min=1, max=2000, help="How many steps.")] = 20,
    as_json: options.AsJson = False,
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
        print_json({"training": one, "problems": answers.silent()})
        end_with(answers.silent())
        return
    print(f"session {one.session}, {len(found[0].steps)} steps")
    print_table(
        *(">version", ">reward", ">overlap", ">tokens", ">staleness", ">took", ">rollouts", ">failed", "batch"),
        rows=map(_cells, one.steps),
    )
    end_with(answers.silent(), "prorl training")


def _cells(step: TrainingStep) -> tuple[object, ...]:
    overlap = f"{step.overlap:.0%}" if step.overlap is not None else None
    took = duration(step.step_s) if step.step_s is not None else None
    shares = (f"{step.reward:.3f}", overlap, f"{step.tokens:.0f}", f"{step.staleness:.2f}", took)
    return (step.weight_version, *shares, step.rollouts, step.failed, step.batch_id)
