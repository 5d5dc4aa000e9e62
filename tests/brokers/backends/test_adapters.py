"""Adapters as models: which backends load them, who gets them, which versions stay, and what is refused."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from msgspec.structs import replace

from prorl_zmq.brokers.backends.backend_ranking import BackendRanking
from prorl_zmq.brokers.backends.request_handler import BackendRequestHandler
from prorl_zmq.brokers.rollout.task_catalog import TaskCatalog
from prorl_zmq.errors import EngineFailed, InvalidJob, InvalidWeights, ProrlError, from_info
from prorl_zmq.stages.held_assignments import HeldAssignments
from prorl_zmq.wire.messages.backends import (
    AddBackend,
    Assign,
    Assigned,
    Backend,
    BackendAlive,
    BackendStatus,
    GenerationFailed,
    HoldWeights,
    ListBackends,
    ListModels,
    Release,
)
from prorl_zmq.wire.messages.base import Done, Refused
from prorl_zmq.wire.messages.engines import WeightUpdate
from prorl_zmq.wire.messages.jobs import Job, Phase
from prorl_zmq.wire.messages.stages import Task
from prorl_zmq.wire.records import TEACHER

LEASE_S = 10.0
NOW = 100.0


DISK: dict[str, str] = {}
"""The digest of the files at a path, where it is not that of the path's name."""


def digest_of(path: str) -> str:
    return DISK.get(path) or hashlib.sha256(path.encode()).hexdigest()


class Host:
    """An engine host with adapter slots: what it has loaded, and what it refuses."""

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
                self._note(self.handler.engine_answered(call.request.request_id, error, self.now, digest))

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
    assert service.replies.pop("load") == Done("load")
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
    assert service.replies.pop("load") == Done("load")


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


def test_a_late_engine_loads_the_bases_weights_before_adapters_of_them() -> None:
    x, y, z = (Host(name, frozen=False) for name in "xyz")
    service = Service(x)
    service.publish("policy", 5), service.publish("a", 1)
    service.register(y)
    service.pass_time(1)
    assert y.asked == [("load", "policy", 5), ("load", "a", 1)]
    z.failure = InvalidWeights("no such folder", path="/adapters/policy/5")
    service.register(z)
    service.pass_time(5)
    assert z.asked == [("load", "policy", 5)], "it is not asked again and again"
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


def test_a_backends_place_costs_the_same_with_many_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    x, late = Host("x", slots=64), Host("late", slots=64)
    service = Service(x, late)
    for number in range(64):
        service.publish(f"a-{number}", 1)
    placed: list[str] = []
    place = BackendRanking.place

    def counted(ranking: BackendRanking, backend: Backend, in_flight: int) -> None:
        placed.append(backend.backend_id)
        place(ranking, backend, in_flight)

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
    assert service.publish("a", 1, trainer="u") == Done(f"load-a-1-u-{service.now}")


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
        assert service.publish("a", 2) == Done(f"load-a-2--{service.now}")
        service.pass_time(1)
    y.backend = away
    service.register(y)
    service.pass_time(1)
    assert (x.adapters, y.adapters) == ({"a": (2,)}, {"a": (2,)})
    assert service.publish("a", 1) == Done(f"load-a-1--{service.now}")
    x.failure = EngineFailed("hangs")
    assert service.ask(WeightUpdate("remove-2", "remove", 0, model="a")).error.fields == {"backend": "x"}
    service.pass_time(1)
    assert service.publish("a", 1).error.fields == {"backend": "x"}
    x.failure = None
    service.pass_time(2)
    assert service.publish("a", 1) == Done(f"load-a-1--{service.now}")


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


def test_a_teacher_that_is_an_adapter_is_refused_with_the_reason() -> None:
    service = Service(Host("x"))
    service.publish("a", 1)
    lacking = service.ask(ListModels("models")).lacking
    assert [one.reason for one in lacking if (one.model, one.record) == ("a", TEACHER)] == ["adapters cannot"]
    catalog = TaskCatalog(roles=[Phase.SCORE])
    catalog.add([Task("task")])
    catalog.list_models(["policy", "a"], lacking)
    with pytest.raises(InvalidJob, match=r"the teacher 'a' cannot score texts: backend x .*: adapters cannot$"):
        catalog.check(Job(task="task", instance={}, teacher="a"))


def refusal(service: Service, request: WeightUpdate) -> tuple[str, str]:
    reply = service.ask(request)
    assert isinstance(reply, Refused)
    return reply.error.code, reply.error.message


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (WeightUpdate("r", "load", 1, "/1", model="c"), "no_backend", "could be of p or q: name its base"),
        (WeightUpdate("r", "load", 1, "/1", model="c", base="z"), "no_backend", "backends of the model z have no ada"),
        (WeightUpdate("r", "load", 1, "/1", model="a", base="q"), "no_backend", "a is an adapter of p, not of q"),
        (WeightUpdate("r", "load", 1, "/1", model="q", base="p"), "malformed_message", "q is a model of backends"),
        (WeightUpdate("r", "remove", 0, model="q"), "malformed_message", "q is a model of backends"),
        (
            WeightUpdate("r", "remove", 0, model="c"),
            "no_backend",
            "no adapter is published as the model c; adapters",
        ),
        (WeightUpdate("r", "begin", 2, model="a"), "malformed_message", "of which only a folder can be loaded"),
        (WeightUpdate("r", "set", 2, model="a"), "malformed_message", "of which only a folder can be loaded"),
    ],
)
def test_what_cannot_be_is_refused_by_name(request_: WeightUpdate, code: str, message: str) -> None:
    p, q = Host("p1", base="p"), Host("q1", base="q")
    service = Service(p, q)
    service.publish("a", 1, base="p")
    found = refusal(service, request_)
    assert found[0] == code
    assert message in found[1]
    assert (p.adapters, q.adapters) == ({"a": (1,)}, {})


def test_a_refusal_says_whether_a_trainer_may_wait() -> None:
    def is_final(service: Service, **changes: Any) -> bool:
        error = service.ask(WeightUpdate("r", "load", 1, "/1", **changes)).error
        return bool(from_info(error).fields.get("final"))

    service = Service(Host("p1", base="p"), Host("q1", base="q"), Host("r1", base="r", slots=0))
    service.publish("a", 1, base="p")
    for base in ("", "z", "r"):
        assert is_final(service, model="c", base=base)
    assert is_final(service, model="a", base="q")
    assert is_final(Service(Host("p1", base="p", slots=0, frozen=True)), model="p")
    none = Service(Host("x", slots=0))
    assert not is_final(none, model="a"), "engines with slots may come"


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


def test_without_slots_an_unknown_model_is_refused_with_those_there_are() -> None:
    code, message = refusal(Service(Host("x", slots=0)), WeightUpdate("r", "load", 1, "/1", model="a"))
    assert code == "no_backend"
    assert "no backend serves the model a (there are policy)" in message
    assert "needs backends with `lora`" in message


def test_a_backend_cannot_have_the_name_of_an_adapter() -> None:
    service = Service(Host("x"))
    service.publish("a", 1)
    reply = service.ask(AddBackend("add", Backend(backend_id="z", endpoint="ipc://z", name="a")))
    assert (reply.error.code, reply.error.fields) == ("config_error", {"key": "name"})
