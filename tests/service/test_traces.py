"""The traces of a real `prorl serve`, as a collector gets them: every process's spans in one tree for each job."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import msgspec
import psutil
import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from otlp_receiver import OtlpReceiver, of_job, tree
from support.demo_jobs import make_jobs
from support.ports import free_port
from support.services import Service, serving
from support.waiting import until

from prorl_zmq import Job, RolloutClient
from prorl_zmq.system.traces import no_fork_hooks

from .test_serve import TOPOLOGY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otlp_receiver import Received

    from prorl_zmq import Trajectory

SECRET = "the-word-that-no-span-may-have"
PHASES = ("init", "run", "eval")

pytestmark = pytest.mark.xdist_group("traced service")


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def traced(receiver: OtlpReceiver) -> Iterator[Service]:
    """A service whose processes send their spans to the collector."""
    gateway = f'[gateway]\nbind = "127.0.0.1:{free_port()}"\nuse_llm_servers = false\n'
    with serving(TOPOLOGY + gateway, **receiver.environment) as service:
        yield service


@pytest.fixture(scope="module")
def tracer(receiver: OtlpReceiver) -> Iterator[trace.Tracer]:
    """A trainer's own, whose spans go to the same collector."""
    with no_fork_hooks():  # other tests of this process fork children that join sandboxes
        provider = TracerProvider(shutdown_on_exit=False)
    exporter = OTLPSpanExporter(f"{receiver.environment['OTEL_EXPORTER_OTLP_ENDPOINT']}/v1/traces")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    yield trace.get_tracer("trainer")
    provider.shutdown()


def whole(receiver: OtlpReceiver, trajectory: Trajectory) -> list[Received]:
    """Wait until all spans of a job are here that its result tells of; give them."""
    metrics = trajectory.result.metrics
    turns, calls = metrics["turns"], metrics.get("tool_calls", 0)
    expected = {"job": 1, "turn": turns, "chat": turns, "generate": turns, "execute_tool": calls, "grade": 1}

    def is_whole(spans: list[Received]) -> bool:
        names = Counter(one.name.split()[0] for one in of_job(spans, trajectory.job_id))
        return all(names[name] == count for name, count in expected.items())

    return of_job(receiver.wait(is_whole), trajectory.job_id)


def waiting_job(folder: Path, name: str) -> Job:
    """A job whose EVAL waits until the test makes a file, and says that it has begun by another."""
    check = f"echo $$ >> {folder}/{name}.begun; until [ -e {folder}/{name}.go ]; do sleep 0.02; done"
    (job,) = make_jobs(1, 1, 1, name=name)
    return msgspec.structs.replace(job, instance={**job.instance, "check": check})


def test_the_spans_of_a_job_with_tool_calls_are_one_tree_below_the_trainers_own(
    traced: Service, receiver: OtlpReceiver, tracer: trace.Tracer
) -> None:
    jobs = make_jobs(4, 1, 3)
    jobs = [msgspec.structs.replace(one, instance={**one.instance, "files": {"a": SECRET}}) for one in jobs]
    with RolloutClient(traced.front_door) as client:
        with tracer.start_as_current_span("training step") as step:
            client.submit(jobs)
        trajectories = list(client.stream(timeout_s=60))
        found = client.trace(jobs[0].job_id)
    used_tools = max(trajectories, key=lambda one: one.result.metrics.get("tool_calls", 0))
    spans = whole(receiver, used_tools)
    lines = tree(spans)
    assert lines[:5] == ["job shell", "  init queue", "  init", "    create sandbox", "  run queue"]
    assert lines[5:10] == ["  run", "    assign backend", "    turn", "      chat base policy", "        generate"]
    assert "      execute_tool bash" in lines
    assert lines[-3:] == ["  eval queue", "  eval", "    grade"]
    job = spans[0]
    assert {one.trace_id for one in spans} == {f"{step.get_span_context().trace_id:032x}"}
    assert job.parent_id == f"{step.get_span_context().span_id:016x}"
    assert {one.service for one in spans} == {"prorl-rollout-broker", "prorl-stage", "prorl-engine"}
    assert job.attributes["prorl.outcome"] == "completed"
    assert job.attributes["gen_ai.conversation.id"] == used_tools.job_id
    for one in spans:
        assert job.start_ns <= one.start_ns <= one.end_ns <= job.end_ns + 10**9
    (submit,) = [one for one in receiver.spans if one.name == "submit"]
    assert (submit.parent_id, submit.attributes["messaging.batch.message_count"]) == (job.parent_id, 4)
    assert found.traceparent.split("-")[1] == job.trace_id
    # The texts of no prompt, file, call or answer are in any span.
    for text in (SECRET, "data.txt", "answer.txt", "Work in bash"):
        assert all(text.encode() not in body for body in receiver.bodies)


