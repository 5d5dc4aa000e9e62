"""The log of transitions: what a job's trace says, what is forgotten, what is counted, and what survives a restart."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.brokers.journal.records import Finished
from prorl_zmq.brokers.rollout.actions import End, Queued, Start
from prorl_zmq.brokers.rollout.transition_log import ENTRY_BYTES, INTERVALS, TransitionLog
from prorl_zmq.brokers.rollout.transitions import LIMIT_BYTES
from prorl_zmq.errors import ErrorInfo, UnknownJob
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.front_door import FrontDoorReply, JobTrace
from prorl_zmq.wire.messages.jobs import Job, Outcome, Phase, Result
from prorl_zmq.wire.messages.stages import StartPhase
from prorl_zmq.wire.messages.watching import ENDED_INTERVAL_S, EndedJobs

BEGAN = 1_800_000_000.0
LOST = ErrorInfo("lease_lost", "run was lost with its stage process run-1", {"attempts": 1})


class History(TransitionLog):
    """With shorter calls; times are seconds after `BEGAN`."""

    def queue(self, phase: Phase, at: float, attempt: int = 1, job_id: str = "a", error: Any = None) -> None:
        self.note(Queued(job_id, attempt, phase, error), BEGAN + at)

    def start(self, phase: Phase, at: float, attempt: int = 1, job_id: str = "a", stage: int = 1) -> None:
        command = StartPhase(job_id=job_id, attempt=attempt, phase=phase)
        self.note(Start(f"{phase}-{stage}", command, b"", "node-1"), BEGAN + at)

    def end(self, at: float, outcome: Outcome = Outcome.COMPLETED, job_id: str = "a", **more: Any) -> None:
        result = Result(job_id=job_id, task="math", outcome=outcome, **more)
        self.note(End(Finished("session", result, None)), BEGAN + at)

    def told(self, at: float, job_id: str = "a") -> JobTrace:
        return self.trace("r", job_id, BEGAN + at)


def spans_of(trace: JobTrace) -> list[tuple[str, str, int, float, float | None]]:
    return [(str(span.phase), span.place, span.attempt, span.start_s, span.end_s) for span in trace.spans]


def pass_all(history: History, job_id: str = "a", **more: Any) -> None:
    for number, phase in enumerate((Phase.INIT, Phase.RUN, Phase.EVAL)):
        history.queue(phase, 2.0 * number, job_id=job_id)
        history.start(phase, 2.0 * number + 0.5, job_id=job_id)
    history.end(6.0, job_id=job_id, **more)


def test_an_address_is_of_one_attempts_run_only() -> None:
    history = History()
    history.queue(Phase.RUN, 0.0)
    assert history.waits_for_address("a")
    history.start(Phase.RUN, 1.0)
    history.opened({"a": (1, "http://one")})
    assert (history.told(2.0).address, history.waits_for_address("a")) == ("http://one", False)
    history.queue(Phase.RUN, 3.0, attempt=2, error=LOST)
    assert (history.told(3.0).address, history.waits_for_address("a")) == ("", True)
    history.start(Phase.RUN, 4.0, attempt=2)
    history.opened({"a": (1, "http://one")})  # a report that comes late
    assert history.told(4.0).address == ""
    history.opened({"a": (2, "http://two")})
    assert history.told(5.0).address == "http://two"
    history.queue(Phase.EVAL, 6.0, attempt=2)
    assert (history.told(6.0).address, history.waits_for_address("a")) == ("", False)  # none will come
    history.end(7.0)
    history.opened({"a": (2, "http://two")})
    assert (history.told(8.0).address, history.waits_for_address("a")) == ("", False)


def test_the_trace_of_a_job_that_completes() -> None:
    history = History()
    pass_all(history, reward=0.5, group_id="g", stop_reason="stop", tokens=7, turns=2, backend="engine-0")
    trace = history.told(10.0)
    assert spans_of(trace) == [
        ("init", "queued", 1, 0.0, 0.5),
        ("init", "held", 1, 0.5, 2.0),
        ("run", "queued", 1, 2.0, 2.5),
        ("run", "held", 1, 2.5, 4.0),
        ("eval", "queued", 1, 4.0, 4.5),
        ("eval", "held", 1, 4.5, 6.0),
    ]
    assert [(span.stage_id, span.node, span.backends) for span in trace.spans if span.place == "held"] == [
        ("init-1", "node-1", ()),
        ("run-1", "node-1", ("engine-0",)),
        ("eval-1", "node-1", ()),
    ]
    assert (trace.accepted_at, trace.age_s, trace.ended_s, trace.collected_s) == (BEGAN, 10.0, 6.0, None)
    assert (trace.outcome, trace.reward, trace.error) == (Outcome.COMPLETED, 0.5, None)
    assert (trace.task, trace.group_id, trace.stop_reason, trace.tokens, trace.turns) == ("math", "g", "stop", 7, 2)
    history.collected(["a", "unknown"], BEGAN + 8.0)
    assert history.told(10.0).collected_s == 8.0


def test_what_ended_an_attempt_is_with_the_span_that_it_ended() -> None:
    history = History()
    history.queue(Phase.INIT, 0.0)
    history.start(Phase.INIT, 1.0)
    history.queue(Phase.RUN, 2.0)
    history.start(Phase.RUN, 3.0)
    history.assigned("a", 1, "engine-0", BEGAN + 3.5)
    history.queue(Phase.INIT, 13.0, attempt=2, error=LOST)
    history.start(Phase.INIT, 14.0, attempt=2, stage=2)
    trace = history.told(15.0)
    assert spans_of(trace)[3:] == [
        ("run", "held", 1, 3.0, 13.0),
        ("init", "queued", 2, 13.0, 14.0),
        ("init", "held", 2, 14.0, None),
    ]
    assert trace.spans[3].error == ErrorInfo(LOST.code, LOST.message)
    assert trace.spans[3].backends == ("engine-0",)
    assert [span.error for span in trace.spans if span is not trace.spans[3]] == [None] * 5
    assert trace.outcome is None
    history.end(16.0, Outcome.CANCELLED, error=ErrorInfo("cancelled", "on request"))
    trace = history.told(17.0)
    assert trace.spans[-1].end_s == trace.ended_s == 16.0
    assert trace.spans[-1].error == trace.error == ErrorInfo("cancelled", "on request")


def test_backends_are_told_in_the_order_in_which_a_run_had_them() -> None:
    history = History()
    history.queue(Phase.RUN, 0.0, attempt=2)
    history.start(Phase.RUN, 1.0, attempt=2)
    for backend in ("one", "one", "two", "two"):
        history.assigned("a", 2, backend, BEGAN + 2.0)
    history.assigned("a", 1, "of an older attempt", BEGAN + 2.0)
    history.assigned("unknown", 1, "one", BEGAN + 2.0)
    size = len(history.packed("a"))
    history.end(3.0, backend="two")
    assert history.told(4.0).spans[-1].backends == ("one", "two")
    assert size < 200


def test_a_clock_that_was_set_back_stands_still() -> None:
    history = History()
    history.queue(Phase.INIT, 0.0)
    history.start(Phase.INIT, 5.0)
    history.queue(Phase.RUN, -100.0)
    trace = history.told(-50.0)
    assert spans_of(trace) == [
        ("init", "queued", 1, 0.0, 5.0),
        ("init", "held", 1, 5.0, 5.0),
        ("run", "queued", 1, 5.0, None),
    ]
    assert trace.age_s == 5.0


def test_an_id_that_comes_again_has_a_history_of_its_own() -> None:
    history = History()
    pass_all(history)
    history.queue(Phase.INIT, 20.0)
    trace = history.told(21.0)
    assert (trace.outcome, len(trace.spans), trace.accepted_at) == (None, 1, BEGAN + 20.0)
    history.end(22.0, Outcome.CANCELLED)
    assert len(history) == 1


def test_a_job_is_found_by_its_id_or_a_beginning_that_no_other_has() -> None:
    history = History()
    pass_all(history, "abc")
    history.queue(Phase.INIT, 0.0, job_id="abd")
    history.queue(Phase.INIT, 0.0, job_id="ab")
    assert [history.find(beginning) for beginning in ("abc", "ab", "abd")] == ["abc", "ab", "abd"]
    history.queue(Phase.INIT, 0.0, job_id="x-1")
    assert history.find("x") == "x-1"
    with pytest.raises(UnknownJob, match="3 jobs have an id that begins with a: abd, ab, abc; give more") as caught:
        history.find("a")
    assert caught.value.fields == {"job_id": "a", "matches": 3}
    with pytest.raises(UnknownJob, match="no job y: it was never submitted here") as caught:
        history.find("y")
    assert caught.value.fields == {"job_id": "y", "matches": 0}


def test_the_oldest_ended_jobs_are_forgotten_first_and_jobs_under_way_never() -> None:
    history = History(ended_limit=3)
    history.queue(Phase.INIT, 0.0, job_id="under-way")
    for number in range(5):
        pass_all(history, f"job-{number}")
    assert len(history) == 4
    for job_id in ("under-way", "job-2", "job-3", "job-4"):
        assert history.find(job_id) == job_id
    for job_id in ("job-0", "job-1"):
        with pytest.raises(UnknownJob):
            history.find(job_id)


def test_ended_jobs_are_bounded_in_bytes_too() -> None:
    history = History(ended_limit_bytes=5000)
    error = ErrorInfo("handler_failed", "x" * 100_000)
    for number in range(100):
        pass_all(history, f"job-{number}", error=error)
        history.collected([f"job-{number}"], BEGAN + 7.0)
    assert 3 <= len(history) <= 10
    kept = sum(len(packed) + ENTRY_BYTES for number in range(100) if (packed := history.packed(f"job-{number}")))
    assert kept <= 5000 + 20 * len(history)  # the last transition of each, `ToClient`, is not counted
    assert history.find("job-99") == "job-99"


@pytest.mark.parametrize("message", ["", "x" * 10_000, "🙂" * 10_000], ids=["none", "long", "wide"])
def test_a_history_that_grows_too_long_loses_its_middle(message: str) -> None:
    history = History()
    attempts = 3000
    for attempt in range(1, attempts + 1):
        error = ErrorInfo("sandbox_failed", message) if attempt > 1 else None
        history.queue(Phase.INIT, attempt, attempt, error=error)
        history.start(Phase.INIT, attempt + 0.5, attempt)
    assert len(history.packed("a")) < LIMIT_BYTES + 4 * 400 + 200
    history.end(attempts + 1.0, Outcome.INFRASTRUCTURE_ERROR, error=ErrorInfo("sandbox_failed", message))
    trace = history.told(attempts + 2.0)
    assert trace.spans[0].attempt == 1
    assert trace.spans[-1].attempt == attempts
    assert len(trace.spans) + trace.left_out == 2 * attempts
    assert trace.outcome == Outcome.INFRASTRUCTURE_ERROR
    assert trace.accepted_at == BEGAN + 1.0
    assert codec.decode(codec.encode(trace), FrontDoorReply) == trace


def test_what_a_journal_kept_goes_on_in_the_next_broker() -> None:
    first = History()
    first.queue(Phase.INIT, 0.0, job_id="under-way")
    first.start(Phase.INIT, 1.0, job_id="under-way")
    pass_all(first, "ended", reward=1.0)
    kept = {job_id: first.packed(job_id) for job_id in ("under-way", "ended")}

    second = History()
    second.restore("under-way", kept["under-way"], BEGAN + 100.0)
    second.restore_ended("ended", kept["ended"])
    second.queue(Phase.RUN, 101.0, job_id="under-way")
    trace = second.told(102.0, "under-way")
    assert spans_of(trace) == [
        ("init", "queued", 1, 0.0, 1.0),
        ("init", "held", 1, 1.0, 101.0),
        ("run", "queued", 1, 101.0, None),
    ]
    assert trace.restarts == (100.0,)
    second.collected(["ended"], BEGAN + 103.0)
    trace = second.told(104.0, "ended")
    assert (trace.outcome, trace.ended_s, trace.collected_s, trace.restarts) == (Outcome.COMPLETED, 6.0, 103.0, ())
    assert len(second) == 2


def test_the_model_of_a_job_is_in_its_trace_and_its_row_also_after_a_restart() -> None:
    history = History()
    for job_id, model in (("a", "policy"), ("b", "critic")):
        history.accepted(Job(job_id=job_id, task="t", instance={}, model=model), BEGAN)
        history.queue(Phase.INIT, 0.0, job_id=job_id)
    again = History()
    again.restore("b", history.packed("b"), BEGAN + 1.0)
    assert [history.told(1.0, "a").model, history.told(1.0, "b").model] == ["policy", "critic"]
    rows = [one.row(job_id, "t", "") for one, job_id in ((history, "a"), (history, "b"), (again, "b"))]
    assert [row.model if row is not None else None for row in rows] == ["", "critic", "critic"]
    assert again.told(2.0, "b").spans[0].start_s == 0.0


EARLIER = (
    "9407cb4024000000000000a174a1709600cb402400000000000001a372756ea0a09601cb402600000000000001a372756ea572756e2d31a16e"
    "9402cb402700000000000001a1659205cb40280000000000009600cb402a00000000000002a4696e6974aa6c656173655f6c6f7374a4676f6e"
    "659306cb402c000000000000039c03cb402e000000000000a46d617468a167a66661696c6564c0a1730702a165a163a16d9204cb4030000000"
    "000000"
)
"""A history with a transition of each kind, as the first version of schema 6 stored it in journals."""


def test_a_history_in_a_journal_of_an_earlier_version_is_read() -> None:
    history = History()
    history.restore_ended("a", bytes.fromhex(EARLIER))
    trace = history.trace("r", "a", 20.0)
    assert spans_of(trace) == [
        ("run", "queued", 1, 0.0, 1.0),
        ("run", "held", 1, 1.0, 3.0),
        ("init", "queued", 2, 3.0, 4.0),
    ]
    assert (trace.spans[1].stage_id, trace.spans[1].node, trace.spans[1].backends) == ("run-1", "n", ("e",))
    assert trace.spans[1].error == ErrorInfo("lease_lost", "gone")
    assert (trace.traceparent, trace.parent_span, trace.restarts, trace.left_out) == ("t", "p", (2.0,), 3)
    assert (trace.outcome, trace.task, trace.group_id, trace.stop_reason) == (Outcome.FAILED, "math", "g", "s")
    assert (trace.tokens, trace.turns, trace.error) == (7, 2, ErrorInfo("c", "m"))
    assert (trace.ended_s, trace.collected_s) == (5.0, 6.0)


def test_a_reward_that_is_no_number_is_told() -> None:
    history = History()
    pass_all(history, reward=math.nan)
    assert math.isnan(history.told(7.0).reward or 0.0)


STEPS = st.lists(
    st.tuples(st.sampled_from(["queue", "start", "assign", "end", "restart", "collect"]), st.floats(-5.0, 5.0)),
    max_size=60,
)


@given(STEPS)
def test_whatever_happens_the_spans_of_a_trace_follow_each_other(steps: list[tuple[str, float]]) -> None:
    history = History()
    history.queue(Phase.INIT, 0.0)
    now, attempt = 0.0, 1
    for what, passed_s in steps:
        now += passed_s
        match what:
            case "queue":
                attempt += 1
                history.queue(Phase.RUN, now, attempt, error=LOST)
            case "start":
                history.start(Phase.RUN, now, attempt)
            case "assign":
                history.assigned("a", attempt, f"engine-{passed_s}", BEGAN + now)
            case "end":  # the next one is of another job of this id
                history.end(now)
                history.queue(Phase.INIT, now)
            case "restart":
                restored = History()
                restored.restore("a", history.packed("a"), BEGAN + now)
                history = restored
            case "collect":
                history.collected(["a"], BEGAN + now)
    trace = history.told(now)
    assert codec.decode(codec.encode(trace), FrontDoorReply) == trace
    assert trace.age_s >= 0
    ends = [*(span.start_s for span in trace.spans[1:]), None]
    for span, end_s in zip(trace.spans, ends, strict=True):
        assert span.end_s == end_s
        assert 0 <= span.start_s <= (trace.age_s if span.end_s is None else span.end_s)


@pytest.mark.parametrize(
    "damaged",
    [
        lambda packed: b"\xc1\xff\xff",
        lambda packed: packed[:-3],
        lambda packed: packed + b"\xc1",
        lambda packed: packed + codec.pack([7, "x", {}]) * 2000,
        lambda packed: codec.pack([0, BEGAN, 2**40, "init", "", ""]),
        lambda packed: codec.pack("text") + packed,
        lambda packed: packed.replace(b"init-1", b"\xff\xff\xff\xff\xff\xff"),
    ],
    ids=["nothing left", "cut", "end", "wrong types", "wild attempt", "no item", "no utf-8"],
)
def test_a_damaged_history_is_told_as_far_as_it_can_be_read_and_goes_on(damaged: Any) -> None:
    before = History()
    before.queue(Phase.INIT, 0.0)
    before.start(Phase.INIT, 1.0)
    packed = damaged(before.packed("a"))
    history = History()
    history.restore("a", packed, BEGAN + 10.0)
    history.queue(Phase.INIT, 11.0, attempt=2, error=LOST)
    history.end(12.0, Outcome.CANCELLED)
    told = history.told(13.0)
    assert told.restarts
    assert (told.outcome, told.spans[-1].attempt) == (Outcome.CANCELLED, 2)
    assert codec.decode(codec.encode(told), FrontDoorReply) == told
    ended = History()
    ended.restore_ended("a", packed)
    if len(ended):
        assert codec.decode(codec.encode(ended.told(13.0)), FrontDoorReply)
    else:
        with pytest.raises(UnknownJob):
            ended.find("a")


def counted(history: History) -> list[tuple[float, dict[Outcome, int]]]:
    return [(one.at - BEGAN, one.outcomes) for one in history.ended_jobs()]


def test_each_interval_has_the_jobs_that_ended_within_it() -> None:
    history = History()
    for second in range(3, 33):
        if second < 10 or second >= 29:
            history.end(second + 0.5, Outcome.COMPLETED if second < 10 else Outcome.FAILED, job_id=f"job-{second}")
    assert history.ended_jobs() == (
        EndedJobs(BEGAN, ENDED_INTERVAL_S, {Outcome.COMPLETED: 7}),
        EndedJobs(BEGAN + 20.0, ENDED_INTERVAL_S, {Outcome.FAILED: 1}),
        EndedJobs(BEGAN + 30.0, ENDED_INTERVAL_S, {Outcome.FAILED: 3}),
    )
    assert history.outcomes == {Outcome.COMPLETED: 7, Outcome.FAILED: 4}


def test_an_hour_of_intervals_is_kept() -> None:
    history = History()
    for number in range(2 * INTERVALS):
        history.end(number * ENDED_INTERVAL_S, job_id=f"job-{number}")
    assert [at for at, _ in counted(history)] == [
        number * ENDED_INTERVAL_S for number in range(INTERVALS, 2 * INTERVALS)
    ]
    assert {tuple(outcomes.items()) for _, outcomes in counted(history)} == {((Outcome.COMPLETED, 1),)}


def test_a_clock_that_is_set_back_leaves_no_interval_in_the_future() -> None:
    history = History()
    for number, at in enumerate((1000.0, 9000.0, 1005.0)):
        history.end(at, job_id=f"job-{number}")
    assert counted(history) == [(1000.0, {Outcome.COMPLETED: 2})]
