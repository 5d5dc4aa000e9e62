"""An OTLP collector for tests: takes spans over HTTP, and shows which is below which."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAIT_S = 30.0


class Received(NamedTuple):
    """One span."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    failed: bool
    kind: int


class OtlpReceiver:
    """Listens on loopback within `with`, but for where it is `away`."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.bodies: list[bytes] = []
        self.status = 200
        """What requests are answered with; with another one, nothing is taken."""
        self.refused = 0
        self._port = 0
        self._changed = threading.Condition()

    def __enter__(self) -> Self:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                self.send_response(receiver._take(body))
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._server.daemon_threads = True
        self._port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Refuse connections."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    @property
    def environment(self) -> dict[str, str]:
        """What sends spans here, soon."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self._port}",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }

    def wait(self, is_there: Callable[[list[Received]], object]) -> list[Received]:
        """Wait until the spans are as they should be; give them."""
        with self._changed:
            assert self._changed.wait_for(lambda: is_there(self.spans), WAIT_S), [one.name for one in self.spans]
            return list(self.spans)

    def _take(self, body: bytes) -> int:
        if self.status != 200:
            with self._changed:
                self.refused += 1
                self._changed.notify_all()
            return self.status
        found = []
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _attributes(group.resource.attributes)["service.name"]
            found += [_received(service, span) for scope in group.scope_spans for span in scope.spans]
        with self._changed:
            self.bodies.append(body)
            self.spans += found
            self._changed.notify_all()
        return 200


def tree(spans: list[Received], below: str | None = None, depth: int = 0) -> list[str]:
    """Show spans as an indented tree, each level by time; the first ones are those whose parent is not among them."""
    ids = {one.span_id for one in spans}
    level = [one for one in spans if (one.parent_id == below if below is not None else one.parent_id not in ids)]
    lines = []
    for one in sorted(level, key=lambda span: span.start_ns):
        lines += ["  " * depth + one.name + (" !" if one.failed else ""), *tree(spans, one.span_id, depth + 1)]
    return lines


def of_job(spans: list[Received], job_id: str) -> list[Received]:
    """Give the span of a job that has ended, and all that is below it; nothing before its end."""
    own = [one for one in spans if one.attributes.get("prorl.job.id") == job_id and one.name.startswith("job ")]
    return own + [one for above in own for one in _below(spans, above.span_id)]


def _below(spans: list[Received], span_id: str) -> list[Received]:
    found = [one for one in spans if one.parent_id == span_id]
    return found + [lower for one in found for lower in _below(spans, one.span_id)]


def _received(service: str, span: Any) -> Received:
    return Received(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _attributes(span.attributes),
        span.status.code == span.status.STATUS_CODE_ERROR,
        span.kind,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
