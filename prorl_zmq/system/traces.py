"""OpenTelemetry spans of this process, by its SDK (extra `otel`), below the span that a message names.

    with tracing("stage", stage_id):                        the process's main
        with span("turn", parent=command.traceparent):      and within it `current_traceparent()`, for messages

Enabled if the standard variables name a collector (`is_wanted`); otherwise OpenTelemetry is not imported. A span
continues a sampled trace; only the rollout broker begins one. If the collector is unreachable or slow, spans are
dropped, reported once and counted at the end, which waits at most `CLOSE_S`. Prompts, tool and error texts stay local.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ConfigError, ProrlError
from .installation import how_to_install

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    Attributes = Mapping[str, str | int | float | bool | tuple[str, ...]]

SpanKind = Literal["internal", "client", "server", "producer", "consumer"]

CLOSE_S = 1.5
"""How long an exiting process may take to export its spans."""
TRACEPARENT_LIMIT = 128
"""Longest W3C `traceparent` that is parsed, in characters; version 00 has 55."""
ROOM = 1024
"""Half of the SDK's queue, in spans."""
SCOPE = "prorl_zmq"

_OFF: AbstractContextManager[Any] = nullcontext()
_export: SpanExport | None = None

log = logging.getLogger("prorl.traces")


@contextmanager
def tracing(process: str, instance: str) -> Iterator[None]:
    """Export the spans of this process, if the environment says so; opened by the process's main.

    Raises:
        ConfigError: a variable has a value that the SDK cannot use.
    """
    global _export  # noqa: PLW0603 - as OpenTelemetry's own provider, there is one for the process
    if not is_possible():
        yield
        return
    try:
        _export = SpanExport(process, instance)
    except ValueError as error:
        raise ConfigError(f"a variable OTEL_* of the environment is wrong: {error}", key="OTEL_*") from error
    try:
        yield
    finally:
        _export.close()
        _export = None


def span(
    name: str, attributes: Attributes | None = None, *, kind: SpanKind = "internal", parent: str | None = None
) -> AbstractContextManager[Any]:
    """Make a span of the block, below `parent` (a `traceparent`), or below the current span.

    Its value is the OpenTelemetry span, for `set_attribute`; None without tracing, or if the trace is not sampled.
    """
    return _OFF if _export is None else _export.span(name, attributes or {}, kind, parent)


def current(traceparent: str) -> AbstractContextManager[Any]:
    """Make a message's span the parent of the block's spans."""
    if _export is None or not traceparent:
        return _OFF
    from opentelemetry import trace

    named: AbstractContextManager[Any] = trace.use_span(trace.get_current_span(read_traceparent(traceparent)))
    return named


