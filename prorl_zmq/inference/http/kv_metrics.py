"""Reads the state of a server's KV cache from its `/metrics`, in the text format of Prometheus.

The names of vLLM and SGLang are known; a server without them has no figures. Values that are no numbers count as no
report. Counters that fall belong to a restarted server.

Those of SGLang were read in its source: `python/sglang/srt/observability/metrics_collector.py` of commit 016d8605e458,
after version 0.5.21. Its `token_usage` leaves out cached prefixes that no request uses, as vLLM's figure does. Each
tensor or pipeline rank may report the same cache, and each priority its part of the queue. A counter is missing until
it first counts. All of it needs `--enable-metrics`.
"""

from __future__ import annotations

import math
import time
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from ...errors import EngineFailed
from ..kv_figures import KvMeter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..kv_figures import KvFigures
    from .connections import Connections


class Names(NamedTuple):
    """What a kind of server calls its figures."""

    used: str
    waiting: str
    preempted: str
    capacity: str
    """A gauge of tokens, or of labels with the number of blocks."""
    cache: str
    """The label that tells caches apart."""


VLLM = Names(
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions_total",
    "vllm:cache_config_info",
    "engine",
)
SGLANG = Names(
    "sglang:token_usage",
    "sglang:num_queue_reqs",
    "sglang:num_retracted_requests_total",
    "sglang:max_total_num_tokens",
    "dp_rank",
)
DIALECTS = {"vllm": VLLM, "completions": VLLM, "sglang": SGLANG}
"""By the dialects of servers (see `dialects`)."""
READ_EVERY_S = 2.0
TIMEOUT_S = 0.8
"""Longest wait for an answer: it is a part of the engine's health check."""
ANSWER_LIMIT, LINES_LIMIT, LINE_LIMIT = 2**21, 1024, 4096
"""Most bytes of an answer, lines of it that are read, and characters of each: an answer is read on the host's loop."""
INFO_LIMIT = 10**12
"""Most tokens that a capacity is believed to have."""


class KvMetrics:
    """The figures of one server, of which `/metrics` is read from time to time.

    Args:
        names: what it calls them.
    """

    def __init__(self, names: Names = VLLM) -> None:
        self._names = names
        self._prefixes = tuple(f"{name}{{" for name in (names.used, names.waiting, names.preempted, names.capacity))
        """What a line begins with that is read: of a server's thousands of lines, only a few."""
        self._meter = KvMeter()
        self._preempted: dict[int, int] = {}
        """The last counter of each engine."""

    def read(self, text: str, now: float) -> KvFigures | None:
        """Return the figures since the last call; None: this text has none.

        Args:
            text: the answer of `/metrics`.
            now: the time in seconds.
        """
        names = self._names
        found: dict[str, dict[int, float]] = {names.used: {}, names.waiting: {}, names.preempted: {}}
        named = set()
        for name, labels, value in _samples(text, self._prefixes):
            if labels.get("priority"):
                continue  # a part of the requests
            index = _index(labels, names.cache)
            named.add(index)
            if name == names.capacity:
                self._meter.add_cache(index, _tokens(value) if names is SGLANG else _capacity(labels))
            elif math.isfinite(value) and value >= 0:
                found[name][index] = max(value, found[name].get(index, 0.0))
        if not found[names.used]:
            return None
        self._meter.keep_only(named)
        self._preempted = {index: total for index, total in self._preempted.items() if index in named}
        for index, used in found[names.used].items():
            total = int(found[names.preempted].get(index, 0))
            last = self._preempted.get(index, total)
            self._preempted[index] = total
            preempted = total - last if total >= last else total
            self._meter.note_step(index, used, int(found[names.waiting].get(index, 0)), preempted, now)
        return self._meter.take(now)


class KvProbe:
    """Asks a server for its figures, at most each `READ_EVERY_S`; a server that does not answer has none."""

    def __init__(
        self, connections: Connections, names: Names = VLLM, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connections = connections
        self._clock = clock
        self._metrics = KvMetrics(names)
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


def _samples(text: str, prefixes: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str], float]]:
    lines = (line for line in text.splitlines() if line.startswith(prefixes) and len(line) <= LINE_LIMIT)
    for line in islice(lines, LINES_LIMIT):
        try:
            (family,) = text_string_to_metric_families(f"{line}\n")
            samples = [(sample.name, sample.labels, float(sample.value)) for sample in family.samples]
        except (ValueError, OverflowError):
            continue
        yield from samples


def _index(labels: dict[str, str], name: str) -> int:
    text = labels.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else 0


def _tokens(value: float) -> int:
    return int(value) if 0 <= value <= INFO_LIMIT else 0


def _capacity(labels: dict[str, str]) -> int:
    tokens = _number(labels, "kv_cache_size_tokens") or _number(labels, "num_gpu_blocks") * _number(
        labels, "block_size"
    )
    return tokens if tokens <= INFO_LIMIT else 0


def _number(labels: dict[str, str], name: str) -> int:
    text = labels.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 0
