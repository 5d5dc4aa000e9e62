"""Calls about adapters that no client asked for, and what engine hosts may announce."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from prorl_zmq.errors import EngineFailed, MalformedMessage
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.backends import AddBackend, Assign, BackendAlive, RemoveBackend
from prorl_zmq.wire.messages.base import Done
from prorl_zmq.wire.messages.engines import EngineReady, WeightsServed, WeightUpdate

from .test_adapters import LEASE_S, Host, Service, digest_of

if TYPE_CHECKING:
    from prorl_zmq.brokers.backends.weight_calls import EngineCall


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


def begun_update(*hosts: Host) -> Service:
    """Return a service whose hosts have announced version 2 of an adapter, and have not answered yet."""
    service = Service(*hosts)
    service.publish("a", 1)
    load = WeightUpdate("load", "load", 2, "/adapters/a/2", timeout_s=20.0, model="a")
    service.handler.handle([b"load", b""], load, service.now)
    return service


def answer(service: Service, *names: str) -> None:
    """Have hosts do what they are asked, announce what they have, and answer."""
    calls = {call.address.endpoint.removeprefix("ipc://"): call for call in service.handler.weights.take_calls()}
    for name, call in calls.items():
        if name not in names:
            service.handler.weights.reconnected(call.address)  # asked again later
    for name in names:
        host, request = service.hosts[name], calls[name].request
        error = host.does(request)
        service._announce(host)
        service._note(
            service.handler.engine_answered(
                request.request_id, error, service.now, EngineReady("ready", 0, digest=host.read)
            )
        )


def models_of(service: Service, name: str) -> tuple[str, ...]:
    return service.handler.heap.member(name).models


def removal_of(service: Service, name: str) -> EngineCall:
    """Return the one call to a host that is to be sent now."""
    calls = service.handler.weights.take_calls()
    (removal,) = [call for call in calls if call.address.endpoint == f"ipc://{name}"]
    assert removal.request.step == "remove"
    return removal


def with_stale_host() -> tuple[Service, Host, EngineCall]:
    """Return a service whose hosts have loaded a new version, the one with other files, and the call to unload them."""
    x, y, stale = Host("x"), Host("y"), Host("stale")
    service = begun_update(x, y, stale)
    stale.cached = digest_of("/adapters/a/1")
    answer(service, "x", "y", "stale")
    removal = removal_of(service, "stale")
    return service, stale, removal


def test_a_new_version_gets_jobs_once_most_hosts_have_read_the_same_files() -> None:
    service = begun_update(Host("x"), Host("y"), Host("z"))
    answer(service, "x")
    assert service.hosts["x"].adapters["a"][-1] == 2
    assert [models_of(service, name) for name in ("x", "y")] == [("policy",), ("policy", "a")], "y has version 1"
    answer(service, "y")
    assert [models_of(service, name) for name in ("x", "y")] == [("policy", "a")] * 2
    assert "load" not in service.replies, "z has not answered"


def test_the_first_answer_may_be_of_the_wrong_files() -> None:
    x, y, stale = Host("x"), Host("y"), Host("stale")
    service = begun_update(x, y, stale)
    stale.cached = digest_of("/adapters/a/1")
    answer(service, "stale")
    assert stale.adapters["a"][-1] == 2
    assert models_of(service, "stale") == ("policy",)
    answer(service, "x", "y")
    assert [models_of(service, name) for name in service.hosts] == [("policy", "a"), ("policy", "a"), ("policy",)]


def test_a_host_with_other_files_gets_no_jobs_until_it_has_unloaded_them() -> None:
    service, stale, removal = with_stale_host()
    service._announce(stale)
    assert models_of(service, "stale") == ("policy",)
    heap = service.handler.heap
    for number in range(4):
        request = Assign(f"r{number}", owner="run-1", job_id=f"job-{number}", attempt=1, wait_s=5.0, model="a")
        backend = heap.assign(request if number % 2 else replace(request, pinned=2))
        assert backend is not None
        assert backend.backend_id in ("x", "y"), "stale is the least loaded backend that has announced version 2"
    service._note(service.handler.engine_answered(removal.request.request_id, EngineFailed("busy"), service.now))
    service.handler.tick(service.now)
    again = removal_of(service, "stale")
    assert 2 not in again.request.keep, "it is asked until it has done it"
    stale.does(again.request)
    service._note(service.handler.engine_answered(again.request.request_id, None, service.now))
    assert 2 not in heap.member("stale").backend.adapters.get("a", ()), "before its next heartbeat"
    service.pass_time(2)
    assert stale.adapters == {"a": (2,)}
    assert models_of(service, "stale") == ("policy", "a")


def test_an_update_fails_if_no_majority_of_hosts_read_the_same_files() -> None:
    x, y = Host("x"), Host("y")
    service = begun_update(x, y)
    y.cached = digest_of("/adapters/a/1")
    answer(service, "x", "y")
    service.settle()
    assert service.replies.pop("load").error.code == "engine_failed", "nothing says which host is right"
    assert service.models() == ("a", "policy")
    service.pass_time(2)
    assert (x.adapters, y.adapters) == ({"a": (1,)}, {"a": (1,)})
    assert service.publish("a", 2) == WeightsServed(f"load-a-2--{service.now}", {})
    assert (x.adapters["a"][-1], y.adapters["a"][-1]) == (2, 2)


def test_a_host_with_other_files_gets_no_jobs_when_it_registers_again() -> None:
    service, stale, removal = with_stale_host()
    service.handler.handle([b"add", b""], AddBackend("add", stale.backend, heartbeats=True), service.now)
    assert models_of(service, "stale") == ("policy",)
    stale.backend = replace(stale.backend, adapters={})
    service.handler.weights.reconnected(removal.address)
    service.register(stale)
    service.pass_time(2)
    assert (stale.adapters, models_of(service, "stale")) == ({"a": (2,)}, ("policy", "a"))


def removed_while_silent() -> tuple[Service, Host]:
    """Return a service whose model `a` was removed while a host with it was silent, and that host."""
    x, y = Host("x"), Host("y")
    service = Service(x, y)
    service.publish("a", 1)
    del service.hosts["y"]
    service.pass_time(LEASE_S + 1)
    assert service.ask(WeightUpdate("remove", "remove", 0, model="a")) == Done("remove")
    refused = service.publish("a", 1)
    assert refused.error.fields == {"backend": "y"}
    assert "remove it (`prorl backends remove y`), or publish another version" in refused.error.message
    return service, y


def test_a_removed_version_is_free_once_its_backend_comes_back_without_it() -> None:
    service, y = removed_while_silent()
    y.backend = replace(y.backend, adapters={})
    service.register(y)
    assert service.publish("a", 1) == WeightsServed(f"load-a-1--{service.now}", {})


def test_a_removed_version_is_free_once_its_backend_is_removed() -> None:
    service, _ = removed_while_silent()
    assert service.ask(RemoveBackend("remove-y", "y")) == Done("remove-y")
    assert service.publish("a", 1) == WeightsServed(f"load-a-1--{service.now}", {})


def test_a_restarted_broker_knows_which_silent_backend_has_a_removed_version() -> None:
    service, y = removed_while_silent()
    records, weights = service.handler.take_changes(), service.handler.take_weights()
    again = Service()
    again.hosts = service.hosts
    again.handler.restore([one for one in records.values() if one], again.now, weights=weights or ())
    assert again.publish("a", 1).error.fields == {"backend": "y"}
    assert again.publish("a", 2) == WeightsServed(f"load-a-2--{again.now}", {})
    assert again.publish("a", 1).error.fields == {"backend": "y"}, "it may return with it"
    again.register(y)
    assert y.adapters["a"][-1] == 2


def test_an_announced_adapter_has_a_version() -> None:
    alive = BackendAlive("alive", "x", 0, adapters={"a": ()})
    with pytest.raises(MalformedMessage, match="length >= 1"):
        codec.decode(codec.encode(alive), BackendAlive)
