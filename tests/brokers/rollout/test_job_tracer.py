"""A job's place in a trace: its ids, what stage processes are told, and the spans of what it went through."""

from __future__ import annotations

import os
import signal
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from otlp_receiver import OtlpReceiver, of_job, tree

from prorl_zmq import Job
from prorl_zmq.brokers.journal.records import Finished
from prorl_zmq.brokers.rollout import job_tracer
from prorl_zmq.brokers.rollout.actions import End, Queued, Start
from prorl_zmq.brokers.rollout.job_tracer import PLACES, JobTracer, phase_traceparent
from prorl_zmq.brokers.rollout.span_process import spans_of
from prorl_zmq.brokers.rollout.transition_log import TransitionLog
from prorl_zmq.brokers.rollout.transitions import Traced, pack
from prorl_zmq.errors import LeaseLost
from prorl_zmq.wire.messages.base import ATTEMPT_LIMIT
from prorl_zmq.wire.messages.jobs import Outcome, Phase, Result
from prorl_zmq.wire.messages.stages import StartPhase

if TYPE_CHECKING:
    from collections.abc import Iterator

OWN = f"00-{'a' * 32}-{'b' * 16}-01"
ABOVE = f"00-{'c' * 32}-{'d' * 16}-01"
STAYS = st.tuples(st.integers(1, ATTEMPT_LIMIT), st.sampled_from(list(Phase)), st.sampled_from(list(PLACES)))


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    with OtlpReceiver() as receiver:
        for name, value in receiver.environment.items():
            monkeypatch.setenv(name, value)
        yield receiver


@pytest.fixture
def tracer(receiver: OtlpReceiver) -> Iterator[JobTracer]:
    tracer = JobTracer.start()
    assert tracer is not None
    yield tracer
    tracer.close()


@pytest.fixture
def history(tracer: JobTracer) -> TransitionLog:
    return TransitionLog(tracer=tracer)


def job(job_id: str, traceparent: str = "") -> Job:
    return Job(task="shell", instance={}, job_id=job_id, traceparent=traceparent)


def start(job_id: str, phase: Phase, attempt: int = 1) -> StartPhase:
    return StartPhase(job_id=job_id, attempt=attempt, phase=phase)


def end(history: TransitionLog, job_id: str) -> None:
    result = Result(job_id=job_id, task="shell", outcome=Outcome.COMPLETED, reward=1.0, attempt=2)
    history.note(End(Finished("s", result, None)), 19.0)


def lose_run(history: TransitionLog, job_id: str) -> None:
    """Let a job lose its first RUN, and come to the second one."""
    lost = LeaseLost("gone", stage_id="run-1", attempts=1, cause="died").info()
    history.note(Queued(job_id, 1, Phase.RUN, None), 11.0)
    history.note(Start("run-1", start(job_id, Phase.RUN), b"", "node-1"), 12.0)
    history.note(Queued(job_id, 2, Phase.RUN, lost), 14.0)
    history.note(Start("run-2", start(job_id, Phase.RUN, 2), b"", "node-2"), 15.0)


@given(st.integers(1, 2**64 - 1), st.sets(STAYS, min_size=2))
def test_no_two_stays_of_a_job_have_one_id(own: int, stays: set[tuple[int, Phase, str]]) -> None:
    traceparent = f"00-{'a' * 32}-{own:016x}-01"
    ids = {phase_traceparent(traceparent, *stay) for stay in stays}
    # 0 is no id: who would have it has 1, which may be another's.
    assert len(ids) >= len(stays) - 1
    assert all(len(one) == len(OWN) and one[:36] == traceparent[:36] for one in ids)
    assert all(int(one[36:52], 16) for one in ids)


def test_the_spans_of_a_lost_phase_and_of_its_second_attempt(history: TransitionLog) -> None:
    history.restore("one", pack(Traced(10.0, OWN, "d" * 16)), 10.0)
    lose_run(history, "one")
    end(history, "one")
    own, *stays = spans_of(history.trace("", "one", 20.0))
    assert (own.name, own.span_id, own.parent) == ("job shell", 0xBBBBBBBBBBBBBBBB, f"00-{'a' * 32}-{'d' * 16}-01")
    assert (own.start_s, own.end_s, own.attributes["prorl.attempts"]) == (10.0, 19.0, 2)
    assert [(one.name, one.start_s, one.end_s, one.error) for one in stays] == [
        ("run queue", 11.0, 12.0, ""),
        ("run", 12.0, 14.0, "lease_lost"),
        ("run queue", 14.0, 15.0, ""),
        ("run", 15.0, 19.0, ""),
    ]
    assert {one.parent for one in stays} == {OWN}
    assert [one.attributes.get("prorl.stage.id") for one in stays] == [None, "run-1", None, "run-2"]


