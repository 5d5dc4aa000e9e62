"""Calls about adapters that no client asked for, and what engine hosts may announce."""

from __future__ import annotations

import pytest

from prorl_zmq.errors import MalformedMessage
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.backends import BackendAlive
from prorl_zmq.wire.messages.engines import WeightUpdate

from .test_adapters import Host, Service


def test_an_unanswered_removal_is_not_sent_again_once_a_newer_version_is_loaded() -> None:
    x = Host("x")
    service = Service(x)
    service.publish("a", 7)
    service.handler.heap.set_adapters("x", {"a": (6, 7)})
    service.handler.tick(service.now)
    (lost,) = service.handler.weights.take_calls()
    assert (lost.request.step, lost.request.keep) == ("remove", (7,))
    load = WeightUpdate("load", "load", 8, "/a/8", model="a")
    service.handler.handle([b"load", b""], load, service.now)
    assert [call.request.step for call in service.handler.weights.take_calls()] == ["load"]
    service.handler.weights.reconnected(lost.address)
    assert [call.request.step for call in service.handler.weights.take_calls()] == ["load"]


def test_an_announced_adapter_has_a_version() -> None:
    alive = BackendAlive("alive", "x", 0, adapters={"a": ()})
    with pytest.raises(MalformedMessage, match="length >= 1"):
        codec.decode(codec.encode(alive), BackendAlive)
