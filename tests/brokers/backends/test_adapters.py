"""Adapters as models: which backends load them, and who gets them."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest
from msgspec.structs import replace

from prorl_zmq.brokers.backends.backend_ranking import BackendRanking
from prorl_zmq.brokers.backends.request_handler import BackendRequestHandler
from prorl_zmq.brokers.backends.weight_calls import AGAIN_S, wait_share
from prorl_zmq.errors import EngineFailed, InvalidWeights, ProrlError
from prorl_zmq.wire.messages.backends import (
    AddBackend,
    Assign,
    Assigned,
    Backend,
    BackendAlive,
    BackendStatus,
    HoldWeights,
    ListBackends,
    ListModels,
    Release,
)
from prorl_zmq.wire.messages.base import Done, Refused
from prorl_zmq.wire.messages.engines import EngineReady, WeightsServed, WeightUpdate

LEASE_S = 10.0
NOW = 100.0


DISK: dict[str, str] = {}
"""The digest of the files at a path, where it is not that of the path's name."""


def digest_of(path: str) -> str:
    return DISK.get(path) or hashlib.sha256(path.encode()).hexdigest()


class Host:
    """An engine host with adapter slots: what it has loaded, and what it refuses. All tests of adapters use it."""

    def __init__(self, name: str, base: str = "policy", slots: int = 2, *, frozen: bool = True) -> None:
        self.backend = Backend(backend_id=name, endpoint=f"ipc://{name}", name=base, frozen=frozen, adapter_slots=slots)
        self.failure: ProrlError | None = None
        self.read = ""
        """The digest of the files that it loaded last."""
        self.cached = ""
        """The digest that it reads next, wherever; empty: that of the path."""
        self.asked: list[tuple[str, str, int]] = []

    @property
    def adapters(self) -> dict[str, tuple[int, ...]]:
        return self.backend.adapters

    def does(self, request: WeightUpdate) -> ProrlError | None:
        if request.step == "fetch":
            return None
        self.asked.append((request.step, request.model, request.weight_version))
        if self.failure is not None:
            return self.failure
        self.read = ""
        if request.step == "load" and request.model != self.backend.name:
            self.read, self.cached = self.cached or digest_of(request.path), ""
            if request.digest not in ("", self.read):
                return InvalidWeights(f"{request.path} has other files")
        if request.model == self.backend.name:
            self.backend = replace(self.backend, weight_version=request.weight_version)
            return None
        loaded = self.adapters.get(request.model, ())
        kept = tuple(one for one in loaded if one in request.keep and one != request.weight_version)
        if request.step == "load":
            kept = (*kept, request.weight_version)
        others = {model: versions for model, versions in self.adapters.items() if model != request.model}
        self.backend = replace(self.backend, adapters=others | ({request.model: kept} if kept else {}))
        return None


