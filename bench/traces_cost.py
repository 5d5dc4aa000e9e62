"""What traces cost the rollout broker, for `watching.py`: a collector that forgets what it gets, and one side of it.

The phases do nothing, so the broker is all that works: the worst case.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import psutil
from frontdoor import SLOTS, throughput
from service import BenchService

if TYPE_CHECKING:
    from collections.abc import Iterator

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


@contextmanager
def collector() -> Iterator[str]:
    """Run a collector in a process of its own; give its endpoint."""
    with subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


def broker_cost(endpoint: str, count: int, rounds: int) -> tuple[float, float]:
    """Give the best jobs per second, and the broker's CPU microseconds for a job; an empty endpoint: no traces."""
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


if __name__ == "__main__":
    os.nice(19)  # a collector is elsewhere
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()
