"""Spans of one process, as a collector gets them; what is off, malformed, missing or away."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from otlp_receiver import OtlpReceiver, tree

from prorl_zmq.errors import ConfigError, HandlerFailed
from prorl_zmq.system.installation import how_to_install
from prorl_zmq.system.traces import SpanExport, current, current_traceparent, is_wanted, span, tracing

if TYPE_CHECKING:
    from collections.abc import Iterator

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"
SECRET = "the-word-that-no-span-may-have"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    sdk = logging.getLogger("opentelemetry")
    before = (sdk.propagate, sdk.handlers)
    yield
    sdk.propagate, sdk.handlers = before


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        for name, value in receiver.environment.items():
            monkeypatch.setenv(name, value)
        yield receiver


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, False),
        ({ENDPOINT: "http://a:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "console,otlp"}, True),
        ({ENDPOINT: "http://a:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({ENDPOINT: "http://a:4318", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_the_standard_variables_say_whether_there_are_traces(
    variables: dict[str, str], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_wanted() == wanted


def test_without_them_nothing_of_opentelemetry_is_imported() -> None:
    code = (
        "import prorl_zmq.client.blocking.client, prorl_zmq.stages.stage_process, sys\n"
        "import prorl_zmq.inference.hosting.host\n"
        "import prorl_zmq.brokers.rollout.rollout_broker\n"
        "from prorl_zmq.brokers.rollout.job_tracer import JobTracer\n"
        "from prorl_zmq.system.traces import current, current_traceparent, span, tracing\n"
        "with tracing('stage', 'one'), current(''), span('a') as made: assert made is None\n"
        "assert (current_traceparent(), JobTracer.start()) == ('', None)\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_spans_are_below_what_a_message_names_and_below_each_other(receiver: OtlpReceiver) -> None:
    with tracing("stage", "run-1"), current(PARENT):
        with span("turn", {"prorl.turn": 3}), span("chat", kind="client") as chat:
            below = current_traceparent()
            chat.set_attribute("gen_ai.usage.output_tokens", 7)
        with span("generate", parent=below):
            pass
    assert tree(receiver.spans) == ["turn", "  chat", "    generate"]
    turn = next(one for one in receiver.spans if one.name == "turn")
    assert (turn.trace_id, turn.parent_id, turn.service) == ("a" * 32, "b" * 16, "prorl-stage")
    assert turn.attributes == {"prorl.turn": 3}


def test_what_continues_no_sampled_trace_is_no_span(receiver: OtlpReceiver) -> None:
    with tracing("stage", "run-1"):
        for parent in (None, "", "nonsense", PARENT[:-1] + "0", PARENT + "0" * 10_000, "ff" + PARENT[2:]):
            with span("a", parent=parent) as made:
                assert made is None
                assert current_traceparent() == ""
    assert receiver.spans == []


@pytest.mark.parametrize(
    ("error", "kind"), [(ValueError(SECRET), "ValueError"), (HandlerFailed(SECRET), "handler_failed")]
)
def test_an_error_leaves_its_kind_and_no_text(receiver: OtlpReceiver, error: Exception, kind: str) -> None:
    with tracing("stage", "run-1"), pytest.raises(type(error)), span("a", parent=PARENT):
        raise error
    (made,) = receiver.spans
    assert (made.failed, made.attributes) == (True, {"error.type": kind})
    assert all(SECRET.encode() not in body for body in receiver.bodies)


def test_where_the_sdk_is_missing_a_line_says_what_to_install(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with tracing("stage", "run-1"), span("a", parent=PARENT) as made:
        assert made is None
    assert how_to_install("otel") in caplog.text


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_BSP_MAX_QUEUE_SIZE", "0"), ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "99999")]
)
def test_a_variable_that_the_sdk_cannot_use_is_a_clear_error(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"a variable OTEL_\* of the environment is wrong"), tracing("stage", "run-1"):
        pass


@pytest.mark.usefixtures("receiver")
def test_a_forked_child_has_no_thread_of_the_sdk() -> None:
    """With one, it could join no sandbox's namespaces: the kernel lets only a process of one thread do that."""
    with tracing("stage", "run-1"):
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(theirs, str(len(list(Path("/proc/self/task").iterdir()))).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(ours, 9) == b"1"
        os.close(ours)
        os.close(theirs)


def test_a_collector_that_never_answers_holds_no_process_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "5")
        with tracing("stage", "run-1"):
            for _ in range(3):
                with span("a", parent=PARENT):
                    pass
            ending = time.monotonic()
        assert time.monotonic() - ending < 3
        assert "3 of 3 spans were dropped" in caplog.text


@pytest.mark.usefixtures("receiver")
def test_an_export_that_ends_after_its_process_is_told_as_dropped_only(caplog: pytest.LogCaptureFixture) -> None:
    export = SpanExport("stage", "run-1")
    late = export._exporter
    export.close()
    assert late.export([]).name == "FAILURE"
    assert caplog.messages == []


def test_a_collector_that_comes_back_is_said_once_as_is_its_absence(
    receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.status = 400
    with tracing("stage", "run-1"):
        for _ in range(3):
            refused = receiver.refused
            with span("refused", parent=PARENT):
                pass
            receiver.wait(lambda _, refused=refused: receiver.refused > refused)
        receiver.status = 200
        with span("taken", parent=PARENT):
            pass
        receiver.wait(lambda spans: [one.name for one in spans] == ["taken"])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3, said
    assert said[0].startswith("the collector takes no spans, and they are dropped until it does: Failed to export")
    assert said[1:] == [
        "the collector takes spans again",
        "3 of 4 spans were dropped: the collector did not take them in time",
    ]
