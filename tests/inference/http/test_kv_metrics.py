from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from prorl_zmq.inference.http import kv_metrics
from prorl_zmq.inference.http.connections import Connections
from prorl_zmq.inference.http.kv_metrics import (
    ANSWER_LIMIT,
    LINE_LIMIT,
    LINES_LIMIT,
    READ_EVERY_S,
    SGLANG,
    KvMetrics,
    KvProbe,
)
from prorl_zmq.inference.kv_figures import KvFigures

from .conftest import FakeServer

if TYPE_CHECKING:
    from collections.abc import Callable

TEXT = """\
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="/models/some, \\"odd\\" {name}"} WAITING
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 77.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} USED
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0",model_name="m"} PREEMPTED
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="SIZE",num_gpu_blocks="100"} 1.0
"""

RANK = 'engine_type="unified",model_name="Qwen/Qwen3-8B",moe_ep_rank="0",pp_rank="0"'
SGLANG_TEXT = f"""\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{{{RANK},tp_rank="0"}} 12.0
# HELP sglang:num_queue_reqs The number of requests in the waiting queue.
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{{{RANK},tp_rank="0"}} 3.0
# HELP sglang:token_usage The token usage.
# TYPE sglang:token_usage gauge
sglang:token_usage{{{RANK},tp_rank="0"}} 0.25
# HELP sglang:kv_evictable_tokens Number of evictable (radix-cached) token slots in the KV cache pool.
# TYPE sglang:kv_evictable_tokens gauge
sglang:kv_evictable_tokens{{{RANK},tp_rank="0"}} 300000.0
# HELP sglang:num_retracted_reqs The number of retracted requests.
# TYPE sglang:num_retracted_reqs gauge
sglang:num_retracted_reqs{{{RANK},pid="17",tp_rank="0"}} 99.0
# HELP sglang:max_total_num_tokens Maximum total number of tokens in the KV cache pool.
# TYPE sglang:max_total_num_tokens gauge
sglang:max_total_num_tokens{{{RANK},tp_rank="0"}} 524288.0
# HELP sglang:max_total_num_tokens_swa Maximum total number of tokens in the SWA KV cache pool.
# TYPE sglang:max_total_num_tokens_swa gauge
sglang:max_total_num_tokens_swa{{{RANK},tp_rank="0"}} 7.0
# HELP sglang:prompt_tokens_total Number of prefill tokens processed.
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{{engine_type="unified",model_name="Qwen/Qwen3-8B"}} 8.128902e+06
"""
"""As SGLang's source prints it; see `kv_metrics`."""


def retracted(requests: int) -> str:
    return f'sglang:num_retracted_requests_total{{{RANK},tp_rank="0"}} {requests}.0\n'


def test_a_server_of_sglang_says_how_full_its_cache_is() -> None:
    metrics = KvMetrics(SGLANG)
    assert metrics.read(SGLANG_TEXT, 0.0) == KvFigures(524_288, 0.25, 0, 3)
    later = SGLANG_TEXT.replace("} 0.25", "} 0.75").replace("} 3.0", "} 0.0")
    assert metrics.read(later + retracted(2), 2.0) == KvFigures(524_288, 0.25, 2, 0), "the counter begins with a count"
    assert metrics.read(later + retracted(5), 4.0) == KvFigures(524_288, 0.75, 3, 0)
    assert metrics.read(later + retracted(1), 6.0) == KvFigures(524_288, 0.75, 1, 0), "it was restarted"


def test_ranks_of_sglang_that_share_a_cache_count_once_and_those_with_their_own_together() -> None:
    second = SGLANG_TEXT.replace('tp_rank="0"', 'tp_rank="1"').replace("} 3.0", "} 4.0")
    assert KvMetrics(SGLANG).read(SGLANG_TEXT + second, 0.0) == KvFigures(524_288, 0.25, 0, 4)
    data_parallel = "".join(SGLANG_TEXT.replace('tp_rank="0"', f'tp_rank="0",dp_rank="{rank}"') for rank in range(2))
    assert KvMetrics(SGLANG).read(data_parallel, 0.0) == KvFigures(2 * 524_288, 0.25, 0, 6)


def test_requests_of_one_priority_are_a_part_of_all() -> None:
    whole = SGLANG_TEXT.replace('tp_rank="0"', 'priority="",tp_rank="0"')
    part = f'sglang:num_queue_reqs{{{RANK},priority="5",tp_rank="0"}} 77.0\n'
    assert KvMetrics(SGLANG).read(whole + part, 0.0) == KvFigures(524_288, 0.25, 0, 3)


def test_half_of_the_cache_of_sglang_is_gone() -> None:
    metrics = KvMetrics(SGLANG)
    metrics.read(SGLANG_TEXT, 0.0)
    assert metrics.read(SGLANG_TEXT.replace("524288", "262144"), 2.0) == KvFigures(262_144, 0.25, 0, 3)


@pytest.mark.parametrize(
    ("found", "nonsense"),
    [
        *(("} 524288.0", f"}} {value}") for value in ("NaN", "+Inf", "-5", "1e30", "some", "0.0")),
        *(("} 0.25", f"}} {value}") for value in ("NaN", "+Inf", "-1", "some", "9" * 400, "0.5 " + "9" * 400)),
        ("} 524288.0", "} 1" + "0" * 310),
        ("sglang:token_usage{", "sglang:token_use{"),
        ("sglang:max_total_num_tokens{", "sglang:most_tokens{"),
    ],
)
def test_nonsense_of_sglang_is_no_report(found: str, nonsense: str) -> None:
    metrics = KvMetrics(SGLANG)
    assert metrics.read(SGLANG_TEXT.replace(found, nonsense), 0.0) is None
    assert metrics.read(SGLANG_TEXT, 2.0) == KvFigures(524_288, 0.25, 0, 3)
    changed = metrics.read(SGLANG_TEXT.replace(found, nonsense), 4.0)
    assert changed in (None, KvFigures(524_288, 0.25, 0, 3)), "it has the cache that it said first, or nothing is known"


