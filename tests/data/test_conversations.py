"""Rewards, and whose the parts of a rollout's arrays are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from prorl_zmq.data.conversations import (
    LARGEST_REWARD,
    finite_reward,
    own_rewards,
    rewards_problem,
    segments_of_own_model,
)
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.jobs import ConversationPart, Outcome, Result


@pytest.mark.parametrize("value", [0, -1, True, 1e38, -LARGEST_REWARD, np.float32(0.25), np.float64(-2), np.int8(3)])
def test_any_finite_number_is_a_reward(value: Any) -> None:
    assert finite_reward(value) == float(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e39, 10**400, None, "1", b"1", bytearray(b"1"), [1], 1j])
def test_nothing_else_is(value: Any) -> None:
    assert finite_reward(value) is None


def test_the_largest_reward_is_one_in_float32_too() -> None:
    assert np.finfo(np.float32).max == LARGEST_REWARD


def result(**fields: Any) -> Result:
    told = {"job_id": "a", "task": "t", "outcome": Outcome.COMPLETED, "tokens": 9, "turns": 3, "segments": (4,)}
    return Result(**(told | fields))


WHITE, BLACK = ConversationPart("white", 0, 1), ConversationPart("black", 1, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"conversations": (WHITE, BLACK), "turn_rewards": ((0, 0.5), (2, -1.0))},
        {"conversations": (ConversationPart("user", 0, 0, trained=False), ConversationPart("main", 0, 2))},
        {"tokens": 0, "turns": 0, "segments": (), "conversations": (ConversationPart("main", 0, 0),)},
    ],
)
def test_parts_that_fit_have_no_problem(fields: dict[str, Any]) -> None:
    assert rewards_problem(result(**fields), [1.0]) == ""


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"reward": math.inf}, "the reward inf is not finite"),
        ({"conversations": (WHITE,)}, "the conversations have 1 segments, and the trajectory 2"),
        ({"conversations": (BLACK,)}, "the conversation black cannot begin at segment 1; the next one is 0"),
        ({"conversations": (WHITE, ConversationPart("white", 1, 1))}, "two conversations have one name: white, white"),
        (
            {"conversations": (WHITE, ConversationPart("black", 1, 1, reward=math.nan))},
            "the conversation black has the reward nan, which is not finite",
        ),
        ({"turn_rewards": ((3, 1.0),)}, "rewards of the turns [3] do not fit a trajectory of 3 turns"),
        ({"turn_rewards": ((1, 1.0), (1, 1.0))}, "rewards of the turns [1, 1] do not fit a trajectory of 3 turns"),
        ({"turn_rewards": ((2, 1.0), (1, 1.0))}, "rewards of the turns [2, 1] do not fit a trajectory of 3 turns"),
        ({"turn_rewards": ((1, math.nan),)}, "turn 1 has the reward nan, which is not finite"),
        (
            {"tokens": 0, "turns": 0, "segments": (), "turn_rewards": ((0, 1.0),)},
            "rewards of the turns [0] do not fit a trajectory of 0 turns",
        ),
    ],
)
def test_parts_that_do_not_fit_are_named(fields: dict[str, Any], problem: str) -> None:
    assert rewards_problem(result(**fields)) == problem


def test_a_reward_of_a_conversation_that_is_not_finite_is_named() -> None:
    assert rewards_problem(result(), [1.0, math.nan]) == "the reward nan is not finite"


def test_a_rollout_without_these_features_is_sent_without_their_fields() -> None:
    sent = codec.unpack(codec.encode(result()))
    assert sorted(sent) == ["job_id", "outcome", "segments", "task", "tokens", "turns"]


def test_segments_of_own_model_leave_out_those_of_others() -> None:
    parts = (
        ConversationPart("white", 0, 2),
        ConversationPart("critic", 2, 1, model="b"),
        ConversationPart("black", 3, 1),
    )
    assert segments_of_own_model(result(segments=(2, 4, 7), conversations=parts)) == [(0, 2), (2, 4), (7, 9)]
    assert segments_of_own_model(result()) == [(0, 4), (4, 9)]


def test_only_roles_of_the_jobs_own_model_make_a_group_informative() -> None:
    parts = (
        ConversationPart("white", 0, 1, reward=0.5),
        ConversationPart("critic", 1, 1, reward=-1.0, model="b"),
        ConversationPart("user", 2, 0, trained=False),
    )
    assert own_rewards(result(conversations=parts)) == (("white", 0.5),)
    assert own_rewards(result(conversations=parts, reward=None)) == (("white", 0.5),)
    assert own_rewards(result()) == ()
