"""Trajectories and groups for people: one line for `repr`, text for reading, a table for a notebook.

Texts of models, tools and graders may contain terminal escapes and markup: control characters and HTML are escaped, and
long texts are cut.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, NamedTuple

from ..system.logs import one_line, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..wire.messages.jobs import Result

CODE_CHARACTERS = 64
NOTE_CHARACTERS = 4_000
SHOWN_TURNS = 100
"""Most turns in a notebook's table."""
NOTHING = "–"


class TurnLine(NamedTuple):
    """One turn, in figures."""

    role: str
    """With the conversation's name and the turn's reward, as in `turn_label`."""
    start: int
    end: int
    generated: int
    """Tokens that the policy generated."""
    logprob: float | None
    """Their mean log-prob; None if there are none."""


class RolloutLine(NamedTuple):
    """One rollout of a group, in figures."""

    result: Result
    generated: int
    versions: tuple[int, ...]


def turn_label(role: str, conversation: str, reward: float | None) -> str:
    """Return a turn's role, with the name of its conversation and its own reward if it has them."""
    parts = [role, conversation, f"reward {reward:g}" if reward is not None else ""]
    return " · ".join(one_line(part) for part in parts if part)


def trajectory_line(result: Result, generated: int, versions: Sequence[int]) -> str:
    """Return what became of a job in one line."""
    parts = [_outcome(result)]
    parts += [f"reward {result.reward:g}"] if result.reward is not None else []
    parts += [f"{result.tokens} tokens ({generated} generated) in {result.turns} turns"]
    parts += [f"weights {_versions(versions)}"] if versions else []
    return f"{one_line(result.job_id)}: {', '.join(parts)}"


def group_line(group_id: str, prompt_id: str, rewards: Sequence[float], versions: Sequence[int]) -> str:
    """Return what a group came to in one line."""
    parts = [f"{len(rewards)} rollouts of {one_line(prompt_id)}", f"rewards {_rewards(rewards)}"]
    parts += [f"weights {_versions(versions)}"] if versions else []
    return f"{one_line(group_id)}: {', '.join(parts)}"


def conversation_text(head: str, turns: Iterable[tuple[str, str]], result: Result) -> str:
    """Return a conversation for reading, each turn below its role, and the error if there is one."""
    parts = [head, *(f"[{role}]\n{printable(text)}" for role, text in turns)]
    if result.error is not None:
        parts.append(f"[{one_line(result.error.code, CODE_CHARACTERS)}]\n{printable(result.error.message)}")
    return "\n\n".join(parts)


def trajectory_html(head: str, turns: Sequence[TurnLine], result: Result) -> str:
    """Return a trajectory for a notebook: its turns in figures, its notes and its error folded up."""
    rows = [
        (turn.role, f"{turn.start}", f"{turn.end}", f"{turn.generated}", _number(turn.logprob, ".3f"))
        for turn in turns[:SHOWN_TURNS]
    ]
    parts = [f"<b>{escape(head)}</b>", _table(("turn", "from token", "to", "generated", "mean log-prob"), rows)]
    if len(turns) > SHOWN_TURNS:
        parts.append(f"<p>{len(turns) - SHOWN_TURNS} more turns are not shown.</p>")
    if result.error is not None:
        parts.append(_folded(result.error.code, result.error.message))
    parts += [_folded(name, text) for name, text in result.notes.items()]
    return f"<div>{''.join(parts)}</div>"


def group_html(head: str, rollouts: Sequence[RolloutLine]) -> str:
    """Return a group for a notebook, one rollout in each row."""
    rows = [
        (
            line.result.job_id,
            _outcome(line.result),
            _number(line.result.reward, "g"),
            f"{line.result.tokens}",
            f"{line.generated}",
            f"{line.result.turns}",
            _versions(line.versions) or NOTHING,
            one_line(line.result.stop_reason),
        )
        for line in rollouts
    ]
    names = ("job", "outcome", "reward", "tokens", "generated", "turns", "weights", "stopped by")
    return f"<div><b>{escape(head)}</b>{_table(names, rows)}</div>"


def _outcome(result: Result) -> str:
    outcome = result.outcome.replace("_", " ")
    return outcome if result.error is None else f"{outcome} ({one_line(result.error.code, CODE_CHARACTERS)})"


def _rewards(rewards: Sequence[float]) -> str:
    shown = ", ".join(f"{reward:g}" for reward in rewards[:8])
    return shown if len(rewards) <= 8 else f"{shown}, …"


def _versions(versions: Sequence[int]) -> str:
    """Return ascending weight versions, of several the first and the last."""
    return f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else "".join(map(str, versions))


def _number(value: float | None, spec: str) -> str:
    return NOTHING if value is None else format(value, spec)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _folded(name: str, text: str) -> str:
    shown = printable(text[:NOTE_CHARACTERS])
    if len(text) > NOTE_CHARACTERS:
        shown += f"\n… ({len(text) - NOTE_CHARACTERS} more characters)"
    return f"<details><summary>{escape(one_line(name))}</summary><pre>{escape(shown)}</pre></details>"
