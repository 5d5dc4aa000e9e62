"""Reads the state of a server's KV cache from its `/metrics`, in the text format of Prometheus.

vLLM's names are known; a server without them has no figures. Values that are no numbers count as no report. Counters
that fall belong to a restarted server.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from ..kv_figures import KvMeter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..kv_figures import KvFigures

USED, WAITING, PREEMPTED, CONFIG = (
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions_total",
    "vllm:cache_config_info",
)
PREFIXES = (f"{USED}{{", f"{WAITING}{{", f"{PREEMPTED}{{", f"{CONFIG}{{")
"""What a line begins with that is read: of a server's thousands of lines, only a few."""
INFO_LIMIT = 10**12
"""Most tokens that a capacity is believed to have."""


class KvMetrics:
    """The figures of one server, of which `/metrics` is read from time to time."""

    def __init__(self) -> None:
        self._meter = KvMeter()
        self._preempted: dict[int, int] = {}
        """The last counter of each engine."""

    def read(self, text: str, now: float) -> KvFigures | None:
        """Return the figures since the last call; None: this text has none.

        Args:
            text: the answer of `/metrics`.
            now: the time in seconds.
        """
        found: dict[str, dict[int, float]] = {USED: {}, WAITING: {}, PREEMPTED: {}}
        for name, labels, value in _samples(text):
            index = _index(labels)
            if name == CONFIG:
                self._meter.add_cache(index, _capacity(labels))
            elif math.isfinite(value) and value >= 0:
                found[name][index] = value
        for index, used in found[USED].items():
            total = int(found[PREEMPTED].get(index, 0))
            last = self._preempted.get(index, total)
            self._preempted[index] = total
            preempted = total - last if total >= last else total
            self._meter.note_step(index, used, int(found[WAITING].get(index, 0)), preempted, now)
        return self._meter.take(now) if found[USED] else None


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    lines = [line for line in text.splitlines() if line.startswith(PREFIXES)]
    for line in lines:
        try:
            (family,) = text_string_to_metric_families(f"{line}\n")
        except ValueError:
            continue
        yield from ((sample.name, sample.labels, sample.value) for sample in family.samples)


def _index(labels: dict[str, str]) -> int:
    text = labels.get("engine", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else 0


def _capacity(labels: dict[str, str]) -> int:
    tokens = _number(labels, "kv_cache_size_tokens") or _number(labels, "num_gpu_blocks") * _number(
        labels, "block_size"
    )
    return tokens if tokens <= INFO_LIMIT else 0


def _number(labels: dict[str, str], name: str) -> int:
    text = labels.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 0