def is_wanted() -> bool:
    """Return whether the environment sends spans to an OTLP collector."""
    environment = os.environ
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if exporters:
        return "otlp" in exporters.split(",")
    return bool(environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT"))


def is_possible() -> bool:
    """Return whether spans are wanted and the SDK is installed; warn if it is not."""
    if not is_wanted():
        return False
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as error:
        log.warning("no traces, though OTEL_* asks for them: %s; %s", error, how_to_install("otel"))
        return False
    return True


def current_traceparent() -> str:
    """Return the W3C `traceparent` of this program's current OpenTelemetry span; empty: none."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return traceparent_of(context.trace_id, context.span_id, sampled=context.trace_flags.sampled)


def traceparent_of(trace_id: int, span_id: int, *, sampled: bool) -> str:
    return f"00-{trace_id:032x}-{span_id:016x}-{sampled:02x}"


def read_traceparent(traceparent: str) -> Any:
    """Return the OpenTelemetry context of a `traceparent`, empty if that is malformed. Needs the SDK."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {"traceparent": traceparent} if len(traceparent) <= TRACEPARENT_LIMIT else {}
    return TraceContextTextMapPropagator().extract(carrier)


class SpanExport:
    """A tracer whose spans the SDK's thread exports; `provider_options` are those of the SDK's `TracerProvider`."""

    def __init__(self, process: str, instance: str, **provider_options: Any) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        name = os.environ.get("OTEL_SERVICE_NAME") or f"prorl-{process}"
        named = {"service.name": name, "service.namespace": "prorl", "service.instance.id": instance}
        self._exporter = _CountingExporter(OTLPSpanExporter())
        resource = Resource.create(named)
        with no_fork_hooks():
            self._provider = TracerProvider(resource=resource, shutdown_on_exit=False, **provider_options)
            self._provider.add_span_processor(BatchSpanProcessor(self._exporter))  # type: ignore[arg-type]
        self._tracer: Any = self._provider.get_tracer(SCOPE)
        self._begun = 0

    def begin(
        self, name: str, attributes: Attributes, kind: SpanKind, context: Any, start_ns: int | None = None
    ) -> Any:
        """Begin a span in an OpenTelemetry context; the caller ends it."""
        from opentelemetry.trace import SpanKind as Kind

        self._begun += 1
        return self._tracer.start_span(name, context, Kind[kind.upper()], attributes, start_time=start_ns)

    @contextmanager
    def span(self, name: str, attributes: Attributes, kind: SpanKind, parent: str | None) -> Iterator[Any]:
        from opentelemetry import trace

        context = None if parent is None else read_traceparent(parent)
        above = trace.get_current_span(context).get_span_context()
        if not (above.is_valid and above.trace_flags.sampled):
            yield None
            return
        made = self.begin(name, attributes, kind, context)
        with trace.use_span(made, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                yield made
            except BaseException as error:
                set_error(made, error.code if isinstance(error, ProrlError) else type(error).__name__)
                raise

    def wait_for_room(self) -> None:
        """Wait while the SDK's queue is at least half full; return at once while the collector is unreachable."""
        self._exporter.wait_for(self._begun - ROOM)

    def close(self) -> None:
        """Export the remaining spans within `CLOSE_S`, and log how many were dropped."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(CLOSE_S)
        if ending.is_alive():
            self._exporter.shutdown()  # stop retrying
        if dropped := self._begun - self._exporter.exported:
            log.warning("%d of %d spans were dropped: the collector did not take them in time", dropped, self._begun)


@contextmanager
def no_fork_hooks() -> Iterator[None]:
    """Keep the SDK from starting threads in each forked child: only a single-threaded process can join a sandbox."""
    register = os.register_at_fork
    os.register_at_fork = lambda **_: None
    try:
        yield
    finally:
        os.register_at_fork = register


def set_error(made: Any, code: str) -> None:
    """Mark a span as failed by an error code only: an error's text may quote a prompt."""
    from opentelemetry.trace import StatusCode

    made.set_status(StatusCode.ERROR)
    made.set_attribute("error.type", code)


class _CountingExporter:
    """Logs once that the collector rejects spans, and once that it accepts them again; the SDK logs every batch."""

    def __init__(self, exporter: Any) -> None:
        self.exported = 0
        self._exporter = exporter
        self._taken = 0
        self._failing = self._ended = False
        self._changed = threading.Condition()
        self._words = _FirstWords()
        sdk = logging.getLogger("opentelemetry")
        sdk.propagate = False
        sdk.handlers = [self._words]

    def export(self, spans: Any) -> Any:
        self._words.text = ""
        self._note(len(spans), failing=self._failing)
        result = self._exporter.export(spans)
        failing = result.name != "SUCCESS"
        if failing and not (self._failing or self._ended):  # `close` reports late spans as dropped
            log.warning("the collector takes no spans, and they are dropped until it does: %s", self._words.text)
        elif self._failing and not failing:
            log.warning("the collector takes spans again")
        self.exported += 0 if failing else len(spans)
        self._note(0, failing=failing)
        return result

    def wait_for(self, taken: int) -> None:
        """Wait until so many spans have left the SDK's queue, or none can be exported."""
        with self._changed:
            self._changed.wait_for(lambda: self._taken >= taken or self._failing)

    def _note(self, taken: int, *, failing: bool) -> None:
        with self._changed:
            self._taken += taken
            self._failing = failing
            self._changed.notify_all()

    def shutdown(self) -> None:
        self._ended = True
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))


class _FirstWords(logging.Handler):
    """Keeps the SDK's first message of an export, which has the reason of a failure."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage()
