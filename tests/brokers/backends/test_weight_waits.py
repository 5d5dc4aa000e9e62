"""Jobs that wait for a backend while new weights are on their way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prorl_zmq.wire.messages.backends import (
    BackendAlive,
    ListBackends,
)
from prorl_zmq.wire.messages.base import Done, Refused
from prorl_zmq.wire.messages.engines import WeightUpdate

from .test_request_handler import Broker, add, assign

if TYPE_CHECKING:
    import pytest


def begun(*names: str) -> Broker:
    """A broker whose backends serve version 1 while version 2 is on its way."""
    broker = Broker()
    for name in names:
        broker.ask(add(name, heartbeats=True, version=1))
    assert broker.ask(WeightUpdate("begin", "begin", 2, limit_s=100.0)) == {b"client": Done("begin")}
    return broker


def refusal(answers: dict[bytes, Any]) -> tuple[str, str]:
    reply = answers[b"client"]
    assert isinstance(reply, Refused)
    return reply.error.code, reply.error.message


def test_jobs_wait_while_weights_are_on_their_way_for_the_backend_that_has_them_first() -> None:
    broker = begun("x", "y")
    assert broker.ask(assign("a"), b"first") == {}
    assert broker.listed("x") == ("updating", 1)
    given = broker.ask(BackendAlive("alive", "y", 2))[b"first"]
    assert given.backend.backend_id == "y"
    assert broker.ask(assign("b"), b"second")[b"second"].backend.backend_id == "y"
    broker.ask(WeightUpdate("set", "set", 2, backend_id="x"))
    assert broker.ask(assign("c"), b"third")[b"third"].backend.backend_id == "x"
    assert broker.ask(WeightUpdate("end", "end", 2)) == {b"client": Done("end")}
    assert broker.ask(WeightUpdate("end", "end", 2)) == {b"client": Done("end")}
    assert (broker.listed("x"), broker.listed("y")) == (("ready", 2), ("ready", 2))


def test_a_job_keeps_the_backend_that_it_has_while_weights_are_on_their_way() -> None:
    broker = Broker()
    broker.ask(add("x", version=1))
    broker.ask(assign("a"), b"first")
    broker.ask(WeightUpdate("begin", "begin", 2, limit_s=100.0))
    assert broker.ask(assign("a"), b"first")[b"first"].backend.backend_id == "x"
    assert broker.ask(assign("a", attempt=2), b"first") == {}, "a new attempt is a new assignment"


def test_a_group_goes_back_to_its_backend_when_the_weights_are_there() -> None:
    broker = Broker("group")
    for name in "xyz":
        broker.ask(add(name, version=1))
    at = broker.ask(assign("a", group="g"))[b"client"].backend.backend_id
    broker.ask(WeightUpdate("begin", "begin", 2, limit_s=100.0))
    broker.ask(assign("b", group="g"), b"second")
    for name in sorted("xyz", key=lambda name: name != at):
        answers = broker.ask(WeightUpdate("set", "set", 2, backend_id=name))
        if b"second" in answers:
            assert answers[b"second"].backend.backend_id == at


def test_a_backend_that_joins_with_older_weights_gets_no_jobs_until_it_has_the_newer_ones() -> None:
    broker = begun("x")
    broker.ask(add("y", heartbeats=True, version=1))
    assert broker.listed("y") == ("updating", 1)
    broker.late = {"y"}
    broker.ask(WeightUpdate("end", "end", 2))
    broker.ask(add("z", version=1))
    broker.ask(add("new", heartbeats=True, version=2))
    assert [broker.listed(name) for name in ("x", "y", "z", "new")] == [
        ("ready", 2),
        ("behind", 1),
        ("behind", 1),
        ("ready", 2),
    ]
    broker.ask(BackendAlive("alive", "y", 2))
    assert broker.listed("y") == ("ready", 2)
    broker.ask(WeightUpdate("set", "set", 1))
    assert broker.listed("z") == ("ready", 1), "the trainer went back to these"


def test_a_trainer_that_goes_back_to_older_weights_updates_all() -> None:
    broker = begun("x", "y")
    for name in ("x", "y"):
        broker.ask(WeightUpdate("set", "set", 2, backend_id=name))
    broker.ask(WeightUpdate("end", "end", 2))
    broker.ask(WeightUpdate("begin", "begin", 1, limit_s=100.0))
    assert broker.listed("x") == ("updating", 2)
    broker.late = {"y"}
    broker.ask(WeightUpdate("end", "end", 1))
    assert (broker.listed("x"), broker.listed("y")) == (("ready", 1), ("behind", 2))


def test_an_update_whose_end_does_not_come_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    broker = Broker()
    broker.ask(add("x", version=1))
    broker.ask(WeightUpdate("begin", "begin", 2, limit_s=30.0))
    broker.ask(assign("a", wait_s=60.0), b"first")
    broker.tick(20.0)
    broker.ask(WeightUpdate("again", "begin", 2, limit_s=30.0))
    assert broker.handler.next_deadline() == 50.0
    assert broker.tick(49.0) == {}
    assert broker.tick(50.0)[b"first"].backend.backend_id == "x"
    assert "did not end within 30 s and was given up" in caplog.text
    (status,) = broker.ask(ListBackends("list"))[b"client"].backends
    assert (status.state, status.backend.weight_version) == ("ready", 1)
    assert "update to weights 2 did not end" in status.problem
    broker.late = {"x"}
    assert refusal(broker.ask(WeightUpdate("end", "end", 2)))[0] == "update_not_begun"
    broker.late = set()
    broker.ask(WeightUpdate("set", "set", 2, backend_id="x"))
    (status,) = broker.ask(ListBackends("list"))[b"client"].backends
    assert status.problem == ""
    assert broker.ask(WeightUpdate("late", "end", 2)) == {b"client": Done("late")}, "it only came late"


def test_a_job_waits_for_new_weights_no_longer_than_it_allows() -> None:
    broker = begun("x")
    broker.ask(assign("a", wait_s=5.0), b"first")
    error = broker.tick(5.0)[b"first"].error
    assert error.code == "no_backend"
    assert "weights 2 are on their way" in error.message


def test_one_update_at_a_time_and_each_has_its_end() -> None:
    broker = begun("x")
    assert broker.ask(WeightUpdate("again", "begin", 2, limit_s=100.0)) == {b"client": Done("again")}
    for other in (
        WeightUpdate("r", "begin", 3, limit_s=100.0),
        WeightUpdate("r", "end", 3),
        WeightUpdate("r", "cancel", 3),
        WeightUpdate("r", "set", 3, backend_id="x"),
        WeightUpdate("r", "set", 2),
    ):
        code, message = refusal(broker.ask(other))
        assert code == "update_in_progress"
        assert "an update to weights 2 was begun and has not ended" in message
    assert broker.ask(WeightUpdate("cancel", "cancel", 2)) == {b"client": Done("cancel")}
    assert broker.listed("x") == ("ready", 1)
    assert broker.ask(WeightUpdate("cancel", "cancel", 2)) == {b"client": Done("cancel")}
    broker.late = {"x"}
    code, message = refusal(broker.ask(WeightUpdate("end", "end", 2)))
    assert code == "update_not_begun"
    assert "no update to weights 2 was begun" in message