def test_what_the_chat_spans_say_is_what_the_result_has(traced: Service, receiver: OtlpReceiver) -> None:
    with RolloutClient(traced.front_door) as client:
        client.submit(make_jobs(1, 1, 5))
        (trajectory,) = client.stream(timeout_s=60)
    spans = whole(receiver, trajectory)
    chats = [one.attributes for one in spans if one.name == "chat base policy"]
    assert sum(one["gen_ai.usage.output_tokens"] for one in chats) == trajectory.result.metrics["generated_tokens"]
    assert sum(one["gen_ai.usage.input_tokens"] for one in chats) == trajectory.result.metrics["prompt_tokens"]
    assert {one["gen_ai.request.model"] for one in chats} == {"base policy"}
    assert {one["prorl.backend"] for one in chats} == {trajectory.result.backend}


def test_a_job_of_a_client_without_a_span_or_with_a_malformed_one_has_a_trace_of_its_own(
    traced: Service, receiver: OtlpReceiver
) -> None:
    malformed = ("", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "\x00", "00-zz-11-01", "0" * 100_000)
    jobs = [msgspec.structs.replace(make_jobs(1, 1, 1)[0], traceparent=text) for text in malformed]
    with RolloutClient(traced.front_door) as client:
        client.submit(jobs)
        trajectories = list(client.stream(timeout_s=60))
    assert {one.outcome for one in trajectories} == {"completed"}
    traces = [whole(receiver, one)[0] for one in trajectories]
    assert {one.parent_id for one in traces} == {""}
    assert len({one.trace_id for one in traces}) == len(malformed)


def test_a_job_whose_trace_is_not_sampled_has_no_spans(traced: Service, receiver: OtlpReceiver) -> None:
    trace_id = "c" * 32
    job = msgspec.structs.replace(make_jobs(1, 1, 1)[0], traceparent=f"00-{trace_id}-{'1' * 16}-00")
    with RolloutClient(traced.front_door) as client:
        client.submit(job)
        assert len(list(client.stream(timeout_s=60))) == 1
        client.submit(make_jobs(1, 1, 1))
        (later,) = client.stream(timeout_s=60)
    whole(receiver, later)
    assert all(one.trace_id != trace_id for one in receiver.spans)


def test_a_job_that_is_submitted_again_in_another_span_is_the_same_job(
    traced: Service, receiver: OtlpReceiver, tracer: trace.Tracer, tmp_path: Path
) -> None:
    job = waiting_job(tmp_path, "again")
    with RolloutClient(traced.front_door) as client:
        for name in ("first", "second"):
            with tracer.start_as_current_span(name):
                client.submit(job)
        client.submit(job)
        (tmp_path / "again.go").touch()
        (trajectory,) = client.stream(timeout_s=60)
    spans = receiver.wait(lambda spans: any(one.name == "second" for one in spans))
    (first,) = [one for one in spans if one.name == "first"]
    assert whole(receiver, trajectory)[0].trace_id == first.trace_id


def test_the_jobs_of_a_batch_are_below_the_span_in_which_their_prompt_was_fed(
    traced: Service, receiver: OtlpReceiver, tracer: trace.Tracer
) -> None:
    with RolloutClient(traced.front_door) as client, client.open_batch(1, 2, keep="all") as batch:
        with tracer.start_as_current_span("feed") as fed:
            batch.feed(make_jobs(1, 1, 9))
        with tracer.start_as_current_span("another"):
            (group,) = batch
    for trajectory in group.trajectories:
        job = whole(receiver, trajectory)[0]
        assert job.parent_id == f"{fed.get_span_context().span_id:016x}"
        assert job.attributes["prorl.group.id"] == group.group_id


def test_jobs_that_come_over_http_are_below_the_span_that_the_request_names(
    traced: Service, receiver: OtlpReceiver
) -> None:
    (address,) = re.findall(r'bind = "(.*)"', traced.config.read_text())
    url = f"http://{address}/v1/jobs"
    (job,) = make_jobs(1, 1, 1)
    parent = f"00-{'e' * 32}-{'f' * 16}-01"
    request = Request(url, msgspec.json.encode(job), {"traceparent": parent, "Content-Type": "application/json"})
    with urlopen(request, timeout=30) as reply:
        assert msgspec.json.decode(reply.read())["new"] == 1
    spans = receiver.wait(lambda spans: any(one.name == "grade" for one in of_job(spans, job.job_id)))
    own = of_job(spans, job.job_id)[0]
    assert (own.trace_id, own.parent_id) == ("e" * 32, "f" * 16)


