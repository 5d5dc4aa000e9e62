"""The checks of a generation's records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prorl_zmq.errors import EngineFailed
from prorl_zmq.inference.engine import EngineDescription, Generation, Wanted
from prorl_zmq.inference.records import (
    asked_records,
    check_records,
    joined_records,
    mask_arrays,
    narrow_experts,
    rows_wanted,
    top_arrays,
)
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.jobs import Sampling

RECORD = ("top_logprobs:2", "sampling_mask", "experts")
TOKENS = np.array([4, 5, 6], np.int32)


def good() -> dict[str, Any]:
    return {
        "top_ids": np.array([[4, 1], [5, 2], [3, 6]], np.int32),
        "top_logprobs": np.array([[-0.5, -1], [-0.1, -3], [-1, -1]], np.float32),
        "mask_ids": np.array([1, 4, 5, 3, 6], np.int32),
        "mask_counts": np.array([2, 1, 2], np.int32),
        "experts": np.zeros((6, 4, 2), np.uint8),
    }


def check(records: dict[str, Any]) -> None:
    check_records(records, RECORD, TOKENS, positions=6, vocabulary=9)


def test_right_arrays_and_missing_records_pass() -> None:
    check(good())
    check({})
    check({"experts": np.zeros((0, 4, 2), np.uint16)})


@pytest.mark.parametrize(
    ("name", "wrong", "problem"),
    [
        ("top_ids", np.zeros((3, 3), np.int32), "of shape"),
        ("top_ids", np.zeros((3, 2), np.int64), "of type int64"),
        ("top_ids", np.full((3, 2), 9, np.int32), "outside of 0 to 8"),
        ("top_logprobs", np.full((3, 2), -np.inf, np.float32), "not a logarithm"),
        ("top_logprobs", np.full((3, 2), np.nan, np.float32), "not a logarithm"),
        ("top_logprobs", np.full((3, 2), 0.5, np.float32), "not a logarithm"),
        ("top_logprobs", np.array([[-1, -0.5]] * 3, np.float32), "descending"),
        ("mask_ids", np.array([1, 4, 5, 3, 7], np.int32), "token 6 that was drawn at 2 is missing"),
        ("mask_ids", np.array([1, 5, 4, 3, 6], np.int32), "token 4 that was drawn at 0 is missing"),
        ("mask_ids", np.array([1, 4, 5, -3, 6], np.int32), "outside of 0 to 8"),
        ("mask_counts", np.array([2, 2, 2], np.int32), "do not add up"),
        ("mask_counts", np.array([2, 0, 3], np.int32), "do not add up"),
        ("experts", np.zeros((7, 4, 2), np.uint8), "at most 6 rows"),
        ("experts", np.zeros((6, 8), np.uint8), "at most 6 rows"),
        ("experts", np.zeros((6, 4, 2), np.int32), "of type int32"),
        ("other", np.zeros(1), "not asked for"),
    ],
)
def test_a_wrong_array_is_refused(name: str, wrong: Any, problem: str) -> None:
    with pytest.raises(EngineFailed, match=problem):
        check({**good(), name: wrong})


def test_half_a_record_is_refused() -> None:
    records = good()
    del records["mask_counts"]
    with pytest.raises(EngineFailed, match="only one of mask_ids and mask_counts"):
        check(records)


def test_impossible_candidates_become_no_token() -> None:
    made = top_arrays(np.array([[3, 8]]), np.array([[0.0, -np.inf]]))
    assert made["top_ids"].tolist() == [[3, -1]]
    assert made["top_logprobs"].tolist() == [[0.0, -9999.0]]
    check_records(made, ("top_logprobs:2",), np.array([3], np.int32), positions=0, vocabulary=9)


def test_masks_are_ragged() -> None:
    made = mask_arrays([[7, 3], [1]])
    assert made["mask_ids"].tolist() == [7, 3, 1]
    assert made["mask_counts"].tolist() == [2, 1]
    assert mask_arrays([])["mask_ids"].dtype == np.int32


def test_known_rows_are_left_out_and_a_gap_gives_no_rows() -> None:
    routes = np.arange(12).reshape(6, 2, 1)
    assert rows_wanted(routes, 0, 4)["experts"][:, 0, 0].tolist() == [8, 10]
    assert rows_wanted(routes, 3, 4)["experts"][:, 0, 0].tolist() == [2, 4, 6, 8, 10]
    assert not rows_wanted(routes, 5, 4)
    assert not rows_wanted(routes, 0, 6)
    assert not rows_wanted(None, 0, 0)


def test_the_number_of_experts_decides_the_type_of_ids() -> None:
    assert narrow_experts(np.zeros((2, 2, 1), np.int64), 256).dtype == np.uint8
    assert narrow_experts(np.zeros((2, 2, 1), np.int64), 257).dtype == np.uint16


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (Wanted(("routes",)), "unknown record"),
        (Wanted(("experts",)), "toy as it was started does not give the records experts"),
        (Wanted(("top_logprobs:10",)), "more than the vocabulary of 9"),
        (Wanted(("sampling_mask",)), "sampling_mask needs"),
        (Wanted(("top_logprobs:2",), 6), "6 rows of experts cannot be known of a prompt of 5"),
    ],
)
def test_what_an_engine_cannot_give_is_refused(wanted: Wanted, problem: str) -> None:
    toy = EngineDescription("toy", ChatSettings(), 50, 9, 4, "processed_logprobs", ("top_logprobs", "sampling_mask"))
    with pytest.raises(EngineFailed, match=problem) as caught:
        asked_records(wanted, 5, Sampling(), toy)
    assert caught.value.fields["refused"]
    assert asked_records(Wanted(("sampling_mask", "top_logprobs:9")), 5, Sampling(top_k=3), toy).top == 9


def part(tokens: int, **records: Any) -> Generation:
    return Generation(np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), (), "abort", 0, records)


def rows(first: int, count: int) -> Any:
    return np.arange(first, first + count, dtype=np.uint8).reshape(count, 1, 1)


def test_a_part_without_tokens_keeps_its_rows_in_their_place() -> None:
    parts = [
        part(0, experts=rows(0, 3)),
        part(2, experts=rows(3, 2), mask_ids=np.array([7, 8, 9]), mask_counts=np.array([1, 2])),
        part(1, experts=rows(5, 1), mask_ids=np.array([5]), mask_counts=np.array([1])),
    ]
    joined = joined_records(parts)
    assert joined["experts"].ravel().tolist() == [*range(6)], "the prompt's rows came with the part without tokens"
    assert (joined["mask_ids"].tolist(), joined["mask_counts"].tolist()) == ([7, 8, 9, 5], [1, 2, 1])
    assert [*joined_records([*parts, part(1, experts=rows(6, 1))])] == ["experts"], "rows without a place are left out"
