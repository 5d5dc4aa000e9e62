"""Backends that could not load the wanted weights: they are asked again, and lists and logs say why."""

from __future__ import annotations

import logging
import math
from collections import Counter

import pytest
from support.weight_requests import Service

from prorl_zmq.brokers.backends.weight_calls import AGAIN_MOST_S, AGAIN_S, LEAST_SHARE, wait_share
from prorl_zmq.brokers.backends.weight_requests import CATCH_UP_S
from prorl_zmq.errors import InvalidWeights
from prorl_zmq.wire.messages.base import Refused
from prorl_zmq.wire.messages.engines import UpdateMode, WeightUpdate


def loaded() -> Service:
    """A service whose backend x serves weights 3, and y has yet to load them."""
    service = Service("x")
    service.ask(WeightUpdate("r", "load", 3, "/weights-3"))
    service.answer(service.calls()["x"])
    service.replies.clear()
    service.add("y")
    return service


def test_a_backend_that_could_not_catch_up_is_asked_again_after_ever_longer_waits() -> None:
    service = loaded()
    waits = []
    for _ in range(9):
        service.answer(service.calls()["y"], InvalidWeights("no such folder"))
        asked = service.now
        while not (calls := service.handler.weights.take_calls()):
            service.tick(service.now + 1.0)
        waits.append(service.now - asked)
        (call,) = calls
        assert (call.address.endpoint, call.request.step, call.request.path) == ("ipc://y", "load", "/weights-3")
        service.handler.weights.reconnected(call.address)  # `calls` has it again
    share = wait_share("y")
    assert waits[:3] == [math.ceil(share * wait_s) for wait_s in (AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S)]
    assert waits[-1] == math.ceil(share * AGAIN_MOST_S)
    service.answer(service.calls()["y"])
    assert service.states() == {"x": ("ready", 3), "y": ("ready", 3)}
    service.tick(service.now + 2 * AGAIN_MOST_S)
    assert service.calls() == {}


def test_backends_that_failed_together_are_asked_at_different_times() -> None:
    service = Service(["good", *(f"engine-{number}" for number in range(100))])
    service.ask(WeightUpdate("r", "load", 3, "/weights-3"))
    asked: Counter[float] = Counter()
    while service.now < 4 * AGAIN_MOST_S:
        for call in service.handler.weights.take_calls():
            is_load = call.request.step == "load"
            asked[service.now] += is_load
            failed = is_load and call.address.endpoint != "ipc://good"
            service.answer(call, InvalidWeights("damaged") if failed else None)
        service.tick(service.now + 1.0)
    late = {now: count for now, count in asked.items() if now > 2 * AGAIN_MOST_S}
    assert sum(late.values()) > 100
    assert max(late.values()) < 10
    assert all(LEAST_SHARE <= wait_share(f"engine-{number}") <= 1 for number in range(100))


def test_a_catch_up_that_was_not_answered_is_asked_for_again() -> None:
    service = loaded()
    late = service.calls()["y"]
    service.tick(CATCH_UP_S)
    service.tick(CATCH_UP_S + AGAIN_S)
    again = service.calls()["y"]
    assert (again.request.path, again.request.weight_version) == ("/weights-3", 3)
    assert again.request.request_id != late.request.request_id


def test_a_backend_that_rejected_an_update_is_asked_again_while_the_others_serve_it() -> None:
    service = Service()
    service.ask(WeightUpdate("r", "load", 3, "/weights-3"))
    calls = service.calls()
    service.answer(calls["x"])
    service.answer(calls["y"], InvalidWeights("torn"))
    assert service.refusal() == ("invalid_weights", "y")
    assert service.states() == {"x": ("ready", 3), "y": ("behind", 0)}
    service.tick(AGAIN_S)
    assert service.calls()["y"].request.path == "/weights-3"


def test_older_whole_weights_end_the_tries() -> None:
    service = loaded()
    service.answer(service.calls()["y"], InvalidWeights("torn"))
    service.ask(WeightUpdate("by-hand", "load", 2, "/weights-2", take_over=True))
    for call in service.calls().values():
        service.answer(call)
    assert service.states() == {"x": ("ready", 2), "y": ("ready", 2)}
    service.tick(AGAIN_MOST_S)
    assert service.calls() == {}


def test_the_log_says_why_weights_were_rejected(caplog: pytest.LogCaptureFixture) -> None:
    service = Service("x")
    service.ask(WeightUpdate("r", "load", 23, "/weights-23"))
    service.answer(service.calls()["x"], InvalidWeights("weight_v000023 is torn"))
    (warning,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert warning.getMessage() == "load of weights 23 of policy: backend x: weight_v000023 is torn"


@pytest.mark.parametrize(("mode", "hint"), [("drain", True), ("keep", False)])
def test_a_host_that_drains_too_long_is_said_to_wait_for_generations(*, mode: UpdateMode, hint: bool) -> None:
    service = Service("x")
    service.ask(WeightUpdate("r", "load", 3, "/weights-3", mode, timeout_s=30.0))
    assert service.calls()["x"].request.step == "load"
    service.tick(30.0)
    reply = service.reply()
    assert isinstance(reply, Refused)
    assert reply.error.code == "request_timeout"
    assert ("it waits for its running generations; mode 'keep' does not" in reply.error.message) == hint