class Service:
    """A backend broker's requests, and the hosts that it asks."""

    def __init__(self, *hosts: Host) -> None:
        self.handler = BackendRequestHandler(LEASE_S)
        self.hosts = {host.backend.backend_id: host for host in hosts}
        self.now = NOW
        self.replies: dict[str, Any] = {}
        for host in hosts:
            self.register(host)
        if hosts:
            self.pass_time(LEASE_S + 1)

    def register(self, host: Host) -> None:
        self.hosts[host.backend.backend_id] = host
        self.ask(AddBackend("add", host.backend, heartbeats=True))

    def ask(self, request: Any) -> Any:
        self._note(self.handler.handle([request.request_id.encode(), b""], request, self.now))
        self.settle()
        return self.replies.pop(request.request_id, None)

    def settle(self) -> None:
        """Have hosts do what they are asked, and announce what they have, until nothing is left to do."""
        while calls := self.handler.weights.take_calls():
            for call in calls:
                host = self.hosts[call.address.endpoint.removeprefix("ipc://")]
                error = host.does(call.request)
                self._announce(host)
                digest = host.read if error is None else ""
                self._note(
                    self.handler.engine_answered(
                        call.request.request_id, error, self.now, EngineReady("ready", 0, digest=digest)
                    )
                )

    def _announce(self, host: Host) -> None:
        alive = BackendAlive("alive", host.backend.backend_id, host.backend.weight_version, adapters=host.adapters)
        self._note(self.handler.handle([b"alive", b""], alive, self.now))

    def _note(self, answers: Any) -> None:
        self.replies.update({bytes(answer.envelope[0]).decode(): answer.reply for answer in answers})

    def pass_time(self, seconds: float) -> None:
        """Let time pass, a second at a time, with heartbeats."""
        for _ in range(int(seconds)):
            self.now += 1
            for host in self.hosts.values():
                self._announce(host)
            self._note(self.handler.tick(self.now))
            self.settle()

    def publish(self, model: str, version: int, trainer: str = "", base: str = "") -> Any:
        path = f"/adapters/{model}/{version}"
        name = f"load-{model}-{version}-{trainer}-{self.now}"
        return self.ask(WeightUpdate(name, "load", version, path, trainer=trainer, model=model, base=base))

    def assign(self, job_id: str, model: str = "a", **more: Any) -> Assigned | None:
        request_id = f"{job_id}-{model}-{more}"
        options = {"owner": "run-1", "attempt": 1, "wait_s": 5.0, **more}
        reply: Assigned | None = self.ask(Assign(request_id, job_id=job_id, model=model, **options))
        return reply

    def given(self, job_id: str, model: str = "a", **more: Any) -> str:
        reply = self.assign(job_id, model, **more)
        assert isinstance(reply, Assigned), reply
        return reply.backend.backend_id

    def release(self, job_id: str, model: str = "a") -> None:
        self.ask(Release("release", job_id, 1, model=model))

    def status(self, name: str) -> BackendStatus:
        backends = self.ask(ListBackends("list")).backends
        (found,) = [one for one in backends if one.backend.backend_id == name]
        assert isinstance(found, BackendStatus)
        return found

    def models(self) -> tuple[str, ...]:
        models = self.ask(ListModels("models")).models
        assert isinstance(models, tuple)
        return models


def test_an_adapter_is_loaded_by_all_backends_with_slots_before_jobs_may_name_it() -> None:
    x, y, plain = Host("x"), Host("y"), Host("plain", slots=0)
    service = Service(x, y, plain)
    update = WeightUpdate("load", "load", 7, "/a", model="a", trainer="t")
    assert service.handler.handle([b"load", b""], update, service.now) == [], "hosts are asked first"
    assert service.models() == ("policy",) if not x.adapters else True
    service.settle()
    assert service.replies.pop("load") == WeightsServed("load", {})
    assert (x.adapters, y.adapters, plain.adapters) == ({"a": (7,)}, {"a": (7,)}, {})
    assert service.models() == ("a", "policy")
    assert {service.given(f"job-{number}") for number in range(4)} == {"x", "y"}
    assert service.given("own", "policy") == "plain", "the least loaded of all three"


def test_other_jobs_are_assigned_while_an_adapter_is_loaded() -> None:
    service = Service(Host("x"))
    service.publish("a", 1)
    service.handler.handle([b"load", b""], WeightUpdate("load", "load", 2, "/2", model="a"), service.now)
    for model in ("a", "policy"):
        request = Assign("r", owner="run-1", job_id=f"job-{model}", attempt=1, wait_s=5.0, model=model)
        (answer,) = service.handler.handle([b"r", b""], request, service.now)
        assert isinstance(answer.reply, Assigned)
    service.settle()
    assert service.replies.pop("load") == WeightsServed("load", {})


