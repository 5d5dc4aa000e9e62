"""`prorl status`, without an event loop: it is asked often, by people and programs, and a loop takes long to import."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from ..service.rollout_brokers import summed
from ..system.logs import one_line
from ..wire.messages.backends import BackendList, ListBackends
from ..wire.messages.base import new_id
from ..wire.messages.jobs import Phase
from .backend_tables import backend_table, show
from .options import columns
from .target import Target

if TYPE_CHECKING:
    from ..service.rollout_brokers import EachBroker
    from ..wire.messages.batches import BatchStatus
    from ..wire.messages.front_door import ServiceStatus

RANDOM_ID = re.compile("[0-9a-f]{32}")
"""The session of a client that named none."""


class _Seen(NamedTuple):
    status: ServiceStatus
    listed: BackendList
    problems: list[str]


def status(
    target: Target,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep the tables up to date until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Show the stage processes, queues, outcomes and backends of a service, summed up over its rollout brokers.

    The exit code is 1 if a broker did not answer; what others say is shown all the same.
    """
    with target.each_broker() as brokers:
        if as_json:
            seen = _look(brokers)
            told = {"status": seen.status, "backends": seen.listed.backends, "problems": seen.problems}
            print(msgspec.json.encode(told).decode())
        else:
            seen = show(lambda: _look(brokers), _layout, watch=watch)
    if seen.problems:
        raise typer.Exit(1)


def _look(brokers: EachBroker) -> _Seen:
    answers = brokers.ask(lambda client: client.status())
    answers.check()
    backends = brokers.ask(lambda client: client.backends.ask(ListBackends(new_id())), only=next(iter(answers.found)))
    problems = answers.silent()
    problems += [f"the backend broker does not answer: {error.message}" for error in backends.problems.values()]
    listed = next(iter(backends.found.values()), BackendList(""))
    return _Seen(summed(answers.found.values()), listed, problems)


def _layout(seen: _Seen) -> Group:
    tables = status_tables(seen.status, seen.listed)
    problems = (Text(one_line(problem)) for problem in seen.problems)
    return Group(tables, f"up for {seen.status.uptime_s:.0f} s", *problems)


def status_tables(status: ServiceStatus, listed: BackendList) -> Group:
    numbers = columns("processes", "busy", "slots", "queued", justify="right")
    stages = Table("stage", *numbers, title="stages", title_justify="left")
    for phase in Phase:
        of_phase = [stage for stage in status.stages if stage.role == phase]
        busy, slots = sum(stage.busy for stage in of_phase), sum(stage.slots for stage in of_phase)
        counts = (len(of_phase), busy, slots, status.queued.get(phase, 0))
        stages.add_row(phase.upper(), *map(str, counts))
    ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(status.outcomes.items())) or "none"
    line = f"ended: {ended}; uncollected: {status.uncollected}; redelivered: {status.redelivered}"
    if status.lost_blocks:
        line += f"; trajectories lost with their nodes: {status.lost_blocks}"
    served = f"tasks: {', '.join(status.tasks) or 'none'}"
    batches = [batch_table(status.batches)] if status.batches else []
    return Group(stages, backend_table(listed.backends, listed.starts), *batches, line, served)


def session_name(session: str) -> str:
    """Return a session as people named it; of a random id, the beginning."""
    return session[:12] if RANDOM_ID.fullmatch(session) else session


def batch_table(batches: tuple[BatchStatus, ...]) -> Table:
    """Lay the open batches out, in 80 columns."""
    names = ("kept", "size", "dropped", "given\nup", "under\nway", "jobs", "failed", "prompts")
    texts = (Column("batch", no_wrap=True, min_width=12), Column("session", overflow="fold"), Column("state"))
    counts = columns(*names, justify="right", no_wrap=True)
    table = Table(*texts, *counts, title="batches", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for batch in batches:
        groups = (batch.group_size, batch.dropped, batch.given_up, batch.under_way)
        numbers = map(str, (*groups, batch.in_flight, batch.failed, batch.prompts))
        state = f"{batch.state}: {batch.problem}" if batch.problem else batch.state
        cells = (batch.batch_id[:12], session_name(batch.session), one_line(state))
        table.add_row(*map(Text, cells), f"{batch.kept} of {batch.target_groups}", *numbers)
    return table