def test_a_stage_process_is_told_the_id_that_its_phase_will_have(
    tracer: JobTracer, history: TransitionLog, receiver: OtlpReceiver
) -> None:
    history.accepted(job("one", ABOVE), 10.0)
    told = [tracer.below(start("one", Phase.RUN, attempt)).traceparent for attempt in (1, 2)]
    lose_run(history, "one")
    end(history, "one")
    tracer.flush()
    spans = receiver.wait(lambda spans: len(spans) == 5)
    assert tree(spans) == ["job shell", "  run queue", "  run !", "  run queue", "  run"]
    runs = sorted((one for one in spans if one.name == "run"), key=lambda one: one.start_ns)
    assert [f"00-{one.trace_id}-{one.span_id}-01" for one in runs] == told
    assert of_job(spans, "one")[0].parent_id == "d" * 16
    assert {one.trace_id for one in spans} == {"c" * 32}


def test_a_job_that_is_not_sampled_or_was_accepted_without_traces_is_left_alone(
    tracer: JobTracer, history: TransitionLog
) -> None:
    history.accepted(job("one", ABOVE[:-1] + "0"), 10.0)
    history.note(Queued("two", 1, Phase.INIT, None), 10.0)
    history.restore("two", history.packed("two"), 10.0)
    for job_id in ("one", "two"):
        command = start(job_id, Phase.INIT)
        assert tracer.below(command) is command
        assert history.traceparent(job_id) == ""


def test_the_standard_variables_decide_which_jobs_are_sampled(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    tracer = JobTracer.start()
    assert tracer is not None
    history = TransitionLog(tracer=tracer)
    for number in range(2000):
        history.accepted(job(str(number)), 10.0)
    history.accepted(job("below", ABOVE), 10.0)
    tracer.close()
    assert 350 < sum(bool(history.traceparent(str(number))) for number in range(2000)) < 650
    assert history.traceparent("below")


@pytest.mark.parametrize("traceparent", ["", "00-zz", "x" * 200], ids=["none", "cut", "long"])
def test_a_damaged_note_of_a_trace_costs_the_trace(
    tracer: JobTracer, history: TransitionLog, receiver: OtlpReceiver, traceparent: str
) -> None:
    history.restore("bad", pack(Traced(10.0, traceparent, "")), 10.0)
    command = start("bad", Phase.INIT)
    assert tracer.below(command) is command
    end(history, "bad")
    tracer._socket.send(msgspec.msgpack.encode([("bad", history.packed("bad"))]))
    history.accepted(job("good"), 10.0)
    history.note(Queued("good", 1, Phase.INIT, None), 10.0)
    end(history, "good")
    tracer.flush()
    receiver.wait(lambda spans: of_job(spans, "good"))


def test_the_next_broker_goes_on_with_a_trace_whose_history_has_lost_its_middle(
    tracer: JobTracer, history: TransitionLog
) -> None:
    history.accepted(job("one"), 10.0)
    before = tracer.below(start("one", Phase.RUN)).traceparent
    for attempt in range(1, 200):
        history.note(Queued("one", attempt, Phase.RUN, None), 10.0 + attempt)
        history.note(Start("run-1", start("one", Phase.RUN, attempt), b"", "node"), 10.5 + attempt)
    after = TransitionLog()
    after.restore("one", history.packed("one"), 300.0)
    assert after.trace("", "one", 300.0).left_out > 0
    assert phase_traceparent(after.traceparent("one"), 1, Phase.RUN) == before


def test_a_broker_whose_span_process_died_goes_on_and_says_so_once(
    tracer: JobTracer, history: TransitionLog, caplog: pytest.LogCaptureFixture
) -> None:
    tracer._process.kill()
    tracer._process.wait()
    for number in range(20):
        history.accepted(job(str(number)), 10.0)
        history.note(Queued(str(number), 1, Phase.INIT, None), 10.0)
        end(history, str(number))
    tracer.close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith("spans of jobs are dropped: the process that makes them takes no more now")
    assert said[1] == "the spans of 20 jobs were dropped"


def test_what_the_span_process_does_not_read_in_time_is_dropped_by_whole_jobs(
    tracer: JobTracer,
    history: TransitionLog,
    receiver: OtlpReceiver,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_tracer, "END_S", 60.0)  # a busy machine takes longer for what was sent
    count = 120
    tracer._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**13)
    for number in range(count):
        history.accepted(job(str(number)), 10.0)
        history.note(Queued(str(number), 1, Phase.INIT, None), 10.0)
        end(history, str(number))
        if number == 0:
            tracer.flush()
            receiver.wait(lambda spans: of_job(spans, "0"))  # its process has started
            tracer._process.send_signal(signal.SIGSTOP)
    tracer._process.send_signal(signal.SIGCONT)
    tracer.close()
    dropped = int(caplog.records[-1].getMessage().split()[3])
    assert 0 < dropped < count
    jobs = [one for one in receiver.spans if one.name == "job shell"]
    assert len(jobs) == count - dropped
    assert len(receiver.spans) == 2 * len(jobs)
