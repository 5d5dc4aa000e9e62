"""What traces cost the rollout broker: jobs per second and its CPU time for a job, with traces and without, in turns.

The phases do nothing, so that the broker is all that works: the worst case. A collector of its own process takes spans
and forgets them. The process that makes the spans has only the CPU that others leave; what it does not get to is
dropped, and counted here too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import psutil
from frontdoor import SLOTS, throughput
from harness import Row, main
from service import BenchService

if TYPE_CHECKING:
    from collections.abc import Iterator

TARGET = 0.95
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Collector(BaseHTTPRequestHandler):
    """Takes what comes."""

    def do_POST(self) -> None:
        """Answer as a collector does."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def collect() -> None:
    """Be a collector; say where."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


@contextmanager
def collector() -> Iterator[str]:
    """Run a collector; give its endpoint."""
    with subprocess.Popen([sys.executable, __file__, "--collect"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


def side(endpoint: str, count: int, rounds: int) -> tuple[float, float]:
    """Give jobs per second, the best round, and the broker's CPU microseconds for a job."""
    os.environ.pop(ENDPOINT, None)
    if endpoint:
        os.environ[ENDPOINT] = endpoint
    with BenchService([("init", SLOTS), ("run", SLOTS), ("eval", SLOTS)], in_memory=True) as service:
        throughput(service.front_door, 200)
        broker = psutil.Process(service.pids()["rollout broker"])
        before = broker.cpu_times()
        rate = max(throughput(service.front_door, count) for _ in range(rounds))
        after = broker.cpu_times()
    spent = after.user + after.system - before.user - before.system
    return rate, 1e6 * spent / (count * rounds)


def measure(quick: bool) -> list[Row]:
    count, turns = (500, 1) if quick else (2000, 3)
    without, traced = [], []
    with collector() as endpoint:
        for _ in range(turns):
            without.append(side("", count, 2))
            traced.append(side(endpoint, count, 2))
            time.sleep(0)
    rate, base = (max(one[0] for one in some) for some in (traced, without))
    spent, plain = (min(one[1] for one in some) for some in (traced, without))
    against = "without traces"
    target = f"at least {TARGET} of it"
    return [
        Row("jobs per second with traces", rate, "jobs/s", against, rate / base, target, rate >= TARGET * base),
        Row("CPU time of the rollout broker for a job", spent, "µs", against, spent / plain),
    ]


if __name__ == "__main__":
    if "--collect" in sys.argv:
        collect()
    else:
        main("traces_cost", "what traces cost the rollout broker", measure)