def test_a_backend_that_fails_gets_no_jobs_of_this_model_alone() -> None:
    x, y = Host("x"), Host("y")
    service = Service(x, y)
    service.publish("a", 1)
    y.failure = InvalidWeights("the disk is full", path="/adapters/a/2")
    refused = service.publish("a", 2)
    assert isinstance(refused, Refused)
    assert refused.error.message == "backend y: the disk is full"
    assert refused.error.fields["backend"] == "y"
    assert {service.given(f"job-{number}") for number in range(3)} == {"x"}
    assert service.given("own", "policy") == "y"
    assert service.status("y").state == "ready"
    assert service.status("y").adapter_problems == {"a": "backend y: the disk is full"}
    assert service.status("x").adapter_problems == {}
    asked = len(y.asked)
    service.pass_time(5)
    assert len(y.asked) == asked, "it is not asked again and again"
    y.failure = None
    service.publish("a", 3)
    assert service.status("y").adapter_problems == {}
    assert service.given("new") == "y"


def test_an_adapter_that_no_backend_could_load_is_not_published_and_its_old_version_stays() -> None:
    x = Host("x")
    service = Service(x)
    x.failure = InvalidWeights("rank 64 is greater than 32", path="/adapters/a/1")
    refused = service.publish("a", 1, trainer="t")
    assert refused.error.code == "invalid_weights"
    assert service.models() == ("policy",)
    x.failure = None
    service.publish("a", 2, trainer="t")
    x.failure = EngineFailed("the engine is gone")
    service.publish("a", 3, trainer="t")
    (adapter,) = service.ask(ListBackends("list")).adapters
    assert (adapter.model, adapter.base, adapter.weight_version) == ("a", "policy", 2)
    assert service.given("job") == "x"


def test_a_backend_without_the_adapter_loads_it_before_it_gets_its_jobs() -> None:
    service = Service(Host("x"))
    service.publish("a", 7)
    y = Host("y")
    y.failure = EngineFailed("busy")
    service.register(y)
    assert service.status("y").adapter_problems == {"a": "loading version 7 failed: backend y: busy"}
    assert {service.given(f"job-{number}") for number in range(3)} == {"x"}
    y.failure = None
    service.register(y)
    assert y.asked[-1] == ("load", "a", 7)
    assert service.given("next") == "y"


def test_a_backend_that_could_not_load_the_adapter_is_asked_again() -> None:
    service = Service(Host("x"))
    service.publish("a", 7)
    y = Host("y")
    y.failure = EngineFailed("not yet")
    service.register(y)
    y.failure = EngineFailed("the folder is not there yet")
    wait_s = math.ceil(wait_share("y") * AGAIN_S)
    service.pass_time(wait_s - 1)
    assert y.asked == [("load", "a", 7)], "it is not asked again at once"
    service.pass_time(1)
    assert y.asked == [("load", "a", 7)] * 2
    assert service.status("y").adapter_problems == {
        "a": "loading version 7 failed: backend y: the folder is not there yet"
    }
    y.failure = None
    service.pass_time(2 * wait_s)
    assert y.asked == [("load", "a", 7)] * 3
    assert service.status("y").adapter_problems == {}
    assert {service.given(f"job-{number}") for number in range(3)} == {"x", "y"}
    service.pass_time(8 * wait_s)
    assert y.asked == [("load", "a", 7)] * 3


def test_a_late_engine_loads_the_bases_weights_before_adapters_of_them() -> None:
    x, y, z = (Host(name, frozen=False) for name in "xyz")
    service = Service(x)
    service.publish("policy", 5), service.publish("a", 1)
    service.register(y)
    service.pass_time(1)
    assert y.asked == [("load", "policy", 5), ("load", "a", 1)]
    z.failure = InvalidWeights("no such folder", path="/adapters/policy/5")
    service.register(z)
    service.pass_time(math.ceil(wait_share("z") * AGAIN_S) - 1)
    assert z.asked == [("load", "policy", 5)], "it is not asked again at once"
    service.pass_time(1)
    assert z.asked == [("load", "policy", 5)] * 2, "it is not asked for the adapter"
    assert service.status("z").state == "behind"


