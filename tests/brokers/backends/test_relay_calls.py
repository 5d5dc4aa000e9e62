"""Requests about weights with a relay: whom each host is told to ask, also late and after the broker's restart."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from prorl_zmq.brokers.backends.request_handler import BackendRequestHandler
from prorl_zmq.errors import MalformedMessage
from prorl_zmq.wire.messages.backends import AddBackend, Backend, BackendAlive, BackendList, ListBackends
from prorl_zmq.wire.messages.engines import EngineReady, WeightUpdate
from prorl_zmq.wire.messages.relay import CopyState, WeightRelay, WeightSource

ROOT = WeightSource("trainer", "ipc:///root")
UPDATE = WeightUpdate("r", "load", 5, "/w", digest="a" * 64, relay=WeightRelay("b" * 64, (ROOT,)))


def state(name: str) -> CopyState:
    return CopyState(name, "/copy", WeightSource(name, f"ipc:///{name}"), 4)


def add(handler: BackendRequestHandler, name: str) -> None:
    backend = Backend(backend_id=name, endpoint=f"ipc://{name}")
    handler.handle([b"host", b""], AddBackend("add", backend, heartbeats=True, copy=state(name)), 0.0)


def asked(handler: BackendRequestHandler, *steps: str) -> dict[str, list[str]]:
    """Answer the calls of these steps; return whom each host was told to ask."""
    found = {}
    for step in steps:
        for call in handler.weights.take_calls():
            assert call.request.step == step
            assert call.request.relay is not None
            assert call.request.relay.index == "b" * 64
            found[call.address.endpoint.removeprefix("ipc://")] = [one.name for one in call.request.relay.sources]
            handler.engine_answered(call.request.request_id, None, 0.0, EngineReady(call.request.request_id, 5))
    return found


def test_hosts_are_told_whom_to_ask() -> None:
    handler = BackendRequestHandler(lease_s=1e9)
    for name in "abcd":
        add(handler, name)
    handler.handle([b"client", b""], UPDATE, 0.0)
    tree = {"a": ["trainer"], "b": ["trainer"], "c": ["a", "trainer"], "d": ["a", "trainer"]}
    assert asked(handler, "fetch", "load") == tree
    for name in "abcd":
        held = replace(state(name), version=5, weights="a" * 64)
        handler.handle([b"host", b""], BackendAlive("alive", name, 5, copy=held), 0.0)
    add(handler, "late")
    assert asked(handler, "load") == {"late": ["a", "b", "c", "d", "trainer"]}
    ((_, listed),) = handler.handle([b"look", b""], ListBackends("list"), 0.0)
    assert isinstance(listed, BackendList)
    assert [one.copy.version for one in listed.backends if one.copy is not None] == [5, 5, 5, 5, 4]


def test_the_relay_is_known_to_the_brokers_next_life() -> None:
    handler = BackendRequestHandler(lease_s=1e9)
    add(handler, "a")
    handler.handle([b"client", b""], UPDATE, 0.0)
    asked(handler, "fetch", "load")
    (record,) = handler.take_weights() or ()
    assert record.relay == UPDATE.relay
    later = BackendRequestHandler(lease_s=1e9)
    later.restore([one for one in handler.take_changes().values() if one is not None], 0.0, weights=[record])
    add(later, "late")
    assert asked(later, "load") == {"late": ["trainer"]}
    add(handler, "other")
    handler.handle([b"client", b""], replace(UPDATE, request_id="s", weight_version=6, relay=None), 0.0)
    assert all(call.request.relay is None for call in handler.weights.take_calls() if call.request.weight_version == 6)


@pytest.mark.parametrize(
    "request_",
    [replace(UPDATE, digest=""), WeightUpdate("r", "begin", 5, digest="a" * 64, relay=UPDATE.relay)],
)
def test_a_relay_that_does_not_fit_is_refused(request_: WeightUpdate) -> None:
    handler = BackendRequestHandler(lease_s=1e9)
    add(handler, "a")
    with pytest.raises(MalformedMessage, match="relay"):
        handler.weights.handle([b"client", b""], request_, 0.0)
