"""Jobs per second through submit → INIT → RUN → EVAL → collect with phases that do nothing, and the latency of one job.

All processes are on this machine: two brokers, a stage process for each stage, and the client. What is measured is the
service's own work, since no job has any.
"""

from __future__ import annotations

import time

from harness import Row, main, quantiles
from service import BenchService

from prorl_zmq import Job, RolloutClient

SLOTS = 64
TARGET_RATE = 1000.0
TARGET_P50_MS = 5.0


def throughput(front_door: str, count: int) -> float:
    """Give jobs per second from the first submission to the last collected trajectory."""
    with RolloutClient(front_door, timeout_s=120) as client:
        started = time.perf_counter()
        client.submit(Job(task="nothing", instance={}) for _ in range(count))
        collected = sum(trajectory.reward == 1.0 for trajectory in client.stream(timeout_s=60))
        assert collected == count
        return count / (time.perf_counter() - started)


def latencies(front_door: str, count: int) -> list[float]:
    """Give the seconds from submission to trajectory, one job at a time through an idle pipeline."""
    seconds = []
    with RolloutClient(front_door) as client:
        for _ in range(count):
            started = time.perf_counter()
            client.submit(Job(task="nothing", instance={}))
            (trajectory,) = client.collect(1, wait_s=10)
            seconds.append(time.perf_counter() - started)
            assert trajectory.reward == 1.0
    return seconds


def measure(quick: bool) -> list[Row]:
    with BenchService([("init", SLOTS), ("run", SLOTS), ("eval", SLOTS)]) as service:
        throughput(service.front_door, 200)
        rate = max(throughput(service.front_door, 1000 if quick else 5000) for _ in range(1 if quick else 3))
        p50, p95, p99 = quantiles(latencies(service.front_door, 100 if quick else 1000))
    return [
        Row("throughput", rate, "jobs/s", target=f"at least {TARGET_RATE:,.0f} jobs/s", holds=rate >= TARGET_RATE),
        Row("latency p50", 1e3 * p50, "ms", target=f"under {TARGET_P50_MS:g} ms", holds=1e3 * p50 < TARGET_P50_MS),
        Row("latency p95", 1e3 * p95, "ms"),
        Row("latency p99", 1e3 * p99, "ms"),
    ]


if __name__ == "__main__":
    main("frontdoor", "jobs per second and latency of the empty pipeline", measure)
