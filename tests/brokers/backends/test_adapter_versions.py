"""Versions of adapters: which stay loaded for pinned jobs, which are the same files, and when a removed one is free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from prorl_zmq.brokers.backends.request_handler import BackendRequestHandler
from prorl_zmq.errors import EngineFailed, InvalidWeights, from_info
from prorl_zmq.stages.held_assignments import HeldAssignments
from prorl_zmq.wire.messages.backends import (
    Assign,
    Assigned,
    GenerationFailed,
    ListBackends,
    ListModels,
)
from prorl_zmq.wire.messages.base import Done, Refused
from prorl_zmq.wire.messages.engines import WeightsServed, WeightUpdate

from .test_adapters import DISK, LEASE_S, Host, Service, digest_of

if TYPE_CHECKING:
    import pytest


def test_unpinned_jobs_go_by_the_newest_version_and_the_old_one_is_unloaded() -> None:
    x = Host("x")
    service = Service(x)
    service.publish("a", 1)
    assert service.assign("job").pinned is None
    service.publish("a", 2)
    assert x.adapters == {"a": (2,)}
    assert service.given("job") == "x"


def test_a_version_stays_loaded_until_no_job_is_pinned_to_it() -> None:
    x, y = Host("x"), Host("y")
    service = Service(x, y)
    service.publish("a", 1)
    first = service.assign("job", pin=True)
    assert first.pinned == 1
    service.publish("a", 2)
    service.publish("a", 3)
    assert x.adapters == y.adapters == {"a": (1, 3)}
    assert service.assign("later", pin=True).pinned == 3
    other = "y" if first.backend.backend_id == "x" else "x"
    moved = service.assign("job", pin=True, pinned=1, leaving=first.backend.backend_id)
    assert (moved.pinned, moved.backend.backend_id) == (1, other)
    assert service.assign("job", pin=True, attempt=2).pinned == 3, "a new attempt begins with the newest"
    service.pass_time(1)
    assert x.adapters == y.adapters == {"a": (3,)}


def test_a_pinned_job_waits_for_a_backend_with_its_version_and_holds_up_no_other() -> None:
    x = Host("x")
    service = Service(x)
    service.publish("a", 1)
    service.assign("job", pin=True)
    service.publish("a", 2)
    before = x.backend
    x.backend = replace(before, adapters={"a": (2,)}, life="2")
    service.register(x)
    assert service.assign("job", pin=True, pinned=1, leaving="x") is None
    assert service.given("other") == "x"
    service.pass_time(2)
    x.backend = before
    service.register(x)
    (reply,) = [one for name, one in service.replies.items() if name.startswith("job-")]
    assert reply.pinned == 1
    service.release("job")
    service.pass_time(1)
    assert x.adapters == {"a": (2,)}


def test_jobs_that_wait_for_different_versions_do_not_hold_each_other_up(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Host("x")
    service = Service(x)
    for version in (1, 2):
        service.publish("a", version)
    x.failure = EngineFailed("not now")
    x.backend = replace(x.backend, adapters={}, life="2")
    service.register(x)
    waiting = {"first": {}, **{f"old-{number}": {"pinned": 1} for number in range(5)}}
    for job_id, wants in waiting.items():
        assert service.assign(job_id, wait_s=60.0, **wants) is None
    tries: list[str] = []
    assign = service.handler.heap.assign

    def counted(request: Assign, *, anyhow: bool = False) -> Any:
        tries.append(request.job_id)
        return assign(request, anyhow=anyhow)

    monkeypatch.setattr(service.handler.heap, "assign", counted)
    service.ask(ListModels("models"))
    assert tries == ["first", "old-0"], "if the first of its kind gets none, no other does"
    assert service.handler.waiting_by_model() == {"a": 6}
    x.backend = replace(x.backend, adapters={"a": (1,)})
    service.pass_time(1)
    assert {name.partition("-a-")[0] for name in service.replies if "-a-" in name} == {*waiting} - {"first"}
    assert service.handler.waiting_by_model() == {"a": 1}
    x.failure = None
    x.backend = replace(x.backend, adapters={"a": (1, 2)})
    service.pass_time(1)
    assert service.handler.waiting == 0


def test_a_pinned_version_stays_loaded_while_its_jobs_backend_is_lost() -> None:
    x, y = Host("x"), Host("y")
    service, held = Service(x, y), HeldAssignments("run-1")
    service.publish("a", 7)
    lost = service.given("job", pin=True)
    held.wait("job/a", 1)
    held.assigned("job/a", 1, lost, 7)
    service.publish("a", 8)
    away = service.hosts.pop(lost)
    for _ in range(int(LEASE_S) + 1):
        service.ask(held.report(full=True))
        service.pass_time(1)
    assert service.models() == ("a", "policy")
    assert len(service.ask(ListBackends("list")).backends) == 1
    service.register(away)
    service.pass_time(1)
    assert x.adapters == y.adapters == {"a": (7, 8)}
    moved = service.assign("job", pin=True, pinned=7, leaving=lost)
    assert moved.pinned == 7
    held.release("job/a", 1)
    service.ask(held.report(full=True))
    service.release("job")
    service.pass_time(1)
    assert x.adapters == y.adapters == {"a": (8,)}


def test_a_pinned_job_gets_its_backend_back_from_probation() -> None:
    service = Service(Host("x"))
    service.publish("a", 7)
    service.given("first", pin=True), service.given("second", pin=True)
    service.publish("a", 8)
    service.ask(GenerationFailed("failed", "first", "x", "the server was restarted"))
    assert service.assign("first", pin=True, pinned=7, leaving="x") is None
    assert service.assign("second", pin=True, pinned=7, leaving="x") is None
    service.pass_time(2)
    (trial,) = [one for one in service.replies.values() if isinstance(one, Assigned)]
    assert (trial.backend.backend_id, trial.pinned) == ("x", 7)
    service.pass_time(4)
    replies = [one for one in service.replies.values() if isinstance(one, Assigned | Refused)]
    assert [getattr(one, "pinned", one) for one in replies] == [7, 7]


def test_a_pinned_attempt_whose_version_is_gone_may_be_tried_again() -> None:
    x = Host("x")
    service = Service(x)
    service.publish("a", 1)
    service.given("job", pin=True)
    service.publish("a", 2)
    x.backend = replace(x.backend, adapters={"a": (2,)}, life="2")
    service.register(x)
    assert service.assign("job", pin=True, pinned=1, leaving="x", wait_s=2.0) is None
    service.pass_time(3)
    (refused,) = [one for one in service.replies.values() if isinstance(one, Refused)]
    assert refused.error.code == "no_backend"
    assert refused.error.fields["version_gone"] is True
    assert "none has version 1 of the adapter" in refused.error.message


def test_a_restarted_broker_keeps_adapters_and_learns_pins_before_it_unloads_a_version() -> None:
    x = Host("x")
    service = Service(x)
    service.publish("a", 1)
    pinned = service.assign("job", pin=True)
    service.publish("a", 2)
    records, weights = service.handler.take_changes(), service.handler.take_weights()
    assert weights is not None
    again = Service()
    again.hosts = service.hosts
    again.handler.restore([one for one in records.values() if one], again.now, weights=weights)
    assert again.models() == ("a", "policy")
    again.publish("a", 3)
    assert x.adapters == {"a": (1, 2, 3)}, "it may be that jobs are pinned to them"
    held = HeldAssignments("run-1")
    held.wait("job/a", 1)
    held.assigned("job/a", 1, "x", pinned.pinned)
    again.ask(held.report(full=True))
    for _ in range(int(2 * LEASE_S)):
        again.ask(held.report(full=True))
        again.pass_time(1)
    assert x.adapters == {"a": (1, 3)}
    held.release("job/a", 1)
    again.ask(held.report(full=True))
    again.pass_time(1)
    assert x.adapters == {"a": (3,)}
    assert x.asked[-1] == ("remove", "a", 0)


def test_a_removed_model_is_unloaded_also_by_a_host_that_was_away() -> None:
    x, y = Host("x"), Host("y")
    service = Service(x, y)
    service.publish("a", 1, trainer="t")
    away = y.backend
    del service.hosts["y"]
    service.pass_time(LEASE_S + 1)
    service.given("job")
    refused = service.ask(WeightUpdate("remove", "remove", 0, model="a", trainer="t"))
    assert (refused.error.code, refused.error.fields) == ("model_in_use", {"model": "a", "jobs": 1})
    service.release("job")
    held = service.ask(WeightUpdate("remove", "remove", 0, model="a", trainer="u"))
    assert held.error.code == "weights_held"
    assert service.ask(WeightUpdate("remove-2", "remove", 0, model="a", trainer="t")) == Done("remove-2")
    assert x.adapters == {}
    assert service.models() == ("policy",)
    assert service.handler.take_weights() == ()
    y.backend = away
    service.register(y)
    assert y.adapters == {}, "it does not serve what is removed"
    assert service.publish("a", 1, trainer="u") == WeightsServed(f"load-a-1-u-{service.now}", {})


def test_a_version_of_a_removed_model_is_free_once_no_host_may_have_it() -> None:
    x, y = Host("x"), Host("y")
    service = Service(x, y)
    service.publish("a", 1)
    away = y.backend
    del service.hosts["y"]
    service.pass_time(LEASE_S + 1)
    assert service.ask(WeightUpdate("remove", "remove", 0, model="a")) == Done("remove")
    for _ in range(2):
        refused = service.publish("a", 1)
        assert (refused.error.code, refused.error.fields) == ("engine_failed", {"backend": "y"})
        assert service.publish("a", 2) == WeightsServed(f"load-a-2--{service.now}", {})
        service.pass_time(1)
    y.backend = away
    service.register(y)
    service.pass_time(1)
    assert (x.adapters, y.adapters) == ({"a": (2,)}, {"a": (2,)})
    assert service.publish("a", 1) == WeightsServed(f"load-a-1--{service.now}", {})
    x.failure = EngineFailed("hangs")
    assert service.ask(WeightUpdate("remove-2", "remove", 0, model="a")).error.fields == {"backend": "x"}
    service.pass_time(1)
    assert service.publish("a", 1).error.fields == {"backend": "x"}
    x.failure = None
    service.pass_time(2)
    assert service.publish("a", 1) == WeightsServed(f"load-a-1--{service.now}", {})


def test_a_late_backend_loads_no_other_files_as_a_published_version(monkeypatch: pytest.MonkeyPatch) -> None:
    x, late = Host("x"), Host("late")
    service = Service(x)
    service.publish("a", 1)
    monkeypatch.setitem(DISK, "/adapters/a/1", digest_of("overwritten"))
    service.register(late)
    service.pass_time(3)
    assert (x.adapters, late.adapters) == ({"a": (1,)}, {})
    asked = [one for one in late.asked if one[0] == "load"]
    assert asked == [("load", "a", 1)], "once, since the same files would be there again"
    assert service.given("job") == "x"
    restarted = BackendRequestHandler(LEASE_S)
    restarted.restore([], service.now, weights=service.handler.take_weights() or ())
    service.handler = restarted
    for host in (x, late):
        service.register(host)
    service.pass_time(LEASE_S + 2)
    assert (x.adapters, late.adapters) == ({"a": (1,)}, {}), "the journal has the digest"
    error = from_info(service.publish("a", 1).error)
    assert isinstance(error, InvalidWeights)
    service.publish("a", 2)
    assert (x.adapters, late.adapters) == ({"a": (2,)}, {"a": (2,)})


def test_hosts_that_read_different_files_do_not_serve_them_as_one_version() -> None:
    stale = Host("stale")
    hosts = [Host("x"), Host("y"), stale]
    service = Service(*hosts)
    service.publish("a", 1)
    stale.cached = digest_of("/adapters/a/1")
    reply = service.publish("a", 2)
    assert reply.error.code == "engine_failed"
    assert "backend stale: the files in /adapters/a/2 changed while hosts read them" in reply.error.message
    assert [one for one in stale.asked if one[0] == "remove"] == [("remove", "a", 2)]
    service.pass_time(2)
    assert [host.adapters for host in hosts] == [{"a": (2,)}] * 3
    assert stale.asked.count(("load", "a", 2)) == 2, "the second time it read the other hosts' files"