def test_jobs_wait_for_a_killed_engine_that_lost_its_adapter() -> None:
    x = Host("x")
    service = Service(x)
    service.publish("a", 7)
    assert service.given("job") == "x"
    x.backend = replace(x.backend, adapters={}, life="2")
    x.failure = EngineFailed("not yet")
    service.register(x)
    assert service.assign("job", leaving="x") is None, "the base model never answers it"
    x.failure = None
    service.register(x)
    reply = service.replies.pop("job-a-{'leaving': 'x'}")
    assert reply.backend.adapters == {"a": (7,)}


def test_a_wait_ends_with_what_each_backend_lacks() -> None:
    x = Host("x")
    service = Service(x)
    service.publish("a", 7)
    x.backend, x.failure = replace(x.backend, adapters={}), InvalidWeights("no such folder", path="/adapters/a/7")
    service.register(x)
    assert service.assign("job", wait_s=2.0) is None
    service.pass_time(3)
    refused = service.replies.pop("job-a-{'wait_s': 2.0}")
    assert refused.error.message == (
        "no backend of the model a took job job within 2 s; backend x: loading version 7 failed: backend x: no such "
        "folder"
    )


def test_a_backends_place_costs_the_same_with_many_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    x, late = Host("x", slots=64), Host("late", slots=64)
    service = Service(x, late)
    for number in range(64):
        service.publish(f"a-{number}", 1)
    placed: list[str] = []
    place = BackendRanking.place

    def counted(ranking: BackendRanking, backend: Backend, in_flight: int, **tier: bool) -> None:
        placed.append(backend.backend_id)
        place(ranking, backend, in_flight, **tier)

    monkeypatch.setattr(BackendRanking, "place", counted)
    given = service.given("job", "a-7")
    assert placed == [given]
    service.release("job", "a-7")
    assert placed == [given] * 2
    late.failure = EngineFailed("not now")
    late.backend = replace(late.backend, adapters={}, life="2")
    service.register(late)
    assert [service.given(f"job-{number}", "a-7") for number in range(3)] == ["x"] * 3
    assert service.given("own", "policy") == "late", "it has fewer jobs"


@pytest.mark.parametrize("of_before", [False, True])
def test_an_adapter_whose_first_load_did_not_end_is_forgotten(*, of_before: bool) -> None:
    service = Service(Host("x"))
    update = WeightUpdate("load", "load", 7, "/a", timeout_s=20.0, model="a")
    service.handler.handle([b"load", b""], update, service.now)
    weights = service.handler.take_weights()
    assert weights is not None
    again = Service()
    again.handler.restore([], again.now, of_before=of_before, weights=weights)
    again.register(Host("x"))
    again.pass_time(0 if of_before else 60)
    assert again.handler.take_weights() == ()
    assert again.ask(AddBackend("add", Backend(backend_id="a", endpoint="ipc://a", name="a"))) == Done("add")


def test_each_adapter_has_a_trainer_and_versions_of_its_own() -> None:
    x = Host("x")
    service = Service(x)
    service.publish("a", 5, trainer="first"), service.publish("b", 1, trainer="second")
    assert x.adapters == {"a": (5,), "b": (1,)}
    refused = service.publish("a", 6, trainer="second")
    assert (refused.error.code, refused.error.fields["session"]) == ("weights_held", "first")
    assert "the weights of the model a," in refused.error.message
    service.ask(HoldWeights("goodbye", "first", goodbye=True, model="a"))
    service.publish("a", 6, trainer="second")
    assert x.adapters == {"a": (6,), "b": (1,)}


def test_an_adapter_may_be_the_policy_of_a_frozen_base() -> None:
    service = Service(Host("x", base="base"))
    service.publish("policy", 1)
    assert service.models() == ("base", "policy")
    assert service.assign("job", "policy", pin=True).pinned == 1
