"""What ends the fetch of a `load`: a newer one of the same trainer, a cancel, or the end of its trainer's lease."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.weight_requests import Service

from prorl_zmq.brokers.backends.trainer_lease import LEASE_S
from prorl_zmq.wire.messages.backends import BackendList, HoldWeights, ListBackends
from prorl_zmq.wire.messages.base import Done, Refused
from prorl_zmq.wire.messages.engines import WeightsServed, WeightUpdate

LOAD = WeightUpdate("r", "load", 3, "/weights-3", trainer="t", timeout_s=600.0)


def fetching(load: WeightUpdate = LOAD) -> Service:
    """Return a service whose hosts fetch weights 3 and do not answer."""
    service = Service()
    service.ask(load, b"dead")
    assert {call.request.step for call in service.calls(fetches=True).values()} == {"fetch"}
    return service


def refused(service: Service) -> tuple[str, str]:
    """Return the code and message with which the first load was refused, and forget that reply."""
    (reply,) = [reply for client, reply in service.replies if client == b"dead"]
    service.replies = [(client, reply) for client, reply in service.replies if client != b"dead"]
    assert isinstance(reply, Refused)
    return reply.error.code, reply.error.message


@pytest.mark.parametrize(
    "newer",
    [
        replace(LOAD, request_id="s", weight_version=4, path="/weights-4"),
        replace(LOAD, request_id="s"),
        replace(LOAD, request_id="s", weight_version=2, trainer="other", take_over=True),
    ],
)
def test_a_load_of_a_trainer_replaces_its_fetch_at_once(newer: WeightUpdate) -> None:
    service = fetching()
    service.ask(newer)
    code, message = refused(service)
    assert code == "update_in_progress"
    assert f"replaced by weights {newer.weight_version}" in message
    loads = service.calls()
    assert {(call.request.step, call.request.weight_version) for call in loads.values()} == {
        ("load", newer.weight_version)
    }
    for call in loads.values():
        service.answer(call)
    assert service.reply() == WeightsServed("s", {})
    assert set(service.states().values()) == {("ready", newer.weight_version)}


def test_weights_that_engines_load_cannot_be_cancelled() -> None:
    service = Service()
    service.ask(LOAD, b"trainer")
    loads = service.calls()
    assert {call.request.step for call in loads.values()} == {"load"}
    service.ask(WeightUpdate("c", "cancel", 3, trainer="t"))
    reply = service.reply()
    assert isinstance(reply, Refused)
    assert reply.error.code == "update_in_progress"
    assert "engines load weights 3: that cannot be cancelled" in reply.error.message
    for call in loads.values():
        service.answer(call)
    assert set(service.states().values()) == {("ready", 3)}


def test_another_trainer_replaces_no_fetch() -> None:
    service = fetching()
    service.ask(replace(LOAD, request_id="s", weight_version=4, trainer="other"))
    reply = service.reply()
    assert isinstance(reply, Refused)
    assert reply.error.code == "weights_held"


def test_a_fetch_ends_with_its_trainers_lease() -> None:
    service = fetching()
    service.tick(LEASE_S - 0.1)
    service.ask(HoldWeights("h", "t"))
    assert service.reply() == Done("h")
    service.tick(2 * LEASE_S - 0.2)
    assert service.replies == [], "the trainer lives"
    service.tick(2 * LEASE_S)
    assert refused(service)[0] == "request_timeout"
    assert service.handler.next_deadline() is None
    service.ask(replace(LOAD, request_id="s", weight_version=4, trainer="other"))
    assert {call.request.weight_version for call in service.calls().values()} == {4}


def test_the_goodbye_of_an_earlier_client_of_the_session_ends_no_fetch() -> None:
    service = fetching()
    service.ask(HoldWeights("h", "t", goodbye=True))
    assert service.reply() == Done("h")
    service.tick(1.0)
    assert service.replies == []


def test_a_cancel_of_its_version_ends_a_fetch() -> None:
    service = fetching()
    service.ask(WeightUpdate("c", "cancel", 3, trainer="operator", take_over=True))
    assert refused(service) == ("update_not_begun", "weights 3 were cancelled while engine hosts fetched them")
    for call in service.calls().values():
        assert call.request.step == "cancel"
        service.answer(call)
    assert service.reply() == Done("c")
    assert set(service.states().values()) == {("ready", 0)}
    assert service.handler.next_deadline() is None


def test_a_refusal_says_how_the_fetch_ends() -> None:
    service = fetching()
    service.now = 12.0
    service.ask(WeightUpdate("o", "end", 4, trainer="t"))
    reply = service.reply()
    assert isinstance(reply, Refused)
    assert reply.error.code == "update_in_progress"
    for said in ("of session t since 12 s", "at most 288 s more", "`prorl backends cancel-weights 3`"):
        assert said in reply.error.message


def test_the_list_says_which_hosts_fetch() -> None:
    service = Service()
    service.ask(LOAD, b"dead")
    fetches = service.calls(fetches=True)

    def listed() -> dict[str, int | None]:
        ((_, reply),) = service.handler.handle([b"look", b""], ListBackends("list"), service.now)
        assert isinstance(reply, BackendList)
        return {one.backend.backend_id: one.fetching for one in reply.backends}

    assert listed() == {"x": 3, "y": 3}
    service.answer(fetches["x"])
    assert listed() == {"x": None, "y": 3}
    service.answer(fetches["y"])
    assert listed() == {"x": None, "y": None}


def test_a_fetch_of_an_update_that_was_begun_is_not_replaced() -> None:
    service = Service()
    service.ask(WeightUpdate("b", "begin", 3, trainer="t", limit_s=60.0))
    for call in service.calls().values():
        service.answer(call)
    assert service.reply() == Done("b")
    service.ask(LOAD, b"dead")
    service.ask(replace(LOAD, request_id="s", weight_version=4))
    reply = service.reply()
    assert isinstance(reply, Refused)
    assert reply.error.code == "update_in_progress"
    service.tick(LEASE_S)
    assert service.replies == [], "engines are paused until the update's limit"
