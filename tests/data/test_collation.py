from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from finished_groups import Turn, chat, group, groups, rewritten, trajectory, with_tool
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq import Group, Trajectory, collate
from prorl_zmq.data.rows import TRUNCATING
from prorl_zmq.data.trajectory import Role
from prorl_zmq.errors import NotTrainable
from prorl_zmq.stages.episode import StopReason
from prorl_zmq.wire.messages.jobs import Outcome

BY_TOKEN = {"token_ids": 77, "loss_mask": False, "logprobs": 0.0, "weight_versions": -1}
"""The arrays over tokens, and what pads them."""


def test_the_arrays_of_a_batch() -> None:
    batch = [group("a", chat([1, 2], [3, 4], 0.0), with_tool(1.0, stop_reason="max_turns")), group("b", rewritten(0.5))]
    arrays = collate(batch, pad_id=77)
    assert {key: array.tolist() for key, array in arrays.items() if array.ndim == 1} == {
        "lengths": [5, 11, 5, 8],
        "prompt_lengths": [3, 4, 3, 7],
        "rewards": [0.0, 1.0, 0.5, 0.5],
        "group": [0, 0, 1, 1],
        "trajectory": [0, 1, 2, 2],
        "is_last": [True, True, False, True],
        "truncated": [False, True, False, False],
        "oldest_version": [0, 4, 4, 5],
    }
    assert arrays["token_ids"].tolist() == [
        [1, 2, 9, 3, 4, 77, 77, 77, 77, 77, 77],
        [1, 2, 3, 9, 10, 11, 8, 20, 21, 9, 12],
        [2, 3, 9, 10, 11, 77, 77, 77, 77, 77, 77],
        [2, 3, 9, 11, 8, 20, 9, 12, 77, 77, 77],
    ]
    assert arrays["logprobs"][1].tolist() == [0, 0, 0, 0, -0.25, -0.5, 0, 0, 0, 0, -1]
    assert arrays["weight_versions"][1].tolist() == [-1, -1, -1, -1, 4, 4, -1, -1, -1, -1, 5]
    assert arrays["attention_mask"].sum(1).tolist() == [5, 11, 5, 8]


def test_dtypes() -> None:
    kinds = {key: array.dtype.name for key, array in collate([group("a", with_tool(), chat([1], [2]))]).items()}
    assert kinds == {
        "token_ids": "int32",
        "attention_mask": "bool",
        "loss_mask": "bool",
        "logprobs": "float32",
        "weight_versions": "int32",
        "lengths": "int32",
        "prompt_lengths": "int32",
        "rewards": "float32",
        "token_rewards": "float32",
        "group": "int32",
        "trajectory": "int32",
        "is_last": "bool",
        "truncated": "bool",
        "oldest_version": "int32",
    }


@given(groups(), st.integers(1, 9))
def test_everything_comes_back_out_of_the_padded_arrays(batch: list[Group], multiple_of: int) -> None:
    arrays = collate(batch, pad_id=77, multiple_of=multiple_of)
    members = [(number, member) for number, one in enumerate(batch) for member in one.trajectories]
    rows = [
        (number, index, member, segment)
        for index, (number, member) in enumerate(members)
        for segment in member.segments()
        if segment.loss_mask.any()
    ]
    width = arrays["token_ids"].shape[1]
    assert width % multiple_of == 0
    assert width - multiple_of < max(len(segment.token_ids) for *_, segment in rows) <= width
    for row, (number, index, member, segment) in enumerate(rows):
        length = len(segment.token_ids)
        for key, padding in BY_TOKEN.items():
            assert arrays[key].shape == (len(rows), width)
            assert np.array_equal(arrays[key][row, :length], getattr(segment, key))
            assert (arrays[key][row, length:] == padding).all()
        assert arrays["attention_mask"][row].tolist() == [True] * length + [False] * (width - length)
        start = int(arrays["prompt_lengths"][row])
        assert not segment.loss_mask[:start].any()
        assert segment.loss_mask[start]
        assert arrays["rewards"][row] == member.reward
        last = int(segment.loss_mask.nonzero()[0][-1])
        assert arrays["token_rewards"][row].nonzero()[0].tolist() == [last] * bool(member.reward)
        assert arrays["token_rewards"][row, last] == member.reward
        assert (arrays["group"][row], arrays["trajectory"][row], arrays["lengths"][row]) == (number, index, length)
        assert arrays["oldest_version"][row] == segment.weight_versions[segment.loss_mask].min()
    assert arrays["trajectory"][arrays["is_last"]].tolist() == list(range(len(members)))
    generated = sum(int(member.loss_mask.sum()) for _, member in members)
    assert int(arrays["loss_mask"].sum()) == generated


def test_one_row_is_a_view() -> None:
    one = with_tool()
    arrays = collate([group("a", one)])
    for key in BY_TOKEN:
        assert arrays[key].ctypes.data == getattr(one, key).ctypes.data
        assert np.shares_memory(arrays[key], getattr(one, key))


def test_rows_of_one_length_in_one_block_are_a_view() -> None:
    turns = [
        Turn(Role.USER, [2, 3]),
        Turn(Role.ASSISTANT, [9], [(10, -0.25, 4)]),
        Turn(Role.USER, [4, 5], begins_segment=True),
        Turn(Role.ASSISTANT, [9], [(11, -0.5, 5)]),
    ]
    one = trajectory(turns)
    arrays = collate([group("a", one)])
    for key in BY_TOKEN:
        assert arrays[key].ctypes.data == getattr(one, key).ctypes.data
        assert arrays[key].tolist() == getattr(one, key).reshape(2, 4).tolist()
        assert not arrays[key].flags.writeable


