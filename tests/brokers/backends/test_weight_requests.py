"""Requests about weights: who is asked, when it is over, and what the client is told. Without sockets."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from support.weight_requests import Service

from prorl_zmq.brokers.backends.weight_calls import EngineAddress, EngineCall
from prorl_zmq.brokers.backends.weight_requests import REQUESTS_LIMIT
from prorl_zmq.errors import FIELDS_LIMIT, EngineFailed, InvalidWeights, NotAllowed, ProrlError, UpdateNotBegun
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.backends import (
    TAKE_BACK_S,
    AnyBackendReply,
    RemoveBackend,
)
from prorl_zmq.wire.messages.base import Done, Refused
from prorl_zmq.wire.messages.engines import Receiver, UpdateStep, UpdateTimes, WeightsServed, WeightUpdate

SHA = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    "request_",
    [
        WeightUpdate("r", "begin", 3, mode="drain", limit_s=60.0),
        WeightUpdate("r", "end", 3, timeout_s=7.0),
        WeightUpdate("r", "cancel", 3),
        WeightUpdate("r", "load", 3, "/weights", "abort"),
        WeightUpdate("r", "set", 3, trainer="t", take_over=True),
    ],
)
def test_a_step_is_passed_on_to_all_hosts_and_the_client_hears_when_the_last_has_answered(
    request_: WeightUpdate,
) -> None:
    service = Service()
    service.ask(request_)
    calls = service.calls()
    assert set(calls) == {"x", "y"}
    assert len({request_.request_id, *(call.request.request_id for call in calls.values())}) == 3
    assert {replace(call.request, request_id="r") for call in calls.values()} == {request_}
    service.answer(calls["x"])
    assert service.replies == []
    assert service.handler.weights.addresses() == {EngineAddress("ipc://y", "")}
    service.answer(calls["y"])
    assert service.reply() == (WeightsServed("r", {}) if request_.step == "load" else Done("r"))
    assert service.handler.weights.addresses() == set()
    assert service.handler.next_deadline() is None
    service.answer(calls["y"])
    assert service.replies == [], "an answer that comes twice changes nothing"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (WeightUpdate("r", "fetch", 3, "/weights"), "$.step"),
        (WeightUpdate("r", "load", 3), "$.path"),
        (WeightUpdate("r", "end", 3, "/weights"), "$.path"),
        (WeightUpdate("r", "load", 3, "/weights", backend_id="x"), "$.backend_id"),
        (WeightUpdate("r", "transfer", 3, call="init"), "$.call"),
        (WeightUpdate("r", "end", 3, call="init", receivers=(Receiver("x", 1),)), "$.call"),
    ],
)
def test_a_field_that_does_not_fit_the_step_is_refused(request_: WeightUpdate, field: str) -> None:
    service = Service()
    service.ask(request_)
    reply = service.reply()
    assert isinstance(reply, Refused)
    assert (reply.error.code, reply.error.fields["field"]) == ("malformed_message", field)
    assert service.handler.weights.take_calls() == []
    assert service.states() == {"x": ("ready", 0), "y": ("ready", 0)}


def test_a_load_begins_when_all_hosts_have_the_weights() -> None:
    service = Service()
    load = WeightUpdate("r", "load", 3, "/weights", "abort", timeout_s=20.0)
    service.ask(load)
    fetches = service.calls(fetches=True)
    wanted = replace(load, step="fetch", timeout_s=10.0)
    assert {replace(call.request, request_id="r") for call in fetches.values()} == {wanted}
    service.answer(fetches["x"])
    assert service.states() == {"x": ("ready", 0), "y": ("ready", 0)}, "they get jobs meanwhile"
    assert service.calls(fetches=True) == {}
    service.answer(fetches["y"])
    assert service.states() == {"x": ("updating", 0), "y": ("updating", 0)}
    calls = service.calls(fetches=True)
    assert {name: call.request.step for name, call in calls.items()} == {"x": "load", "y": "load"}
    assert service.handler.next_deadline() == 20.0
    for call in calls.values():
        service.answer(call)
    assert service.reply() == WeightsServed("r", {})
    assert service.states() == {"x": ("ready", 3), "y": ("ready", 3)}


def test_a_host_that_fetches_slowly_holds_the_others_up_for_half_of_the_time() -> None:
    service = Service()
    service.ask(WeightUpdate("r", "load", 3, "/weights", timeout_s=20.0))
    fetches = service.calls(fetches=True)
    service.answer(fetches["x"])
    service.tick(9.0)
    assert service.calls(fetches=True) == {}
    service.tick(10.0)
    calls = service.calls(fetches=True)
    assert calls.keys() == {"x"}
    service.answer(calls["x"])
    assert service.refusal() == ("request_timeout", "y")
    assert service.states() == {"x": ("ready", 3), "y": ("behind", 0)}
    caught_up = service.calls()
    assert {name: call.request.step for name, call in caught_up.items()} == {"y": "load"}
    service.answer(fetches["y"])
    service.answer(caught_up["y"])
    assert service.states() == {"x": ("ready", 3), "y": ("ready", 3)}


def test_hosts_that_cannot_fetch_the_weights_do_not_load_them() -> None:
    service = Service()
    service.ask(WeightUpdate("r", "load", 3, "/weights"))
    fetches = service.calls(fetches=True)
    service.answer(fetches["x"], InvalidWeights("torn"))
    service.answer(fetches["y"])
    calls = service.calls(fetches=True)
    assert calls.keys() == {"y"}
    service.answer(calls["y"])
    assert service.refusal() == ("invalid_weights", "x")
    assert service.states() == {"x": ("behind", 0), "y": ("ready", 3)}
    assert service.calls() == {}, "it is not asked again"
    service.ask(WeightUpdate("r2", "load", 4, "/weights-4"))
    for call in service.calls(fetches=True).values():
        service.answer(call, InvalidWeights("torn"))
    assert service.refusal()[0] == "invalid_weights"
    assert service.states() == {"x": ("behind", 0), "y": ("ready", 3)}, "nothing has begun"


def test_the_reply_to_a_load_has_what_it_cost_each_backend() -> None:
    service = Service()
    service.ask(WeightUpdate("r", "load", 3, "/weights"))
    for call in service.calls(fetches=True).values():
        service.answer(call, times=UpdateTimes(2.0, read_bytes=100))
    loads = service.calls()
    service.answer(loads["x"], times=UpdateTimes(0.5, 0.25, 0.125, 7))
    service.answer(loads["y"])
    assert service.reply() == WeightsServed(
        "r", {"x": UpdateTimes(2.5, 0.25, 0.125, 107), "y": UpdateTimes(2.0, read_bytes=100)}
    )


def test_hosts_get_the_digest_of_the_content_also_when_they_catch_up() -> None:
    service = Service("x")
    service.ask(WeightUpdate("r", "load", 3, "/weights", digest=SHA))
    (fetch,) = service.calls(fetches=True).values()
    assert (fetch.request.step, fetch.request.digest) == ("fetch", SHA)
    service.answer(fetch)
    (load,) = service.calls().values()
    assert (load.request.step, load.request.digest) == ("load", SHA)
    service.answer(load)
    assert service.reply() == WeightsServed("r", {})
    service.add("y")
    (late,) = service.calls().values()
    assert (late.request.path, late.request.digest) == ("/weights", SHA)
    service.answer(late)
    service.ask(WeightUpdate("again", "load", 3, "/by-hand"))
    assert [call.request.digest for call in service.calls(fetches=True).values()] == ["", ""]


@pytest.mark.parametrize("step", ["load", "begin", "end", "cancel", "set"])
def test_another_version_is_refused_while_one_is_fetched(step: UpdateStep) -> None:
    service = Service()
    service.ask(WeightUpdate("r", "load", 3, "/weights"))
    fetches = service.calls(fetches=True)
    service.ask(WeightUpdate("other", step, 4, "/weights-4" if step == "load" else "", limit_s=60.0))
    reply = service.reply()
    assert isinstance(reply, Refused)
    assert (reply.request_id, reply.error.code) == ("other", "update_in_progress")
    assert reply.error.fields["weight_version"] == 3
    for call in fetches.values():
        service.answer(call)
    assert {call.request.weight_version for call in service.calls().values()} == {3}


def test_backends_that_leave_while_they_fetch() -> None:
    service = Service("x")
    service.ask(WeightUpdate("r", "load", 3, "/weights"))
    (fetch,) = service.calls(fetches=True).values()
    service.ask(RemoveBackend("remove", "x"))
    service.replies.clear()
    service.answer(fetch)
    reply = service.reply()
    assert isinstance(reply, Refused)
    assert reply.error.code == "no_backend"
    service.add("z")
    assert service.states() == {"z": ("ready", 0)}


def test_a_begin_that_one_host_does_not_answer_is_taken_back_on_all() -> None:
    service = Service()
    service.ask(WeightUpdate("r", "begin", 1, limit_s=60.0, timeout_s=2.0))
    service.answer(service.calls()["x"])
    assert service.states() == {"x": ("updating", 0), "y": ("updating", 0)}
    assert service.handler.next_deadline() == 2.0
    service.tick(2.0)
    taken_back = service.calls()
    assert {call.request.step for call in taken_back.values()} == {"cancel"}
    assert service.replies == []
    service.answer(taken_back["x"])
    assert service.handler.next_deadline() == 2.0 + TAKE_BACK_S
    service.tick(2.0 + TAKE_BACK_S)
    assert service.refusal() == ("request_timeout", "y")
    assert service.states() == {"x": ("ready", 0), "y": ("ready", 0)}
    service.answer(taken_back["y"])
    assert service.replies == []


def test_of_a_load_that_fails_on_one_host_the_others_serve_the_new_weights() -> None:
    service = Service()
    service.ask(WeightUpdate("r", "load", 1, "/weights"))
    calls = service.calls()
    service.answer(calls["x"], InvalidWeights("another shape", path="/weights"))
    service.answer(calls["y"])
    assert service.refusal() == ("invalid_weights", "x")
    assert service.states() == {"x": ("behind", 0), "y": ("ready", 1)}
    service.ask(WeightUpdate("r2", "load", 2, "/weights"))
    for call in service.calls().values():
        service.answer(call, InvalidWeights("another shape", path="/weights"))
    assert service.refusal() == ("invalid_weights", "x")
    assert service.states() == {"x": ("behind", 0), "y": ("ready", 1)}, "none has them: all go on as they were"


def test_hosts_that_had_begun_nothing_are_no_failure_of_an_end_that_others_did() -> None:
    service = Service()
    not_begun = UpdateNotBegun("no update was begun here", weight_version=1)
    service.ask(WeightUpdate("r", "end", 1))
    calls = service.calls()
    service.answer(calls["x"], not_begun)
    service.answer(calls["y"], InvalidWeights("it broke"))
    assert service.refusal() == ("invalid_weights", "y"), "that says more"
    service.ask(WeightUpdate("r2", "end", 1))
    calls = service.calls()
    service.answer(calls["x"], UpdateNotBegun("no update was begun here"))
    service.answer(calls["y"])
    assert service.reply() == Done("r2")
    assert service.states() == {"x": ("behind", 0), "y": ("ready", 1)}


def test_a_request_that_is_sent_again_joins_the_one_under_way_and_hears_its_end() -> None:
    service = Service("x")
    load = WeightUpdate("r", "load", 1, "/weights")
    service.ask(load, b"lost")
    (call,) = service.calls().values()
    service.ask(load)
    assert service.calls() == {}
    service.answer(call)
    assert service.reply() == WeightsServed("r", {})
    service.ask(load)
    assert service.calls() == {}, "a load that has ended is not run again"
    assert service.reply() == WeightsServed("r", {})
    for number in range(REQUESTS_LIMIT):
        service.ask(WeightUpdate(f"end-{number}", "end", 1))
        service.answer(*service.calls().values())
    service.replies.clear()
    service.ask(load)
    assert set(service.calls()) == {"x"}


def test_of_two_trainers_at_once_the_second_is_refused_and_changes_nothing() -> None:
    service = Service()
    service.ask(WeightUpdate("r", "begin", 1, limit_s=60.0), b"first")
    calls = service.calls()
    for other in (
        WeightUpdate("o1", "begin", 2, limit_s=60.0),
        WeightUpdate("o2", "load", 2, "/weights"),
        WeightUpdate("o3", "set", 2),
    ):
        service.ask(other)
        reply = service.reply()
        assert isinstance(reply, Refused)
        assert (reply.error.code, reply.error.fields) == ("update_in_progress", {"weight_version": 1})
        assert service.calls() == {}
    for call in calls.values():
        service.answer(call)
    assert service.replies == [(b"first", Done("r"))]


def test_a_host_that_was_restarted_under_another_key_is_asked_there() -> None:
    service = Service()
    service.ask(WeightUpdate("r", "begin", 1, limit_s=60.0))
    calls = service.calls()
    service.answer(calls["y"])
    service.add("x", "k" * 40)
    moved = service.calls()["x"]
    assert moved == EngineCall(EngineAddress("ipc://x", "k" * 40), calls["x"].request)
    assert service.handler.weights.addresses() == {moved.address}
    service.add("x", "k" * 40)
    assert service.calls() == {}
    service.answer(moved)
    assert service.reply() == Done("r")


@pytest.mark.parametrize(
    "request_",
    [
        WeightUpdate("r", "load", 3, "/weights", "abort"),
        WeightUpdate("r", "begin", 3, limit_s=60.0),
        WeightUpdate("r", "set", 3),
    ],
    ids=["load", "begin", "set"],
)
def test_what_a_host_did_in_an_earlier_life_its_next_one_is_asked_for_again(request_: Any) -> None:
    """It was taken to have the weights that the life before had loaded, and gave tokens of its first ones."""
    service = Service()
    service.ask(request_)
    calls = service.calls()
    service.answer(calls["x"])
    service.add("x")
    again = service.calls()["x"]
    assert (again.address, type(again.request)) == (calls["x"].address, type(calls["x"].request))
    service.answer(calls["y"])
    assert service.replies == []
    assert service.states()["x"][0] != "ready" or request_.step == "set"
    service.answer(again)
    assert service.reply() == (WeightsServed("r", {}) if request_.step == "load" else Done("r"))


def test_a_connection_that_was_lost_has_its_calls_sent_again_and_one_that_is_refused_ends_them() -> None:
    service = Service()
    service.ask(WeightUpdate("r", "cancel", 1))
    calls = service.calls()
    service.handler.weights.reconnected(calls["x"].address)
    assert service.calls() == {"x": calls["x"]}
    service.tell(service.handler.engine_unreachable(calls["x"].address, NotAllowed("no such key", key="k"), 0.0))
    service.answer(calls["y"])
    assert service.refusal() == ("not_allowed", "x")


def test_without_backends_nothing_is_begun() -> None:
    service = Service("")
    for request in (
        WeightUpdate("r", "begin", 1, limit_s=60.0),
        WeightUpdate("r", "end", 1),
        WeightUpdate("r", "cancel", 1),
        WeightUpdate("r", "load", 1, "/weights"),
        WeightUpdate("r", "set", 1),
    ):
        service.ask(request)
        assert service.reply().error.code == "no_backend"
    service.add("x")
    assert service.states() == {"x": ("ready", 0)}


def test_requests_under_way_have_a_limit() -> None:
    service = Service("x")
    for number in range(REQUESTS_LIMIT):
        service.ask(WeightUpdate(f"r-{number}", "cancel", 1))
    assert service.replies == []
    service.ask(WeightUpdate("more", "cancel", 1))
    assert service.reply().error.code == "busy"


def test_an_error_of_a_host_with_as_many_fields_as_are_allowed_reaches_the_client() -> None:
    service = Service("x")
    service.ask(WeightUpdate("r", "end", 1))
    (call,) = service.calls().values()
    service.answer(call, InvalidWeights("w" * 10_000, **{f"field_{number}": number for number in range(FIELDS_LIMIT)}))
    reply = service.reply()
    assert codec.decode(codec.encode(reply), AnyBackendReply) == reply
    assert reply.error.fields["backend"] == "x"


def loaded(service: Service, version: int = 3, **errors: ProrlError) -> None:
    service.ask(WeightUpdate("r", "load", version, f"/weights-{version}"))
    for name, call in service.calls().items():
        service.answer(call, errors.get(name))
    service.replies.clear()


def test_a_backend_that_comes_with_older_weights_loads_what_the_others_have() -> None:
    service = Service()
    loaded(service)
    assert service.calls() == {}
    service.add("x")
    service.add("z")
    assert service.states() == {"x": ("behind", 0), "y": ("ready", 3), "z": ("behind", 0)}
    calls = service.calls()
    assert {name: (call.request.path, call.request.weight_version) for name, call in calls.items()} == {
        "x": ("/weights-3", 3),
        "z": ("/weights-3", 3),
    }
    service.add("x")
    assert service.calls() == {}, "it is asked already"
    service.answer(calls["x"])
    service.answer(calls["z"], InvalidWeights("there is no such folder here"))
    assert service.states() == {"x": ("ready", 3), "y": ("ready", 3), "z": ("behind", 0)}
    assert service.replies == []
    assert service.handler.next_deadline() is None


def test_a_backend_that_dies_in_an_update_and_comes_again_loads_it_then() -> None:
    service = Service()
    service.ask(WeightUpdate("r", "load", 3, "/weights-3"))
    calls = service.calls()
    service.answer(calls["x"], ProrlError("it is gone"))
    service.add("x")
    assert service.calls() == {}, "it is asked when the update is over"
    service.answer(calls["y"])
    (again,) = service.calls().items()
    assert again[0] == "x"
    assert again[1].request.path == "/weights-3"
    service.answer(again[1])
    assert service.states() == {"x": ("ready", 3), "y": ("ready", 3)}


@pytest.mark.parametrize(
    "request_", [WeightUpdate("r", "load", 3, "/weights-3"), WeightUpdate("r", "end", 3), WeightUpdate("r", "set", 3)]
)
def test_a_backend_that_leaves_the_list_is_waited_for_no_longer(request_: WeightUpdate) -> None:
    service = Service()
    if request_.step == "end":
        service.ask(WeightUpdate("b", "begin", 3, limit_s=60.0))
        for call in service.calls().values():
            service.answer(call)
        service.replies.clear()
    service.ask(request_)
    calls = service.calls()
    service.answer(calls["x"])
    service.ask(RemoveBackend("gone", "y"), b"operator")
    service.replies.clear()
    service.tick(1.0)
    assert service.reply() == (WeightsServed("r", {}) if request_.path else Done("r"))
    assert service.states() == {"x": ("ready", 3)}
    assert service.handler.weights.addresses() == set()
    service.answer(calls["y"], ProrlError("it is too late"))
    assert service.replies == []
    service.add("y")
    assert service.states()["y"] == ("behind", 0)
    assert set(service.calls()) == ({"y"} if request_.path else set())


@pytest.mark.parametrize("step", ["begin", "load"])
def test_an_update_ends_without_new_weights_if_a_begin_or_all_backends_are_lost(step: Any) -> None:
    service = Service("xy" if step == "begin" else "y")
    service.ask(WeightUpdate("r", step, 3, "/weights-3" if step == "load" else "", limit_s=60.0))
    calls = service.calls()
    if step == "begin":
        service.answer(calls["x"])
    service.ask(RemoveBackend("gone", "y"), b"operator")
    service.replies.clear()
    service.tick(1.0)
    for call in service.calls().values():
        assert call.request.step == "cancel"
        service.answer(call)
    assert service.refusal() == ("no_backend", "y")
    assert service.handler.next_deadline() is None
    service.add("y")
    assert set(service.states().values()) == {("ready", 0)}


@pytest.mark.parametrize("other", [WeightUpdate("b", "begin", 4, limit_s=60.0), WeightUpdate("s", "set", 2)])
def test_nobody_loads_from_a_path_while_or_after_weights_come_by_other_means(other: Any) -> None:
    service = Service()
    loaded(service)
    service.ask(other)
    for call in service.calls().values():
        service.answer(call)
    service.add("z")
    assert service.calls() == {}


def test_where_weights_are_is_known_to_the_brokers_next_life() -> None:
    service = Service()
    loaded(service)
    records, weights = service.handler.take_changes(), service.handler.take_weights()
    assert weights is not None
    assert [one.path for one in weights] == ["/weights-3"]
    later = Service("")
    later.handler.restore([one for one in records.values() if one is not None], 0.0, weights=weights)
    later.add("x")
    assert {name: call.request.path for name, call in later.calls().items()} == {"x": "/weights-3"}


def begun(names: str = "xyz") -> Service:
    """Return a service with an update to version 3."""
    service = Service(names)
    service.ask(WeightUpdate("b", "begin", 3))
    for call in service.calls().values():
        service.answer(call)
    assert service.reply() == Done("b")
    return service


def test_a_call_of_a_transfer_goes_to_its_group_with_each_ones_rank() -> None:
    service = begun()
    group = Receiver("x", 1), Receiver("z", 3)
    service.ask(WeightUpdate("r", "transfer", 3, call="init", info='{"rank_offset":1}', receivers=group))
    calls = service.calls()
    assert {name: call.request.receivers for name, call in calls.items()} == {"x": group[:1], "z": group[1:]}
    assert {(call.request.call, call.request.info) for call in calls.values()} == {("init", '{"rank_offset":1}')}
    service.answer(calls["x"])
    assert service.replies == []
    service.answer(calls["z"])
    assert service.reply() == Done("r")


def test_a_transfer_ends_for_all_as_soon_as_one_host_has_failed() -> None:
    service = begun()
    group = tuple(Receiver(name, rank) for rank, name in enumerate("xyz", 1))
    service.ask(WeightUpdate("r", "transfer", 3, call="update", receivers=group))
    calls = service.calls()
    service.answer(calls["y"], EngineFailed("the peer has left"))
    assert service.refusal() == ("engine_failed", "y")
    service.answer(calls["x"])
    assert service.replies == [], "its client has the reply"
    assert service.handler.next_deadline() is None
    service.ask(RemoveBackend("gone", "z"))
    service.replies.clear()
    service.ask(WeightUpdate("again", "transfer", 3, call="init", receivers=group))
    assert service.refusal() == ("no_backend", "z")
    service.ask(WeightUpdate("again", "transfer", 3, call="init", receivers=group[:2]))
    calls = service.calls()
    assert set(calls) == {"x", "y"}
    service.ask(RemoveBackend("gone", "y"))
    service.replies.clear()
    service.tick(1.0)
    assert service.refusal() == ("no_backend", "y")


def test_a_transfer_is_inside_of_an_update() -> None:
    service = Service("x")
    service.ask(WeightUpdate("r", "transfer", 3, call="init", receivers=(Receiver("x", 1),)))
    assert service.reply().error.code == UpdateNotBegun.code
    assert service.calls() == {}
