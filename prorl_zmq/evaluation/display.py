"""Rollouts, figures and comparisons of runs as `rich` objects, for `prorl view`, `prorl eval` and `prorl tasks try`.

Texts of models, tools and data files pass `clean` and become `Text`, never markup, so they cannot send escapes to the
terminal.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from ..data.printed import turn_label
from ..system.duration import duration
from ..system.logs import one_line, printable
from .passes import percentage
from .summary import seconds_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from ..wire.messages.jobs import Result
    from .passes import Estimate
    from .run_comparison import Comparison
    from .run_folder import Sample
    from .summary import Summary
    from .transcript import Transcript, TurnText

SHOWN_TEXT = 40_000
"""Most characters of one turn or note that are shown; the files have all."""
SHOWN_LINE = 4_000
SHOWN_NAME = 40
SHOWN_SETTING = 60
SHOWN_MESSAGE = 120
SHOWN_FAILURES = 8
"""Reasons in the table of a summary; the reports have all."""
SHOWN_CHANGES = 50
"""Most problems that became better or worse in a comparison; the dashboard shows more."""
NOTHING = "–"
ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
OUTCOME_STYLES = {
    "completed": "",
    "failed": "red",
    "timeout": "red",
    "infrastructure_error": "bold red",
    "cancelled": "dim",
}
SCALE = (
    (0.9, "black on #a7d8a9"),
    (0.5, "black on #d9e8a0"),
    (0.2, "black on #ffe08a"),
    (0.05, "black on #ffb570"),
    (0.0, "black on #ff8a80"),
)
"""How a generated token looks, by the least probability that has the look."""
CONTEXT_STYLE = "dim"


def clean(text: str, limit: int = SHOWN_TEXT) -> str:
    """Return a text as lines of printable characters: escapes for all others, its beginning if it is long."""
    more = len(text) - limit
    shown = printable(text[:limit], SHOWN_LINE)
    return f"{shown}\n… ({more} more characters)" if more > 0 else shown


def short(text: str, limit: int = SHOWN_NAME) -> str:
    shown = one_line(text)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def rollout_table(rollouts: Sequence[Sample]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("job", no_wrap=True)
    for header in HEADERS:
        table.add_column(header, justify="right" if header in NUMBERS else "left", overflow="fold")
    for rollout in rollouts:
        table.add_row(Text(rollout.job_id), *_row(rollout))
    return table


HEADERS = ("problem", "sample", "outcome", "reward", "tokens", "turns", "stopped by", "error")
NUMBERS = frozenset({"sample", "reward", "tokens", "turns"})


def _row(rollout: Sample) -> tuple[Text, ...]:
    result = rollout.result
    style = "green" if rollout.solved else OUTCOME_STYLES.get(result.outcome, "")
    reward = NOTHING if result.reward is None else f"{result.reward:g}"
    turns = result.metrics.get("turns", float(result.turns))
    error = result.error.code if result.error is not None else ""
    return (
        Text(short(rollout.problem) or NOTHING),
        Text(rollout.name),
        Text(one_line(result.outcome), style=style),
        Text(reward, style=style),
        Text(str(result.tokens)),
        Text(f"{turns:g}"),
        Text(one_line(result.stop_reason)),
        Text(one_line(error), style="red"),
    )


def head(rollout: Sample) -> Text:
    result = rollout.result
    lines = [f"job {rollout.job_id}, task {result.task}" + (f", {rollout.problem}" if rollout.problem else "")]
    parts = [result.outcome.replace("_", " ")]
    parts += [f"reward {result.reward:g}"] if result.reward is not None else []
    parts += [f"stopped by {result.stop_reason}"] if result.stop_reason else []
    turns = result.metrics.get("turns", 0)
    parts += [f"{result.tokens} tokens", f"{turns:g} turn{'' if turns == 1 else 's'} of the model"]
    parts += [duration(seconds_of(result))]
    parts += [f"model {rollout.model}"] if rollout.model else []
    lines += [", ".join(parts), *conversations_text(result)]
    text = Text("\n".join(one_line(line) for line in lines))
    if result.error is not None:
        text.append(f"\n{clean(result.error.code)}: {clean(result.error.message)}", style="red")
    return text


def conversations_text(result: Result) -> list[str]:
    """Return a line for each conversation: its reward, and why it stopped."""
    lines = []
    for part in result.conversations:
        reward = result.reward if part.reward is None else part.reward
        parts = [f"conversation {part.name}", "" if part.trained else "not trained"]
        parts += [f"reward {reward:g}" if part.trained and reward is not None else ""]
        parts += [f"stopped by {part.stop_reason}" if part.stop_reason else ""]
        lines.append(", ".join(each for each in parts if each))
    return lines


def turn_title(number: int, turn: TurnText, transcript: Transcript) -> Text:
    generated = [logprob for logprob in transcript.logprobs[turn.start : turn.end] if logprob is not None]
    parts = [f"{number}  {turn_label(turn.role, turn.conversation, turn.reward)}", f"tokens {turn.start} to {turn.end}"]
    if generated:
        mean = sum(generated) / len(generated)
        parts.append(f"{sum(transcript.mask[turn.start : turn.end])} generated, mean log-prob {mean:.3f}")
    return Text(" · ".join(parts), style=f"bold {ROLE_STYLES[turn.role]}")


def turn_body(turn: TurnText, transcript: Transcript) -> Text:
    """Return what a turn says, and below it the tool calls that were read out of it."""
    if turn.text is not None:
        body = Text(clean(turn.text).strip("\n"))
    else:
        ids = transcript.token_ids[turn.start : turn.end]
        body = Text(clean(" ".join(map(str, ids))), style="dim")
    for call in turn.calls:
        what = f"→ {clean(call.name)}({clean(call.arguments)})" if call.name else f"→ no call: {clean(call.arguments)}"
        body.append(f"\n{what}", style="bold")
    return body


def turns_text(transcript: Transcript) -> Group:
    """Return all turns, each with its title, behind an empty line."""
    parts: list[RenderableType] = []
    for number, turn in enumerate(transcript.turns):
        parts += [Text(), turn_title(number, turn, transcript), turn_body(turn, transcript)]
    return Group(*parts)


def legend() -> Text:
    text = Text("not generated", style=CONTEXT_STYLE)
    text.append("   generated, by probability: ", style="not dim")
    for index, (least, style) in enumerate(SCALE):
        above = f" < {SCALE[index - 1][0]:g} " if index and not least else f" ≥ {least:g} "
        text.append(above, style=f"not dim {style}")
        text.append(" ", style="not dim")
    return text


def token_text(transcript: Transcript) -> Text:
    """Return the tokens as running text, each in the colour of its probability."""
    text = Text()
    for index in range(len(transcript.token_ids)):
        text.append(_token(transcript, index, running=True), style=token_style(transcript, index))
    return text


def token_table(transcript: Transcript) -> Table:
    """Return a row per token: its number, text, id, whether it was generated, its log-prob and its weight version."""
    table = Table(box=None, pad_edge=False)
    for header in TOKEN_HEADERS:
        table.add_column(header, justify="left" if header in ("token", "mask") else "right", overflow="fold")
    for index, token_id in enumerate(transcript.token_ids):
        generated = bool(transcript.mask[index])
        logprob = transcript.logprobs[index]
        table.add_row(
            Text(str(index)),
            Text(_token(transcript, index, running=False), style=token_style(transcript, index)),
            Text(str(token_id)),
            Text("generated" if generated else ""),
            Text("" if logprob is None else f"{logprob:.4f}"),
            Text(str(transcript.versions[index]) if generated else ""),
        )
    return table


TOKEN_HEADERS = ("#", "token", "id", "mask", "log-prob", "version")


def token_style(transcript: Transcript, index: int) -> str:
    if not transcript.mask[index]:
        return CONTEXT_STYLE
    logprob = transcript.logprobs[index]
    if logprob is None:
        return "bold"
    probability = math.exp(min(0.0, logprob))
    return next(style for least, style in SCALE if probability >= least)


def notes_text(rollout: Sample) -> Text:
    result = rollout.result
    text = Text()
    for name, note in result.notes.items():
        text.append(f"{clean(name)}\n", style="bold")
        text.append(f"{clean(note)}\n\n")
    if result.error is not None:
        text.append("error\n", style="bold")
        text.append(f"{clean(result.error.code)}: {clean(result.error.message)}\n")
        for name, value in result.error.fields.items():
            text.append(f"  {clean(name)}: {clean(str(value))}\n")
        text.append("\n")
    metrics = {name: f"{value:.6g}" for name, value in result.metrics.items()}
    timings = {name: duration(seconds) for name, seconds in result.timings.items()}
    for title, values in (("metrics", metrics), ("timings", timings)):
        if values:
            text.append(f"{title}\n", style="bold")
            text.append("".join(f"  {clean(name)}: {value}\n" for name, value in values.items()))
            text.append("\n")
    text.append(f"attempt {result.attempt}, backend {clean(result.backend) or NOTHING}", style="dim")
    if result.logprobs_mode:
        text.append(f", {result.logprobs_mode}", style="dim")
    return text


def summary_tables(summary: Summary) -> Group:
    """Lay the figures out for the terminal, in 80 columns."""
    figures = Table("", *_counts("value", "95 % interval", "problems"), title="evaluation", title_justify="left")
    for row in summary.passes:
        figures.add_row(f"pass@{row.k}", *_share(row.estimate))
    if summary.infrastructure_errors:
        figures.add_row("pass@1, errors as failures", *_share(summary.pass_1_with_errors))
    rewards = {"mean reward": summary.reward, **{f"mean reward of {name}": one for name, one in summary.agents.items()}}
    for name, reward in rewards.items():
        if reward is not None:
            between = f"{reward.low:.3f} – {reward.high:.3f}" if math.isfinite(reward.low) else NOTHING
            figures.add_row(name, f"{reward.value:.3f}", between, str(reward.problems))
    parts: list[RenderableType] = [figures]
    if summary.failures:
        failures = Table(title="failures", title_justify="left")
        failures.add_column("reason", overflow="fold", min_width=24)
        failures.add_column("rollouts", justify="right", min_width=8)
        failures.add_column("what one said", overflow="fold")
        for failure in summary.failures[:SHOWN_FAILURES]:
            said = Text(one_line(failure.message, SHOWN_MESSAGE))  # of another machine, on its way to a terminal
            failures.add_row(Text(one_line(failure.reason)), str(failure.count), said)
        parts.append(failures)
    tokens = {row.name: row for row in summary.tokens}
    if tokens:
        named = ("prompt_tokens", "cached_tokens", "generated_tokens")
        counts = ", ".join(f"{tokens[name].total:,.0f} {name.partition('_')[0]}" for name in named)
        parts.append(f"tokens: {counts}" + (f"; cost: {summary.cost.total:,.4g}" if summary.cost else ""))
    stays = [row for row in summary.times if not row.within and row.share is not None and row.share >= 0.005]
    if stays:
        parts.append("time: " + ", ".join(f"{row.name.replace('_', ' ')} {row.share:.0%}" for row in stays))
    return Group(*parts)


def _share(estimate: Estimate | None) -> tuple[str, str, str]:
    if estimate is None:
        return NOTHING, NOTHING, "0"
    low, high = percentage(estimate.low), percentage(estimate.high)
    return percentage(estimate.value), f"{low} – {high}", str(estimate.problems)


def comparison_text(comparison: Comparison, first: str, second: str) -> Group:
    """Return two runs compared, which are called A and B from the second line on."""
    parts: list[RenderableType] = [Text(f"A  {one_line(first)}\nB  {one_line(second)}\n")]
    if comparison.settings:
        settings = Table("settings that differ", "A", "B", box=None, pad_edge=False)
        for row in comparison.settings:
            settings.add_row(
                *(Text(short(cell, SHOWN_SETTING), overflow="fold") for cell in (row.name, row.first, row.second))
            )
        parts += [settings, ""]
    else:
        parts.append("all settings are equal\n")
    parts.append(_shared_text(comparison))
    if comparison.shared:
        parts += ["", _solved_table(comparison), "", _test_text(comparison)]
    if comparison.changed:
        parts += ["", _changes_table(comparison)]
    if len(comparison.changed) > SHOWN_CHANGES:
        parts.append(Text(f"{len(comparison.changed) - SHOWN_CHANGES} more are not shown", style="dim"))
    return Group(*parts)


def _shared_text(comparison: Comparison) -> Text:
    parts = [f"{comparison.shared} problems are shared"]
    for count, run in ((comparison.only_first, "A"), (comparison.only_second, "B")):
        parts += [f"{count} count only in {run}"] if count else []
    text = Text("; ".join(parts))
    if not comparison.shared and not comparison.same_data:
        text.append("\nThe data files differ, and no problem of one has the name of one of the other.", style="yellow")
    return text


def _solved_table(comparison: Comparison) -> Table:
    table = Table("problems solved at least once", *_counts("problems", "share"), box=None, pad_edge=False)
    rows = (
        ("by both", comparison.solved_by_both),
        ("only by A", comparison.solved_by_first),
        ("only by B", comparison.solved_by_second),
        ("by none", comparison.solved_by_none),
    )
    for name, count in rows:
        table.add_row(name, str(count), f"{count / comparison.shared:.1%}")
    return table


def _test_text(comparison: Comparison) -> Text:
    if comparison.first_share is None or comparison.second_share is None or comparison.difference is None:
        return Text()
    difference = comparison.difference
    low, high = 100 * difference.low, 100 * difference.high
    return Text(
        f"rollouts that solved: A {comparison.first_share:.1%}, B {comparison.second_share:.1%}; difference "
        f"{100 * difference.value:+.1f} points, 95 % interval {low:+.1f} to {high:+.1f}"
        f"\np = {comparison.p_value:.3g}, {comparison.test}"
    )


def _changes_table(comparison: Comparison) -> Table:
    """Return the problems that changed; of many, those that changed most in either direction."""
    most = sorted(comparison.changed, key=lambda each: -abs(each.change))[:SHOWN_CHANGES]
    table = Table("problem", *_counts("A solved", "B solved", "change"), box=None, pad_edge=False)
    for each in sorted(most, key=lambda each: each.change):
        table.add_row(
            Text(short(each.name)),
            f"{each.first_solved} of {each.first_samples}",
            f"{each.second_solved} of {each.second_samples}",
            Text(f"{100 * each.change:+.0f}", style="green" if each.change > 0 else "red"),
        )
    return table


def _counts(*names: str) -> list[Column]:
    return [Column(name, justify="right") for name in names]


def _token(transcript: Transcript, index: int, *, running: bool) -> str:
    if transcript.tokens is None:
        return f"{transcript.token_ids[index]} "
    token = transcript.tokens[index]
    if running:
        return clean(token).replace("\n", "⏎\n")
    return one_line(token).replace(" ", "·")