def test_rows_of_one_length_in_two_blocks_are_copied() -> None:
    pair = (chat([1], [2]), chat([3], [4]))
    arrays = collate([group("a", *pair)])
    for key in BY_TOKEN:
        assert not any(np.shares_memory(arrays[key], getattr(one, key)) for one in pair)
        assert arrays[key].flags.writeable


@pytest.mark.parametrize("step", [-3, 2])
def test_rows_that_lie_in_another_order_or_over_each_other_are_copied(step: int) -> None:
    whole = trajectory([Turn(Role.USER, [1]), Turn(Role.ASSISTANT, [], [(2 + i, -0.5, 0) for i in range(8)])])
    starts = (3, 3 + step)
    parts = [cut(whole, start, start + 3) for start in starts]
    arrays = collate([group("a", *parts)])
    assert not np.shares_memory(arrays["token_ids"], whole.token_ids)
    assert arrays["token_ids"].tolist() == [whole.token_ids[start : start + 3].tolist() for start in starts]


def cut(whole: Trajectory, start: int, end: int) -> Trajectory:
    arrays = [getattr(whole, name)[start:end] for name in ("token_ids", "loss_mask", "logprobs", "weight_versions")]
    return Trajectory(*arrays, whole.turns[:0], whole.result)


def test_padding_to_a_length() -> None:
    batch = [group("a", chat([1, 2], [3, 4]))]
    assert collate(batch, length=8, multiple_of=4)["token_ids"].tolist() == [[1, 2, 9, 3, 4, 0, 0, 0]]
    assert collate(batch, length=5)["token_ids"].shape == (1, 5)
    with pytest.raises(NotTrainable, match="has 5 tokens, more than 4") as caught:
        collate(batch, length=4)
    assert (caught.value.job_id, caught.value.group_id) == (batch[0].trajectories[0].job_id, "a")


@pytest.mark.parametrize(("length", "multiple_of"), [(0, 1), (-8, 1), (6, 4), (None, 0), (None, -1)])
def test_a_width_that_cannot_be(length: int | None, multiple_of: int) -> None:
    with pytest.raises(ValueError, match="not a positive multiple"):
        collate([group("a", chat([1], [2]))], length=length, multiple_of=multiple_of)


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (lambda: chat([1], [2], None, job_id="bad"), "reward None"),
        (lambda: chat([1], [2], float("nan"), job_id="bad"), "reward nan"),
        (lambda: chat([1], [2], float("inf"), job_id="bad"), "reward inf"),
        (lambda: chat([1], [2], None, job_id="bad", outcome=Outcome.TIMEOUT), "ended as timeout"),
        (lambda: chat([1], [], job_id="bad"), "no token that the policy generated"),
        (lambda: trajectory([], job_id="bad"), "no token that the policy generated"),
        (lambda: chat([1], [2], job_id="bad", logprobs_mode="raw_logprobs"), "raw_logprobs, and job"),
        (
            lambda: trajectory([Turn(Role.ASSISTANT, [1], [(2, float("nan"), 0)])], job_id="bad"),
            "log-probs that are not finite",
        ),
    ],
)
def test_what_is_no_sample_is_refused_by_name(made: Any, problem: str) -> None:
    with pytest.raises(NotTrainable, match=f"^job bad .*{problem}") as caught:
        collate([group("a", chat([1], [2])), group("b", chat([1], [2]), made())])
    assert (caught.value.job_id, caught.value.group_id) == ("bad", "b")


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(NotTrainable, match="no groups"):
        collate([])
    with pytest.raises(NotTrainable, match="group a has no trajectories"):
        collate([group("a")])
    with pytest.raises(NotTrainable, match="group a is there twice"):
        collate([group("a", chat([1], [2])), group("a", chat([1], [2]))])


def test_a_segment_in_which_nothing_was_generated_gives_no_row() -> None:
    turns = [
        Turn(Role.USER, [2]),
        Turn(Role.ASSISTANT, [9], [(10, -0.25, 4)]),
        Turn(Role.USER, [2, 3], begins_segment=True),
    ]
    arrays = collate([group("a", trajectory(turns))])
    assert arrays["token_ids"].tolist() == [[2, 9, 10]]
    assert arrays["is_last"].tolist() == [True]


def test_limits_truncate_and_nothing_else_does() -> None:
    ended = {StopReason.DONE, StopReason.ENVIRONMENT, StopReason.FINISHED, StopReason.HARNESS_FAILED}
    assert set(StopReason) - TRUNCATING == ended
    assert set(StopReason) >= TRUNCATING


def test_groups_of_any_sizes() -> None:
    arrays = collate([group("a", chat([1], [2])), group("b", chat([1], [2]), chat([1], [3]), chat([1], [4]))])
    assert arrays["group"].tolist() == [0, 1, 1, 1]


def test_a_result_is_left_as_it_is() -> None:
    one = with_tool(1.0)
    before = msgspec.msgpack.encode(one.result)
    arrays = collate([group("a", one, chat([1], [2]))])
    arrays["token_ids"][:] = 0
    arrays["logprobs"][:] = 0
    assert one.token_ids.tolist() == [1, 2, 3, 9, 10, 11, 8, 20, 21, 9, 12]
    assert msgspec.msgpack.encode(one.result) == before
