from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.machines import few_and_many

from prorl_zmq.brokers.journal.records import Finished, job_digest
from prorl_zmq.brokers.rollout import result_store
from prorl_zmq.brokers.rollout.result_store import REDELIVER_S, ResultStore, size_bound
from prorl_zmq.client.delivery import CollectState, Delivery
from prorl_zmq.errors import ErrorInfo
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.front_door import Collected, FrontDoorReply
from prorl_zmq.wire.messages.jobs import STEPS_LIMIT, Outcome, Result, Step

if TYPE_CHECKING:
    from hypothesis import settings


def finished(job_id: str, session: str = "s") -> Finished:
    return Finished(session, Result(job_id=job_id, task="math", outcome=Outcome.COMPLETED, reward=1.0), None)


def ids(results: list[Finished]) -> list[str]:
    return [item.result.job_id for item in results]


def outbox_of(*job_ids: str) -> ResultStore:
    outbox = ResultStore()
    for job_id in job_ids:
        outbox.put(finished(job_id))
    return outbox


def test_results_come_oldest_first_and_no_more_than_asked_for() -> None:
    outbox = outbox_of("a", "b", "c")
    assert ids(outbox.take("s", "client", 2, 0.0)) == ["a", "b"]


def test_a_session_gets_its_own_results_only() -> None:
    outbox = outbox_of("a")
    assert outbox.take("other", "client", 10, 0.0) == []
    assert outbox.acknowledge("other", ["a"]) == []
    assert outbox.get("a") == finished("a")
    assert (outbox.waiting("s"), outbox.waiting("other")) == (1, 0)


def test_the_client_whose_reply_was_lost_gets_the_results_again() -> None:
    outbox = outbox_of("a")
    outbox.take("s", "client", 10, 0.0)
    assert ids(outbox.take("s", "client", 10, 1.0)) == ["a"]


def test_another_client_gets_them_once_the_first_is_taken_for_dead() -> None:
    outbox = outbox_of("a")
    outbox.take("s", "first", 10, 0.0)
    assert outbox.take("s", "second", 10, REDELIVER_S - 0.1) == []
    assert ids(outbox.take("s", "second", 10, REDELIVER_S)) == ["a"]
    assert outbox.take("s", "first", 10, REDELIVER_S) == []


def test_what_a_client_was_not_reached_with_goes_to_any_other_at_once() -> None:
    outbox = outbox_of("a")
    outbox.put_back(outbox.take("s", "dead", 10, 0.0))
    assert ids(outbox.take("s", "heir", 10, 0.0)) == ["a"]


def test_a_digest_tells_jobs_apart() -> None:
    assert job_digest(b"one") == job_digest(b"one") != job_digest(b"another")


NUMBERS = st.dictionaries(st.text(max_size=128), st.floats(allow_nan=False), max_size=20)
TEXTS = st.dictionaries(st.text(max_size=20), st.text(max_size=200), max_size=8)


STEPS = st.lists(st.builds(Step, st.text(max_size=128), st.integers(0, 2**31), st.floats(0), st.floats(0)), max_size=50)


@given(NUMBERS, NUMBERS, TEXTS, st.text(), st.text(), TEXTS, st.lists(st.integers(1, 2**31 - 1), max_size=50), STEPS)
def test_a_packed_result_is_no_larger_than_its_bound(
    metrics: dict[str, float],
    timings: dict[str, float],
    notes: dict[str, str],
    backend: str,
    message: str,
    fields: dict[str, str],
    segments: list[int],
    steps: list[Step],
) -> None:
    result = Result(
        job_id="x" * 64,
        task="x" * 128,
        outcome=Outcome.INFRASTRUCTURE_ERROR,
        group_id="x" * 128,
        error=ErrorInfo("x" * 64, message, {**fields, "number": 2**63, "none": None}),
        stop_reason=backend,
        backend=backend,
        metrics=metrics,
        timings=timings,
        notes=notes,
        segments=tuple(segments),
        steps=tuple(steps),
    )
    assert len(codec.encode(result)) <= size_bound(result)


