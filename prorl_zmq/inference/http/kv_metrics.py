"""Reads the state of a server's KV cache from its `/metrics`, in the text format of Prometheus.

vLLM's names are known; a server without them has no figures. Values that are no numbers count as no report. Counters
that fall belong to a restarted server.
"""

from __future__ import annotations

import math
import time
from itertools import islice
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from ...errors import EngineFailed
from ..kv_figures import KvMeter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..kv_figures import KvFigures
    from .connections import Connections

USED, WAITING, PREEMPTED, CONFIG = (
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions_total",
    "vllm:cache_config_info",
)
PREFIXES = (f"{USED}{{", f"{WAITING}{{", f"{PREEMPTED}{{", f"{CONFIG}{{")
"""What a line begins with that is read: of a server's thousands of lines, only a few."""
READ_EVERY_S = 2.0
TIMEOUT_S = 0.8
"""Longest wait for an answer: it is a part of the engine's health check."""
ANSWER_LIMIT, LINES_LIMIT, LINE_LIMIT = 2**21, 1024, 4096
"""Most bytes of an answer, lines of it that are read, and characters of each: an answer is read on the host's loop."""
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
        named = set()
        for name, labels, value in _samples(text):
            index = _index(labels)
            named.add(index)
            if name == CONFIG:
                self._meter.add_cache(index, _capacity(labels))
            elif math.isfinite(value) and value >= 0:
                found[name][index] = value
        if not found[USED]:
            return None
        self._meter.keep_only(named)
        self._preempted = {index: total for index, total in self._preempted.items() if index in named}
        for index, used in found[USED].items():
            total = int(found[PREEMPTED].get(index, 0))
            last = self._preempted.get(index, total)
            self._preempted[index] = total
            preempted = total - last if total >= last else total
            self._meter.note_step(index, used, int(found[WAITING].get(index, 0)), preempted, now)
        return self._meter.take(now)


class KvProbe:
    """Asks a server for its figures, at most each `READ_EVERY_S`; a server that does not answer has none."""

    def __init__(self, connections: Connections, clock: Callable[[], float] = time.monotonic) -> None:
        self._connections = connections
        self._clock = clock
        self._metrics = KvMetrics()
        self._next = -math.inf
        self._figures: KvFigures | None = None

    async def ask(self) -> None:
        if self._clock() < self._next:
            return
        self._next = self._clock() + READ_EVERY_S
        try:
            answer = await self._connections.control("GET", "/metrics", timeout_s=TIMEOUT_S, limit_bytes=ANSWER_LIMIT)
        except EngineFailed:
            return
        if answer.status == 200:
            self._figures = self._metrics.read(answer.body.decode(errors="replace"), self._clock())

    def take(self) -> KvFigures | None:
        """Return the figures of the last answer, once."""
        taken, self._figures = self._figures, None
        return taken


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    lines = (line for line in text.splitlines() if line.startswith(PREFIXES) and len(line) <= LINE_LIMIT)
    for line in islice(lines, LINES_LIMIT):
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
