"""What a vLLM says of the records that it gives, by its configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prorl_zmq.inference.engine import Wanted
from prorl_zmq.inference.records import check_records
from prorl_zmq.inference.vllm.vllm_records import VllmRecords
from prorl_zmq.wire.records import Recorded

NEEDS = "vLLM needs --return-sampling-mask, or --max-logprobs -1 with --logprobs-mode processed_logprobs"


def records(
    *, most: int = 64, masks: bool = False, experts: bool = False, mixture: bool = True, cached: bool = True
) -> Any:
    model = SimpleNamespace(
        max_logprobs=most, return_sampling_mask=masks, logprobs_mode="processed_logprobs", is_moe=mixture
    )
    return VllmRecords.of(
        SimpleNamespace(
            model_config=model,
            aux_output_config=SimpleNamespace(enable_return_routed_experts=experts),
            cache_config=SimpleNamespace(enable_prefix_caching=cached),
        )
    )


@pytest.mark.parametrize(("most", "limit"), [(1, 1), (64, 64), (1024, 1024), (5000, 1024), (-1, 1024)])
def test_the_limit_of_top_logprobs_is_the_flags(most: int, limit: int) -> None:
    assert records(most=most).top_limit == limit


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"mixture": False}, "its model is dense"),
        ({"cached": False}, "--no-enable-prefix-caching"),
        ({}, "--enable-return-routed-experts"),
    ],
)
def test_why_there_are_no_experts_is_said(flags: dict[str, bool], said: str) -> None:
    found = records(**flags)
    assert found.names == ("top_logprobs",)
    assert said in found.unrecorded["experts"]
    assert found.unrecorded["sampling_mask"] == NEEDS


def test_reasons_are_of_the_other_records_only() -> None:
    assert records(most=-1, experts=True).unrecorded == {}
    assert [*records(most=0, masks=True).unrecorded] == ["top_logprobs", "experts"]
    assert all(len(reason) <= 256 for reason in records(most=0).unrecorded.values())


@pytest.mark.parametrize("record", [("top_logprobs:4",), ("sampling_mask",), ("top_logprobs:4", "sampling_mask")])
def test_a_turn_that_new_weights_end_before_its_first_token_has_empty_records(record: tuple[str, ...]) -> None:
    nothing = SimpleNamespace(token_ids=[], logprobs=SimpleNamespace(token_ids=[], logprobs=[]))
    found = records(most=-1).arrays(nothing, Recorded.parse(record), Wanted(record, 0), 7)
    check_records(found, record, np.zeros(0, np.int32), positions=6)
    assert all(len(array) == 0 for array in found.values())
    assert found.keys() == {
        *(("top_ids", "top_logprobs") if "top_logprobs:4" in record else ()),
        *(("mask_ids", "mask_counts") if "sampling_mask" in record else ()),
    }
