"""Reads the state of vLLM's KV cache from the statistics that it passes to its loggers after each step.

vLLM calls its classes of statistics unstable: all their names are in this file. A field that is missing counts as no
report, since an exception here would end the engine's output.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..kv_figures import KvMeter


def kv_logger(meter: KvMeter, base: type, clock: Callable[[], float] = time.monotonic) -> type:
    """Return a class for `stat_loggers` of `AsyncLLM.from_engine_args`, whose objects report to a meter.

    Args:
        meter: gets each step's figures.
        base: vLLM's `StatLoggerBase`.
        clock: of the meter.
    """

    class KvLogger(base):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._index = engine_index
            meter.add_cache(engine_index, capacity_tokens(vllm_config.cache_config))

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            used = getattr(scheduler_stats, "kv_cache_usage", None)
            if used is None:
                return
            waiting = getattr(scheduler_stats, "num_waiting_reqs", 0)
            waiting += getattr(scheduler_stats, "num_skipped_waiting_reqs", 0)
            preempted = getattr(iteration_stats, "num_preempted_reqs", 0)
            meter.note_step(self._index, used, waiting, preempted, clock())

        def log_engine_initialized(self) -> None:
            """Part of vLLM's protocol; there is nothing to log."""

    return KvLogger


def capacity_tokens(cache_config: Any) -> int:
    """Return how many tokens a KV cache holds; 0: unknown. Of hybrid models, blocks times block size is wrong."""
    tokens = getattr(cache_config, "kv_cache_size_tokens", None)
    if tokens:
        return int(tokens)
    return int((getattr(cache_config, "num_gpu_blocks", None) or 0) * (getattr(cache_config, "block_size", None) or 0))