@pytest.mark.proof
def test_a_killed_stage_process_is_a_failed_phase_and_another_attempt(
    traced: Service, receiver: OtlpReceiver, tmp_path: Path
) -> None:
    with RolloutClient(traced.front_door) as client:
        client.submit(waiting_job(tmp_path, "lost"))
        until((tmp_path / "lost.begun").exists, "EVAL to begin")
        psutil.Process(traced.child("stage_eval.json")).kill()
        until(lambda: len((tmp_path / "lost.begun").read_text().split()) == 2, "EVAL to begin again")
        (tmp_path / "lost.go").touch()
        (trajectory,) = client.stream(timeout_s=60)
    spans = whole(receiver, trajectory)
    lines = tree(spans)
    assert lines[-5:] == ["  eval queue", "  eval !", "  eval queue", "  eval", "    grade"]
    evals = [one for one in spans if one.name == "eval"]
    assert sorted(one.attributes["prorl.attempt"] for one in evals) == [1, 2]
    assert [one.attributes["error.type"] for one in evals if one.failed] == ["lease_lost"]
    assert (spans[0].attributes["prorl.attempts"], spans[0].failed) == (2, False)


@pytest.mark.proof
def test_a_trace_goes_on_over_a_restart_of_the_broker(
    traced: Service, receiver: OtlpReceiver, tmp_path: Path, tracer: trace.Tracer
) -> None:
    with RolloutClient(traced.front_door) as client:
        with tracer.start_as_current_span("before") as before:
            client.submit(waiting_job(tmp_path, "kept"))
        until((tmp_path / "kept.begun").exists, "EVAL to begin")
        broker = psutil.Process(traced.child("rollout_broker.json"))
        broker.kill()
        until(lambda: not broker.is_running(), "the broker to end")
        (tmp_path / "kept.go").touch()
        (trajectory,) = client.stream(timeout_s=60)
    spans = whole(receiver, trajectory)
    assert (tmp_path / "kept.begun").read_text().count("\n") == 1
    assert [line for line in tree(spans) if line.strip().split()[0] in PHASES] == [
        *("  init queue", "  init", "  run queue", "  run", "  eval queue", "  eval")
    ]
    assert spans[0].attributes["prorl.broker_restarts"] == 1
    assert spans[0].parent_id == f"{before.get_span_context().span_id:016x}"


@pytest.mark.proof
def test_a_collector_that_is_away_costs_spans_and_a_line_of_the_log(traced: Service, receiver: OtlpReceiver) -> None:
    with RolloutClient(traced.front_door) as client:
        with receiver.away():
            client.submit(make_jobs(4, 4, 1))
            assert {one.outcome for one in client.stream(timeout_s=60)} == {"completed"}
            traced.wait_line("rollout-broker: the collector takes no spans, and they are dropped until it does: ")
        client.submit(make_jobs(1, 1, 1))
        (later,) = client.stream(timeout_s=60)
    whole(receiver, later)
    traced.wait_line("rollout-broker: the collector takes spans again")
    away = [line for line in traced.lines if "the collector takes no spans" in line]
    assert len(away) == len({line.split(": ")[0].split()[-1] for line in away})  # each process says it once


def test_the_manual_has_every_span_and_attribute_and_an_example_that_works(
    traced: Service, receiver: OtlpReceiver, tracer: trace.Tracer
) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "traces.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"jobs": make_jobs(1, 4, 3)}
    with RolloutClient(traced.front_door) as names["client"]:
        exec(example, names)
    spans = [one for trajectory in names["trajectories"] for one in whole(receiver, trajectory)]
    (step,) = [one for one in receiver.wait(bool) if one.span_id == spans[0].parent_id]
    assert step.name == "training step"
    told = set(re.findall(r"`([^`\n]+)`", page))
    kinds = {" ".join(word for word in name.split() if word.islower()) for name in told}
    for one in [*spans, *(one for one in receiver.spans if one.name == "submit")]:
        assert one.attributes.keys() <= told
        assert {one.name, one.name.partition(" ")[0]} & kinds