def test_what_one_header_cannot_hold_comes_in_the_next_reply() -> None:
    large = {"report": "x" * 1000}
    store = ResultStore()
    for job_id in ("a", "b", "c"):
        result = Result(job_id=job_id, task="math", outcome=Outcome.COMPLETED, reward=1.0, notes=large)
        store.put(Finished("s", result, None))
    limit = 2 * result_store.size_bound(result)
    assert ids(store.take("s", "client", 10, 0.0, limit_bytes=limit)) == ["a", "b"]
    assert ids(store.take("s", "client", 10, 0.0, limit_bytes=1)) == ["a"]


def test_a_reply_of_results_with_many_steps_has_no_more_arrays_than_a_header_may_have() -> None:
    steps = tuple(Step("", 1, 0.0, 0.0) for _ in range(STEPS_LIMIT))
    store = ResultStore()
    for number in range(1000):
        result = Result(job_id=f"j{number}", task="math", outcome=Outcome.COMPLETED, steps=steps)
        store.put(Finished("s", result, None))
    given = tuple(one.result for one in store.take("s", "client", 1024, 0.0))
    assert len(given) > 10
    assert codec.decode(codec.encode(Collected("r", given)), FrontDoorReply).results == given


def test_what_is_acknowledged_is_gone() -> None:
    outbox = outbox_of("a", "b")
    assert [finished.result.job_id for finished in outbox.acknowledge("s", ["a", "a", "unknown"])] == ["a"]
    assert outbox.get("a") is None
    assert outbox.waiting("s") == 1
    assert ids(outbox.take("s", "client", 10, 0.0)) == ["b"]
    assert [finished.result.job_id for finished in outbox.acknowledge("s", ["b"])] == ["b"]
    assert len(outbox) == 0


class LossyDelivery(RuleBasedStateMachine):
    """Two live clients of one session over a network that loses requests and replies: each result comes exactly once.

    A result that one client holds is not given to the other while the first goes on asking.
    """

    @initialize()
    def start(self) -> None:
        self.outbox = ResultStore()
        self.now = 0.0
        self.clients = {name: CollectState("s", name) for name in ("left", "right")}
        self.ended: list[str] = []
        self.got: list[str] = []

    @rule(count=st.integers(1, 3))
    def jobs_end(self, count: int) -> None:
        for _ in range(count):
            self.ended.append(f"job-{len(self.ended)}")
            self.outbox.put(finished(self.ended[-1]))

    @rule(client=st.sampled_from(["left", "right"]), most=st.integers(0, 3), fate=st.sampled_from(["arrives", "lost"]))
    def poll(self, client: str, most: int, fate: str) -> None:
        state = self.clients[client]
        if state.waiting:
            return
        request = state.request(most, 0.0)
        self.outbox.acknowledge(request.session, request.acknowledge)
        results = self.outbox.take(request.session, request.client_id, request.max_results, self.now)
        if fate == "arrives":
            reply = Collected(request.request_id, tuple(item.result for item in results))
            state.receive(request, Delivery(request, [codec.encode(reply)]))

    @precondition(lambda self: any(state.waiting for state in self.clients.values()))
    @rule(most=st.integers(1, 3))
    def hand_over(self, most: int) -> None:
        for state in self.clients.values():
            self.got += [trajectory.job_id for trajectory in state.take(most)]

    @rule(seconds=st.sampled_from([0.1, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def nothing_comes_twice(self) -> None:
        assert len(self.got) == len(set(self.got))
        assert set(self.got) <= set(self.ended)

    def teardown(self) -> None:
        if not hasattr(self, "outbox"):
            return
        for _ in range(3):
            for name in self.clients:
                self.hand_over(100)
                self.poll(name, 1000, "arrives")
        self.hand_over(100)
        assert sorted(self.got) == sorted(self.ended)
        for name in self.clients:
            self.poll(name, 1000, "arrives")
        assert len(self.outbox) == 0


@few_and_many(10)
def test_lossy_delivery(runs: settings) -> None:
    run_state_machine_as_test(LossyDelivery, settings=runs)


def test_results_that_do_not_fit_one_header_come_one_reply_after_the_other() -> None:
    outbox = outbox_of("a", "b", "c")
    taken = outbox.take("s", "client", 10, now=0.0, limit_bytes=1)
    assert [finished.result.job_id for finished in taken] == ["a"]
    outbox.acknowledge("s", ["a"])
    taken = outbox.take("s", "client", 10, now=0.0)
    assert [finished.result.job_id for finished in taken] == ["b", "c"]
