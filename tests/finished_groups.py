"""Groups as a batch gives them, made by hand, and any group at all for Hypothesis."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from prorl_zmq import Group
from prorl_zmq.data.trajectory import Role, Trajectory
from prorl_zmq.data.trajectory_builder import TrajectoryBuilder
from prorl_zmq.wire.messages.jobs import ConversationPart, Outcome, Result

if TYPE_CHECKING:
    from collections.abc import Sequence

_numbers = count()


@dataclass(frozen=True)
class Turn:
    """One turn: some context, then some tokens of the policy, each an id, a log-prob and a weight version."""

    role: Role
    context: Sequence[int] = ()
    generated: Sequence[tuple[int, float, int]] = ()
    begins_segment: bool = False
    reward: float | None = None


def trajectory(turns: Sequence[Turn], reward: float | None = 1.0, **result: Any) -> Trajectory:
    """Give a finished job with these turns."""
    builder = TrajectoryBuilder()
    for turn in turns:
        if turn.begins_segment:
            builder.begin_segment()
        builder.begin_turn(turn.role)
        builder.add_context(np.array(turn.context, np.int32))
        if turn.generated:
            ids, logprobs, versions = zip(*turn.generated, strict=True)
            builder.add_generated(np.array(ids, np.int32), np.array(logprobs, np.float32), np.array(versions, np.int32))
    fields: dict[str, Any] = {
        "job_id": f"job-{next(_numbers)}",
        "task": "math",
        "outcome": Outcome.COMPLETED,
        "stop_reason": "done",
        "logprobs_mode": "processed_logprobs",
        "turn_rewards": tuple((index, turn.reward) for index, turn in enumerate(turns) if turn.reward is not None),
        **result,
    }
    whole = Result(reward=reward, tokens=builder.tokens, turns=builder.turns, segments=builder.segments, **fields)
    return Trajectory.from_frame(whole, builder.block().tobytes())


def chat(prompt: Sequence[int], answer: Sequence[int], reward: float | None = 1.0, **result: Any) -> Trajectory:
    """Give a conversation of one question and one answer, before which the template put the token 9."""
    version = result.pop("version", 0)
    generated = [(token, -0.5 * (index + 1), version) for index, token in enumerate(answer)]
    return trajectory([Turn(Role.USER, prompt), Turn(Role.ASSISTANT, [9], generated)], reward, **result)


def with_tool(reward: float | None = 1.0, **result: Any) -> Trajectory:
    """Give two turns of the policy, under two versions of the weights, with a tool's answer between them."""
    turns = [
        Turn(Role.SYSTEM, [1]),
        Turn(Role.USER, [2, 3]),
        Turn(Role.ASSISTANT, [9], [(10, -0.25, 4), (11, -0.5, 4)]),
        Turn(Role.TOOL, [8, 20, 21]),
        Turn(Role.ASSISTANT, [9], [(12, -1.0, 5)]),
    ]
    return trajectory(turns, reward, **result)


def rewritten(reward: float | None = 1.0, **result: Any) -> Trajectory:
    """Give a trajectory of two segments: the template took something out of the first turn."""
    turns = [
        Turn(Role.USER, [2, 3]),
        Turn(Role.ASSISTANT, [9], [(10, -0.25, 4), (11, -0.5, 4)]),
        Turn(Role.USER, [2, 3], begins_segment=True),
        Turn(Role.ASSISTANT, [9, 11]),
        Turn(Role.TOOL, [8, 20]),
        Turn(Role.ASSISTANT, [9], [(12, -1.0, 5)]),
    ]
    return trajectory(turns, reward, **result)


@dataclass(frozen=True)
class Talk:
    """One conversation of a rollout: its turns, of which the first begins a segment."""

    name: str
    turns: Sequence[Turn]
    reward: float | None = None
    stop_reason: str = ""
    trained: bool = True


def played(talks: Sequence[Talk], reward: float | None = 0.0, **result: Any) -> Trajectory:
    """Give a rollout of several conversations, one after the other in the arrays."""
    parts: list[ConversationPart] = []
    turns: list[Turn] = []
    for talk in talks:
        turns += [
            replace(turn, begins_segment=turn.begins_segment or not index) for index, turn in enumerate(talk.turns)
        ]
        first = parts[-1].first_segment + parts[-1].segments if parts else 0
        segments = int(bool(talk.turns)) + sum(turn.begins_segment for turn in talk.turns[1:])
        parts.append(ConversationPart(talk.name, first, segments, talk.trained, talk.reward, talk.stop_reason))
    return trajectory(turns, reward, conversations=tuple(parts), **result)


def group(name: str, *trajectories: Trajectory) -> Group:
    """Give a group of the prompt `prompt-NAME`."""
    return Group(name, f"prompt-{name}", trajectories)


TOKEN = st.integers(0, 2**31 - 1)
GENERATED = st.lists(st.tuples(TOKEN, st.floats(-1e6, 0, width=32), st.integers(0, 2**31 - 1)), min_size=0, max_size=4)
TURNS = st.builds(Turn, st.sampled_from(Role), st.lists(TOKEN, max_size=4), GENERATED, st.booleans())
SPOKEN = st.lists(TURNS, min_size=1, max_size=4).filter(lambda turns: any(turn.generated for turn in turns))
TRAJECTORIES = st.builds(
    trajectory,
    SPOKEN,
    st.floats(-100, 100, width=32),
    stop_reason=st.sampled_from(["done", "finished", "max_turns", "max_tokens", "context_length", "turn_length"]),
)


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    """Give one to three groups of one to three trajectories."""
    members = draw(st.lists(st.lists(TRAJECTORIES, min_size=1, max_size=3), min_size=1, max_size=3))
    return [group(f"g{index}", *trajectories) for index, trajectories in enumerate(members)]
