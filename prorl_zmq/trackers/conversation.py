"""Sample conversations: a few rows of text for a tracker's table, cleaned and bounded.

Control characters, marks that reorder text, and named secrets are removed here, since trackers' pages show these texts.
Adapters show them as text, never as HTML or Markdown. Long turns and long conversations lose their middle, and one
table fits into one packet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from ..data.conversations import labels_of
from ..data.printed import turn_label
from ..data.trajectory import Role
from ..system.logs import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..data.trajectory import Trajectory
    from ..wire.messages.jobs import Result

Item = TypeVar("Item")
ROWS = 8
TURN_CHARACTERS = 4_000
TEXT_CHARACTERS = 12_000
TURN_TOKENS = 4_000
"""Most tokens of a turn that are decoded."""
TURNS = 40
"""Most turns of a trajectory that are decoded; of more, the first and the last, with their numbers."""
TABLE_BYTES = 120_000
"""Of one table, packed: a packet must fit into the buffer of a socket, which is 208 KiB by default."""


class Conversation(msgspec.Struct, frozen=True):
    """One row."""

    job_id: str
    task: str
    outcome: str
    reward: float | None
    tokens: int
    text: str


COLUMNS = Conversation.__struct_fields__


def conversation(result: Result, turns: Iterable[tuple[str, str]]) -> Conversation:
    """Return the row of a rollout, from its turns' roles and texts."""
    text = "\n\n".join(f"[{role}]\n{clean(text)}" for role, text in turns)
    if result.error is not None:
        text += f"\n\n[{result.error.code}]\n{clean(result.error.message)}"
    return Conversation(
        result.job_id, result.task, str(result.outcome), result.reward, result.tokens, shorten(text, TEXT_CHARACTERS)
    )


def sample_conversations(
    trajectories: Sequence[Trajectory], decode: Callable[[list[int]], str], rows: int = ROWS
) -> list[Conversation]:
    """Return some of the trajectories as rows of text, from the least reward to the greatest.

    Args:
        trajectories: Of one step; nothing but the rows' own are decoded.
        decode: The tokenizer's: token ids to text.
        rows: How many, at most 8.
    """
    return [conversation(each.result, _turns(each, decode)) for each in spread(trajectories, _rank, min(rows, ROWS))]


def spread(items: Sequence[Item], rank: Callable[[Item], float], count: int = ROWS) -> list[Item]:
    """Return so many items at even distances in the order of their rank."""
    ranked = sorted(items, key=rank)
    if len(ranked) <= count:
        return ranked
    return [ranked[index] for index in np.linspace(0, len(ranked) - 1, count).round().astype(int).tolist()]


def reward_rank(result: Result) -> float:
    """Return the reward; what has none comes first."""
    return float("-inf") if result.reward is None else result.reward


def fitting(rows: Sequence[Conversation]) -> list[Conversation]:
    """Return the first rows that make one table."""
    kept, left = [], TABLE_BYTES
    for row in rows[:ROWS]:
        left -= len(msgspec.msgpack.encode(row))
        if left < 0:
            break
        kept.append(row)
    return kept


def clean(text: str) -> str:
    """Return a text's lines, printable and bounded."""
    return printable(shorten(text, TURN_CHARACTERS))


def shorten(text: str, limit: int) -> str:
    """Return a text without its middle, if it is long."""
    more = len(text) - limit
    return text if more <= 0 else f"{text[: limit // 2]}\n… {more} characters left out …\n{text[-(limit // 2) :]}"


def _rank(trajectory: Trajectory) -> float:
    return reward_rank(trajectory.result)


def _turns(trajectory: Trajectory, decode: Callable[[list[int]], str]) -> Iterable[tuple[str, str]]:
    turns, labels = trajectory.turns.tolist(), labels_of(trajectory.result, trajectory.turns)
    for number, (start, end, role) in enumerate(turns):
        if TURNS // 2 <= number < len(turns) - TURNS // 2:
            continue
        ids = trajectory.token_ids[start:end].tolist()
        if len(ids) > TURN_TOKENS:
            ids = ids[: TURN_TOKENS // 2] + ids[-(TURN_TOKENS // 2) :]
        name = turn_label(Role(role).name.lower(), *labels.get(number, ("", None)))
        yield f"{name}, turn {number}" if len(turns) > TURNS else name, decode(ids)
