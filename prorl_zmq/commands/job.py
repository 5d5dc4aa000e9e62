"""`prorl job`: the states of one job over time."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..system.duration import duration
from ..system.logs import one_line
from ..wire.messages.base import POLICY
from . import options
from .tables import console
from .target import Target

if TYPE_CHECKING:
    from ..errors import ErrorInfo
    from ..wire.messages.front_door import JobTrace, Span

BAR, WIDE_BAR = 12, 40
"""Characters of the whole timeline, in a normal terminal and in a wide one."""
WIDE = 120


def job(
    target: Target,
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="The job's id, or an unambiguous beginning of it.")],
    as_json: options.AsJson = False,
    turns: Annotated[
        bool, typer.Option("--turns", help="Print its last turns too: of a running job as far as it has come.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print turns as they come, until it ends.")] = False,
) -> None:
    """Show what a job went through: each state, where, how long, what ended it, and the outcome.

    It shows jobs that wait or run, and about 10,000 of the newest ended ones, collected or not.

    --turns and --follow show the conversation: of a running job at most 20 turns and 5,000 tokens at a time, from its
    stage process; of an ended one, from its result.
    """
    if as_json and (turns or follow):
        raise typer.BadParameter("--json prints the trace alone; leave out --turns and --follow")
    with target.brokers() as brokers:
        trace = brokers.trace(job_id)
        if as_json:
            print(json_text(trace))
            return
        screen = console()
        screen.print(layout(trace, screen.width))
        if turns or follow:
            from .job_turns import JobTurns

            said = JobTurns(brokers, trace.job_id, screen)
            if follow:
                said.follow()
                screen.print()
                screen.print(layout(brokers.trace(trace.job_id), screen.width))
            else:
                said.show()


def json_text(trace: JobTrace) -> str:
    """Return a trace with every field, in ASCII: it holds text of other machines and goes to a terminal."""
    fields = msgspec.structs.asdict(trace)
    del fields["request_id"]
    fields["spans"] = [msgspec.structs.asdict(span) for span in trace.spans]
    return json.dumps(msgspec.to_builtins(fields))


def layout(trace: JobTrace, width: int = 80) -> Group:
    """Lay a trace out for a terminal of at least 80 columns."""
    characters = WIDE_BAR if width >= WIDE else BAR
    table = Table(box=None, pad_edge=False)
    for header in ("after", "for"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("try", justify="right", no_wrap=True)
    table.add_column("timeline", no_wrap=True, width=characters)
    table.add_column("where", overflow="fold")
    total_s = trace.ended_s if trace.ended_s is not None else trace.age_s
    rows = [(span.start_s, _row(span, trace.age_s, total_s, characters)) for span in trace.spans]
    rows += [(restart_s, ("", "", "", "", Text("the broker was restarted"))) for restart_s in trace.restarts]
    for start_s, row in sorted(rows, key=lambda one: one[0]):
        table.add_row(duration(start_s), *row)
    parts: list[Text | Table] = [*_head(trace), Text(), table]
    lost = [span for span in trace.spans if span.error is not None]
    parts += [Text(), *map(_loss, lost)] if lost else []
    if trace.left_out:
        parts.append(Text(f"{trace.left_out} events in the middle are not kept, since there were so many"))
    return Group(*parts)


def bar(span: Span, total_s: float, characters: int) -> str:
    """Draw a span's position in the job's life; a short one has one character."""
    end_s = total_s if span.end_s is None else span.end_s
    scale = characters / total_s if total_s > 0 else 0.0
    start = min(int(span.start_s * scale), characters - 1)
    length = max(1, min(round(end_s * scale), characters) - start)
    return " " * start + ("░" if span.place == "queued" else "█") * length


def _head(trace: JobTrace) -> list[Text]:
    accepted = datetime.fromtimestamp(trace.accepted_at).astimezone().isoformat(" ", "milliseconds")
    names = [f"job {trace.job_id}"]
    names += [f"task {trace.task}"] if trace.task else []
    names += [f"group {trace.group_id}"] if trace.group_id else []
    names += [f"model {trace.model}"] if trace.model != POLICY else []
    lines = [", ".join(names), f"accepted {accepted} by the broker's clock"]
    if trace.outcome is None or trace.ended_s is None:
        lines.append(f"has not ended after {duration(trace.age_s)}")
    else:
        reward = f", reward {trace.reward:g}" if trace.reward is not None else ""
        size = f", {trace.tokens} tokens" if trace.tokens else ""
        stop = f", stopped by {trace.stop_reason}" if trace.stop_reason else ""
        lines.append(f"{trace.outcome} after {duration(trace.ended_s)}{reward}{size}{stop}")
        if trace.error is not None:
            lines.append(_text(trace.error))
        kept = trace.collected_s is None
        lines.append("not collected yet" if kept else f"collected after {duration(trace.collected_s or 0.0)}")
    return [Text(one_line(line)) for line in lines]


def _row(span: Span, age_s: float, total_s: float, characters: int) -> tuple[str | Text, ...]:
    still = span.end_s is None
    where = f"{span.stage_id} on {span.node}" if span.stage_id else ""
    where += f", backend {', then '.join(span.backends)}" if span.backends else ""
    style = "dim" if span.place == "queued" else "red" if span.error else "green"
    return (
        duration((age_s if span.end_s is None else span.end_s) - span.start_s) + (" …" if still else ""),
        Text(f"{span.phase.upper()} {span.place}"),
        str(span.attempt),
        Text(bar(span, total_s, characters), style=style),
        Text(one_line(where)),
    )


def _loss(span: Span) -> Text:
    place = f"{span.phase.upper()} of try {span.attempt}" + (f", {span.stage_id}" if span.stage_id else "")
    return Text(one_line(f"{place}: {_text(span.error)}" if span.error is not None else place))


def _text(error: ErrorInfo) -> str:
    return f"{error.code}: {error.message}"
