"""`prorl status`, without an event loop, whose import would take longer than the command."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group

from ..service.rollout_brokers import summed
from ..wire.messages.backends import BackendList, ListBackends
from ..wire.messages.base import POLICY, new_id
from ..wire.messages.jobs import Phase
from . import options
from .backend_tables import adapter_tables, backend_table
from .tables import end_with, print_json, show, table, text
from .target import Target

if TYPE_CHECKING:
    from rich.table import Table

    from ..service.rollout_brokers import EachBroker
    from ..wire.messages.batches import BatchStatus
    from ..wire.messages.front_door import ServiceStatus

RANDOM_ID = re.compile("[0-9a-f]{32}")
"""The session of a client that gave no name."""


class _Seen(NamedTuple):
    status: ServiceStatus
    listed: BackendList
    problems: list[str]


def status(
    target: Target,
    watch: options.Watch = False,
    as_json: options.AsJson = False,
) -> None:
    """Show the stage processes, queues, outcomes and backends of a service, summed up over its rollout brokers.

    The exit code is 1 if a broker did not answer; what the others report is shown.
    """
    with target.each_broker() as brokers:
        if as_json:
            seen = _look(brokers)
            print_json({"status": seen.status, "backends": seen.listed.backends, "problems": seen.problems})
        else:
            seen = show(lambda: _look(brokers), _layout, watch=watch)
    end_with(seen.problems)


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
    return Group(tables, f"up for {seen.status.uptime_s:.0f} s", *map(text, seen.problems))


def status_tables(status: ServiceStatus, listed: BackendList) -> Group:
    rows = []
    for phase in Phase:
        of_phase = [stage for stage in status.stages if stage.role == phase]
        busy, slots = sum(stage.busy for stage in of_phase), sum(stage.slots for stage in of_phase)
        if phase == Phase.SCORE and not of_phase:
            continue
        rows.append((phase.upper(), len(of_phase), busy, slots, status.queued.get(phase, 0)))
    stages = table("stage", ">processes", ">busy", ">slots", ">queued", rows=rows, title="stages")
    ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(status.outcomes.items())) or "none"
    line = f"ended: {ended}; uncollected: {status.uncollected}; redelivered: {status.redelivered}"
    if status.lost_blocks:
        line += f"; trajectories lost with their nodes: {status.lost_blocks}"
    served = f"tasks: {', '.join(status.tasks) or 'none'}"
    batches = [batch_table(status.batches)] if status.batches else []
    backends = [backend_table(listed.backends, listed.starts), *adapter_tables(listed)]
    return Group(stages, *backends, *batches, line, served)


def session_name(session: str) -> str:
    """Return a session's given name; of a random id, the beginning."""
    return session[:12] if RANDOM_ID.fullmatch(session) else session


def batch_table(batches: tuple[BatchStatus, ...]) -> Table:
    named = any(one.model != POLICY for one in batches)
    rows = (
        (
            *(
                one.batch_id[:12],
                session_name(one.session),
                *([one.model] if named else []),
                f"{one.state}: {one.problem}" if one.problem else one.state,
            ),
            *(f"{one.kept} of {one.target_groups}", one.group_size, one.dropped, one.given_up, one.under_way),
            *(one.in_flight, one.failed, one.prompts),
        )
        for one in batches
    )
    numbers = (">kept", ">size", ">dropped", ">given\nup", ">under\nway", ">jobs", ">failed", ">prompts")
    headers = ("=batch", "session", *(["model"] if named else []), "state", *numbers)
    return table(*headers, rows=rows, title="batches", box=None, padding=(0, 1, 0, 0))
