from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from prorl_zmq.inference.kv_figures import KvFigures, KvMeter
from prorl_zmq.inference.vllm.vllm_kv_logger import capacity_tokens, kv_logger


def test_use_is_averaged_over_time() -> None:
    meter = KvMeter()
    meter.add_cache(0, 1_000)
    meter.take(0.0)
    meter.note_step(0, 0.2, 0, 0, 0.0)
    meter.note_step(0, 0.6, 3, 1, 8.0)
    meter.note_step(0, 0.6, 2, 1, 9.0)
    assert meter.take(10.0) == KvFigures(1_000, pytest.approx(0.28), 2, 2)
    assert meter.take(20.0) == KvFigures(1_000, pytest.approx(0.6), 0, 2), "no step changed it"


def test_an_engine_that_has_done_nothing_uses_nothing() -> None:
    meter = KvMeter()
    assert meter.take(1.0) is None
    meter.add_cache(0, 0)
    meter.note_step(0, 0.5, 0, 0, 1.0)
    assert meter.take(2.0) is None, "a share of an unknown capacity says nothing"
    meter.add_cache(0, 64)
    assert meter.take(2.0) is not None
    meter = KvMeter()
    meter.add_cache(0, 64)
    assert meter.take(5.0) == KvFigures(64, 0.0, 0, 0)
    assert meter.take(6.0) == KvFigures(64, 0.0, 0, 0)


def test_the_first_figures_are_the_state_at_that_time() -> None:
    meter = KvMeter()
    meter.add_cache(0, 64)
    meter.note_step(0, 0.5, 0, 0, 1_000.0)
    assert meter.take(1_001.0) == KvFigures(64, 0.5, 0, 0)


def test_caches_of_one_engine_are_added_up() -> None:
    meter = KvMeter()
    meter.add_cache(0, 3_000)
    meter.add_cache(1, 1_000)
    meter.take(0.0)
    for index, used in enumerate((0.4, 0.8)):
        meter.note_step(index, used, 2, 1, 0.0)
    meter.note_step(7, 1.0, 9, 9, 0.0)
    assert meter.take(2.0) == KvFigures(4_000, pytest.approx(0.5), 2, 4)


def config(**fields: Any) -> Any:
    return SimpleNamespace(cache_config=SimpleNamespace(**fields))


def test_vllm_reports_each_step() -> None:
    meter, clock = KvMeter(), iter((0.0, 5.0))
    logger = kv_logger(meter, object, lambda: next(clock))(config(num_gpu_blocks=440, block_size=32), 0)
    meter.take(0.0)
    scheduler = SimpleNamespace(kv_cache_usage=0.5, num_waiting_reqs=2, num_skipped_waiting_reqs=1)
    logger.record(scheduler, SimpleNamespace(num_preempted_reqs=4), None, 0)
    logger.record(scheduler_stats=None, iteration_stats=None, mm_cache_stats=None, engine_idx=0)
    logger.record(SimpleNamespace(other=1), None)
    logger.record(SimpleNamespace(kv_cache_usage=0.5), None)
    logger.log_engine_initialized()
    assert meter.take(10.0) == KvFigures(14_080, pytest.approx(0.5), 4, 0)


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"kv_cache_size_tokens": 999, "num_gpu_blocks": 10, "block_size": 16}, 999),
        ({"kv_cache_size_tokens": None, "num_gpu_blocks": 10, "block_size": 16}, 160),
        ({"num_gpu_blocks": None, "block_size": 16}, 0),
        ({}, 0),
    ],
)
def test_the_capacity_is_what_vllm_says(fields: dict[str, Any], tokens: int) -> None:
    assert capacity_tokens(config(**fields).cache_config) == tokens
