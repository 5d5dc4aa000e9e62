"""What a vLLM says of the records that it gives, by its configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from prorl_zmq.inference.vllm.vllm_records import VllmRecords

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
