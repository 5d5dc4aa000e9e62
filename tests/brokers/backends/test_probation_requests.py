"""Backends on probation: which jobs try them, and when they are ready again."""

from __future__ import annotations

from typing import Any

import pytest

from prorl_zmq.wire.messages.backends import (
    Assigned,
    BackendAlive,
    DrainBackend,
    GenerationFailed,
    HeldAssignment,
    ListBackends,
    OwnerAlive,
    Release,
    RemoveBackend,
)
from prorl_zmq.wire.messages.base import Done

from .test_request_handler import Broker, add, assign


def failed(name: str = "x", job_id: str = "a") -> GenerationFailed:
    return GenerationFailed("failed", job_id, name, "it coughs")


def test_a_backend_that_failed_is_listed_with_its_problem_and_gets_one_job_at_a_time_at_growing_intervals() -> None:
    broker = Broker()
    broker.ask(add("x"))
    broker.ask(add("y"))
    assert broker.ask(assign("a"))[b"client"].backend.backend_id == "x"
    broker.ask(failed())
    assert broker.ask(assign("a", leaving="x"))[b"client"].backend.backend_id == "y"
    tried = []
    for tenth in range(1, 1300):
        broker.now = tenth / 10
        broker.tick(broker.now)
        given = broker.ask(assign(f"job-{tenth}"))[b"client"].backend.backend_id
        if given == "x":
            tried.append(broker.now)
            broker.ask(failed(job_id=f"job-{tenth}"))
            assert broker.ask(assign(f"job-{tenth}", leaving="x"))[b"client"].backend.backend_id == "y"
        status = broker.ask(ListBackends("list"))[b"client"].backends[0]
        assert (status.state, status.problem) == ("probation", "it coughs")
    assert tried == [1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 123.0]
    assert status.next_try_s == pytest.approx(183.0 - broker.now)


def test_a_job_that_is_served_ends_the_probation() -> None:
    for served in (
        OwnerAlive("alive", "run-1", {"b": HeldAssignment(1, "x", 1)}),
        Release("release", "b", 1, 1),
    ):
        broker = Broker()
        broker.ask(add("x"))
        broker.ask(failed())
        broker.tick(1.0)
        assert isinstance(broker.ask(assign("b"))[b"client"], Assigned)
        assert broker.ask(assign("c"), b"c") == {}
        for silent in (OwnerAlive("alive", "run-1", {"b": HeldAssignment(1, "x")}), Release("release", "b", 0, 1)):
            assert list(broker.ask(silent)) == [b"client"]
        assert isinstance(broker.ask(served)[b"c"], Assigned)
        assert broker.listed()[0] == "ready"
        broker.ask(failed())
        broker.now = 2.0
        assert isinstance(broker.ask(assign("d"))[b"client"], Assigned), "the pause is the first one again"


def test_what_may_have_been_served_before_the_failure_does_not_end_a_probation() -> None:
    broker = Broker()
    broker.ask(add("x"))
    broker.ask(assign("held"))
    broker.ask(failed())
    for broker.now, served, state in ((1.9, 1, "probation"), (2.5, 1, "probation"), (2.6, 2, "ready")):
        broker.ask(OwnerAlive("alive", "run-1", {"held": HeldAssignment(1, "x", served)}))
        assert broker.listed()[0] == state


def test_many_failures_at_once_are_one() -> None:
    broker = Broker()
    broker.ask(add("x"))
    for number in range(64):
        broker.ask(failed(job_id=f"job-{number}"))
    broker.now = 1.0
    assert isinstance(broker.ask(assign("a"))[b"client"], Assigned)


@pytest.mark.parametrize("again", [add(), add(heartbeats=True)])
def test_a_backend_that_is_added_again_is_ready(again: Any) -> None:
    broker = Broker()
    broker.ask(add(heartbeats=True))
    broker.ask(failed())
    assert broker.ask(assign(), b"waits") == {}
    broker.ask(BackendAlive("alive", "x", 0))
    assert broker.listed()[0] == "probation", "its host lives, but that says little"
    assert isinstance(broker.ask(again)[b"waits"], Assigned)
    assert broker.listed()[0] == "ready"


def test_jobs_wait_while_all_are_on_probation_and_are_the_ones_that_try_them() -> None:
    broker = Broker()
    broker.ask(add("x"))
    broker.ask(assign("a"))
    broker.ask(failed())
    assert broker.ask(assign("a", leaving="x"), b"a") == {}
    assert broker.ask(assign("b"), b"b") == {}
    assert broker.handler.next_deadline() == 1.0
    assert [type(reply) for reply in broker.tick(1.0).values()] == [Assigned]
    assert broker.handler.next_deadline() == 3.0
    assert list(broker.tick(3.0)) == [b"b"]
    assert broker.handler.next_deadline() is None


def test_a_wait_ends_with_a_backend_that_may_work_rather_than_none() -> None:
    broker = Broker()
    broker.ask(add("x"))
    broker.ask(failed())
    broker.ask(assign("a", wait_s=0.5), b"a")
    assert isinstance(broker.tick(0.5)[b"a"], Assigned)
    broker.ask(DrainBackend("drain", "x"))
    broker.ask(assign("b", wait_s=0.5), b"b")
    assert broker.tick(1.0)[b"b"].error.code == "no_backend"


def test_the_failure_of_what_is_gone_changes_nothing() -> None:
    broker = Broker()
    assert broker.ask(failed()) == {b"client": Done("failed")}
    broker.ask(add("x"))
    broker.ask(failed())
    broker.ask(RemoveBackend("remove", "x"))
    broker.tick(5.0)
    broker.ask(add("x"))
    assert broker.listed()[0] == "ready"


@pytest.mark.parametrize("sent", [1, 2])
def test_a_job_that_waits_is_given_its_old_backend_once_that_is_back(sent: int) -> None:
    broker = Broker()
    broker.ask(add("x"))
    broker.ask(assign())
    broker.ask(DrainBackend("drain", "x"))
    moving = assign(leaving="x")
    for _ in range(sent):
        assert broker.ask(moving) == {}
    assert broker.in_flight() == {"x": 0}
    answers = broker.ask(add("x"), b"adds")
    assert {client: type(reply) for client, reply in answers.items()} == {b"adds": Done, b"client": Assigned}
    assert isinstance(broker.ask(moving)[b"client"], Assigned), "the answer was lost"
    assert broker.in_flight() == {"x": 1}
