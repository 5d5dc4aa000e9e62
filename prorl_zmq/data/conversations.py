"""The rewards of a rollout's conversations and turns."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..errors import MalformedMessage

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    from ..wire.messages.jobs import Result
    from ..wire.messages.stages import PhaseDone, PhaseFailed

LARGEST_REWARD = 3.4028234663852886e38
"""The largest float32, in which trainers have rewards."""


def finite_reward(value: Any) -> float | None:
    """Return a reward as a float; None if it is not a number, NaN, infinite, or beyond the range of float32."""
    try:
        number = float(value) if not isinstance(value, str | bytes | bytearray) else math.nan
    except (TypeError, ValueError, OverflowError):
        return None
    return number if -LARGEST_REWARD <= number <= LARGEST_REWARD else None


def rewards_problem(ended: Result | PhaseDone | PhaseFailed, rewards: Iterable[float] = ()) -> str:
    """Return why a rollout's rewards are invalid, or do not fit its segments and turns; empty: they are right.

    Args:
        ended: the rollout.
        rewards: of its conversations.
    """
    for reward in (ended.reward, *rewards):
        if reward is not None and finite_reward(reward) is None:
            return f"the reward {reward} is not finite"
    if ended.conversations or ended.turn_rewards:
        return _misfit(ended)
    return ""


def trained_rewards(result: Result) -> dict[str, float | None]:
    """Return the rewards of the trained conversations that are in the arrays, by name; empty: only `main` is."""
    if not result.conversations:
        return {}
    parts = [part for part in result.conversations if part.trained and part.segments]
    return {part.name: result.reward if part.reward is None else part.reward for part in parts}


def own_rewards(result: Result) -> tuple[tuple[str, float], ...]:
    """Return the names and rewards of the trained conversations with the job's own model; empty: only `main` is."""
    if not result.conversations:
        return ()
    others = {part.name for part in result.conversations if part.model}
    rewards = trained_rewards(result).items()
    return tuple((name, reward) for name, reward in rewards if reward is not None and name not in others)


def tokens_of_own_model(ended: Result | PhaseDone | PhaseFailed) -> list[slice]:
    """Return where the arrays have tokens of conversations with the job's own model.

    Raises:
        MalformedMessage: the conversations have more segments than the trajectory.
    """
    if not any(part.model for part in ended.conversations):
        return [slice(0, ended.tokens)]
    edges = [0, *ended.segments, ended.tokens]
    own = [part for part in ended.conversations if part.segments and not part.model]
    if any(part.first_segment + part.segments >= len(edges) for part in own):
        raise MalformedMessage(f"the conversations have more segments than the trajectory's {len(edges) - 1}")
    return [slice(edges[part.first_segment], edges[part.first_segment + part.segments]) for part in own]


def segments_of_own_model(ended: Result | PhaseDone | PhaseFailed) -> list[tuple[int, int]]:
    """Return the first token, and the token after the last, of each segment with the job's own model.

    Raises:
        MalformedMessage: as `tokens_of_own_model`.
    """
    own = tokens_of_own_model(ended)
    edges = pairwise([0, *ended.segments, ended.tokens])
    return [(start, end) for start, end in edges if any(one.start <= start < one.stop for one in own)]


def labels_of(result: Result, turns: NDArray[np.int32]) -> dict[int, tuple[str, float | None]]:
    """Return the conversation's name and the turn's own reward, by index, for turns that have either."""
    rewards = dict(result.turn_rewards)
    if not result.conversations:
        return {turn: ("", reward) for turn, reward in rewards.items()}
    starts = [0, *result.segments]
    spoken = [part for part in result.conversations if part.segments]
    firsts = [starts[part.first_segment] for part in spoken]
    whose = [spoken[bisect_right(firsts, start) - 1].name for start in turns[:, 0].tolist()] if spoken else []
    return {turn: (name, rewards.get(turn)) for turn, name in enumerate(whose)}


def _misfit(ended: Result | PhaseDone | PhaseFailed) -> str:
    parts, first = ended.conversations, 0
    for part in parts:
        if part.first_segment != first:
            return f"the conversation {part.name} cannot begin at segment {part.first_segment}; the next one is {first}"
        if part.reward is not None and finite_reward(part.reward) is None:
            return f"the conversation {part.name} has the reward {part.reward}, which is not finite"
        first += part.segments
    if len({part.name for part in parts}) < len(parts):
        return f"two conversations have one name: {', '.join(part.name for part in parts)}"
    segments = len(ended.segments) + 1 if ended.tokens else 0
    if parts and first != segments:
        return f"the conversations have {first} segments, and the trajectory {segments}"
    turns = [turn for turn, _ in ended.turn_rewards]
    if turns != sorted(set(turns)) or turns[-1:] >= [ended.turns]:
        return f"rewards of the turns {turns[-8:]} do not fit a trajectory of {ended.turns} turns"
    for turn, reward in ended.turn_rewards:
        if finite_reward(reward) is None:
            return f"turn {turn} has the reward {reward}, which is not finite"
    return ""