def test_figures_of_another_kind_of_server_are_none() -> None:
    assert KvMetrics(SGLANG).read(text(), 0.0) is None
    assert KvMetrics().read(SGLANG_TEXT, 0.0) is None


def text(*, used: str = "0.25", waiting: str = "3.0", preempted: str = "5.0", size: str = "None") -> str:
    answer = TEXT.replace("USED", used).replace("WAITING", waiting)
    return answer.replace("PREEMPTED", preempted).replace("SIZE", size)


def test_a_server_of_vllm_says_how_full_its_cache_is() -> None:
    metrics = KvMetrics()
    assert metrics.read(text(), 0.0) == KvFigures(1_600, 0.25, 0, 3), "earlier preemptions do not count"
    assert metrics.read(text(used="0.75", preempted="7.0", size="2000"), 2.0) == KvFigures(2_000, 0.25, 2, 3)
    assert metrics.read(text(used="0.75", waiting="0.0", preempted="7.0"), 4.0) == KvFigures(1_600, 0.75, 0, 0)


def test_counters_of_a_restarted_server_begin_again() -> None:
    metrics = KvMetrics()
    metrics.read(text(preempted="100.0"), 0.0)
    figures = metrics.read(text(preempted="2.0"), 2.0)
    assert figures is not None
    assert figures.preempted == 2


def test_a_cache_that_a_restarted_server_does_not_have_counts_no_more() -> None:
    metrics = KvMetrics()
    second = text(used="0.75", preempted="9.0").replace('engine="0"', 'engine="1"')
    assert metrics.read(text() + second, 0.0) == KvFigures(3_200, 0.5, 0, 6)
    assert metrics.read("", 2.0) is None
    assert metrics.read(text(), 4.0) == KvFigures(1_600, 0.25, 0, 3)
    assert metrics.read(text() + second, 6.0) == KvFigures(3_200, 0.125, 0, 6), "the second one was not used until now"


def test_of_a_large_answer_only_a_part_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []

    def parse(line: str) -> Any:
        parsed.append(line)
        return text_string_to_metric_families(line)

    monkeypatch.setattr(kv_metrics, "text_string_to_metric_families", parse)
    long = f'vllm:kv_cache_usage_perc{{engine="0",model_name="{"m" * LINE_LIMIT}"}} 0.75\n'
    many = 'vllm:kv_cache_usage_perc{engine="0"} 0.5\n' * (2 * LINES_LIMIT)
    assert KvMetrics().read(text() + long + many, 0.0) == KvFigures(1_600, 0.5, 0, 3)
    assert len(parsed) == LINES_LIMIT
    assert max(map(len, parsed)) < LINE_LIMIT


@pytest.mark.parametrize("answer", ["", "<html>", "sglang:token_usage{} 0.5\n", "vllm:kv_cache_usage_perc{ 1\n"])
def test_a_server_without_these_metrics_has_no_figures(answer: str) -> None:
    assert KvMetrics().read(answer, 0.0) is None


@pytest.mark.parametrize("used", ["NaN", "+Inf", "-1", "some", "9" * 400, "0.5 " + "9" * 400])
def test_values_that_are_no_numbers_are_no_report(used: str) -> None:
    metrics = KvMetrics()
    assert metrics.read(text(), 0.0) is not None
    assert metrics.read(text(used=used), 2.0) is None
    assert metrics.read(text(), 4.0) is not None


@pytest.mark.parametrize("size", ["None", "-5", "9" * 40, "1e9"])
def test_an_odd_capacity_is_not_believed(size: str) -> None:
    figures = KvMetrics().read(text(size=size), 0.0)
    assert figures is not None
    assert figures.capacity_tokens == 1_600


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        (lambda: web.Response(text=text()), True),
        (lambda: web.Response(status=404), False),
        (lambda: web.Response(status=500, text=text()), False),
        (lambda: web.Response(body=b"\xff\xfe vllm:kv"), False),
        (lambda: web.Response(text=text() + "#" * ANSWER_LIMIT), False),
    ],
)
def test_a_server_is_asked_now_and_then(answer: Callable[[], web.Response], read: bool) -> None:
    def answered(_: Any) -> web.Response:
        return answer()

    async def main() -> None:
        server, time = FakeServer(), 0.0
        server.handlers["/metrics"] = answered
        await server.start()
        connections = Connections(server.url)
        probe = KvProbe(connections, clock=lambda: time)
        try:
            assert probe.take() is None
            await probe.ask()
            await probe.ask()
            assert len(server.asked("/metrics")) == 1
            assert (probe.take() is not None) == read
            assert probe.take() is None, "these figures were taken"
            time = READ_EVERY_S
            await probe.ask()
            assert (probe.take() is not None) == read
            await server.stop()
            time = 2 * READ_EVERY_S
            await probe.ask()
            assert probe.take() is None
        finally:
            await connections.close()
            await server.stop()

    asyncio.run(main())
