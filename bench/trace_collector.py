"""An OTLP collector for `watching.py`: it counts the jobs whose spans it gets, and returns the number on a GET."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
jobs = 0


class Collector(BaseHTTPRequestHandler):
    """Takes what comes."""

    def do_POST(self) -> None:
        """Answer as a collector does."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        global jobs  # noqa: PLW0603 - the library makes the handlers
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        scopes = (scope for resource in request.resource_spans for scope in resource.scope_spans)
        jobs += sum(span.name.startswith("job ") for scope in scopes for span in scope.spans)
        self._answer(b"")

    def do_GET(self) -> None:
        """Tell how many there were."""
        self._answer(str(jobs).encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def collector() -> Iterator[str]:
    """Run a collector in a process of its own; give its endpoint."""
    with subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


def jobs_traced(endpoint: str) -> int:
    """Give the number of jobs whose spans a collector has got."""
    with urllib.request.urlopen(endpoint, timeout=10) as reply:
        return int(reply.read())


if __name__ == "__main__":
    os.nice(19)  # a collector is elsewhere
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()
