"""Backends of several models: who waits for which, what a job holds of each, and what weight updates leave alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from prorl_zmq.brokers.backends.backend_records import WeightsRecord
from prorl_zmq.brokers.backends.request_handler import BackendRequestHandler
from prorl_zmq.stages.held_assignments import HeldAssignments
from prorl_zmq.wire.messages.backends import (
    AddBackend,
    Assign,
    Assigned,
    Backend,
    BackendAlive,
    EngineStart,
    GenerationFailed,
    HoldWeights,
    LackedRecord,
    ListBackends,
    ListModels,
    ModelList,
    NameAll,
    Release,
    RemoveBackend,
    ReportStarts,
    WaitLonger,
)
from prorl_zmq.wire.messages.base import Done, Refused
from prorl_zmq.wire.messages.engines import WeightUpdate
from prorl_zmq.wire.records import RECORD_NAMES, TEACHER

if TYPE_CHECKING:
    from collections.abc import Iterable

LEASE_S = 10.0
P1, P2 = Backend(backend_id="p1", endpoint="ipc://p1"), Backend(backend_id="p2", endpoint="ipc://p2")
B1 = Backend(backend_id="b1", endpoint="ipc://b1", name="b")
U1, U2 = (Backend(backend_id=name, endpoint=f"ipc://{name}", name="user", frozen=True) for name in ("u1", "u2"))


def handler(*backends: Backend) -> BackendRequestHandler:
    made = BackendRequestHandler(LEASE_S)
    for backend in backends:
        ask(made, AddBackend("add", backend))
    return made


def ask(broker: BackendRequestHandler, request: Any, now: float = 0.0, client: bytes = b"me") -> dict[bytes, Any]:
    return replies(broker.handle([client, b""], request, now))


def replies(answers: Iterable[Any]) -> dict[bytes, Any]:
    return {bytes(answer.envelope[0]): answer.reply for answer in answers}


def assign(
    model: str = "policy", job_id: str = "job", leaving: str = "", attempt: int = 1, wait_s: float = 60
) -> Assign:
    name = f"{job_id}-{model}-{attempt}-{leaving}"
    return Assign(name, owner="run-1", job_id=job_id, attempt=attempt, wait_s=wait_s, leaving=leaving, model=model)


def given(broker: BackendRequestHandler, request: Assign) -> str:
    reply = ask(broker, request)[b"me"]
    assert isinstance(reply, Assigned), reply
    return reply.backend.backend_id


def in_flight(broker: BackendRequestHandler) -> dict[str, int]:
    return {one.backend.backend_id: one.in_flight for one in ask(broker, ListBackends("list"))[b"me"].backends}


def test_a_job_holds_a_backend_of_each_model_and_keeps_both() -> None:
    broker = handler(P1, P2, U1, U2)
    held = given(broker, assign()), given(broker, assign("user"))
    assert held[0].startswith("p")
    assert held[1].startswith("u")
    assert (given(broker, assign()), given(broker, assign("user"))) == held
    assert sum(in_flight(broker).values()) == 2


def test_a_backend_that_failed_is_replaced_by_one_of_its_model_only() -> None:
    broker = handler(P1, U1, U2)
    policy, user = given(broker, assign()), given(broker, assign("user"))
    ask(broker, GenerationFailed("failed", "job", user, "it coughs"))
    other = given(broker, assign("user", leaving=user))
    assert {user, other} == {"u1", "u2"}
    assert given(broker, assign()) == policy, "the policy's stays"
    ask(broker, GenerationFailed("failed", "job", other, "it coughs"))
    broker.tick(0.0)
    again = ask(broker, assign("user", leaving=other))
    assert b"me" not in again or again[b"me"].backend.name == "user", "never the policy's, though that is ready"


def test_who_waits_for_one_model_does_not_hold_up_the_jobs_of_another() -> None:
    broker = handler(P1)
    assert ask(broker, assign("user", "first"), client=b"first") == {}
    assert given(broker, assign(job_id="second")) == "p1"
    assert ask(broker, ListBackends("list"))[b"me"].waiting == 1
    assert broker.waiting_by_model() == {"user": 1}
    answers = ask(broker, AddBackend("add", U1))
    assert answers[b"first"].backend == U1


def test_a_release_ends_the_assignment_of_one_model_or_those_of_all() -> None:
    broker = handler(P1, U1)
    given(broker, assign()), given(broker, assign("user"))
    ask(broker, Release("release", "job", 1, model="user"))
    assert in_flight(broker) == {"p1": 1, "u1": 0}
    given(broker, assign("user"))
    ask(broker, Release("release", "job", 1))
    assert in_flight(broker) == {"p1": 0, "u1": 1}
    given(broker, assign(attempt=2)), given(broker, assign("user", attempt=2))
    ask(broker, Release("of the rollout broker", "job", 1, model=""))
    assert in_flight(broker) == {"p1": 1, "u1": 1}, "a newer attempt has them"
    assert ask(broker, assign("third", attempt=2), client=b"third") == {}
    ask(broker, Release("of the rollout broker", "job", 2, model=""))
    assert in_flight(broker) == {"p1": 0, "u1": 0}
    assert broker.waiting == 0


def test_a_broker_that_was_restarted_learns_both_assignments_of_a_job() -> None:
    held = HeldAssignments("run-1")
    for holder, backend_id in (("job", "p1"), ("job/user", "u1")):
        held.wait(holder, 1, own=holder == "job")
        held.assigned(holder, 1, backend_id)
    held.report()
    assert held.backends() == {"job": "p1"}, "what the rollout broker shows"
    broker = handler(P1, P2, U1, U2)
    assert isinstance(ask(broker, held.report())[b"me"], NameAll)
    assert ask(broker, held.report(full=True))[b"me"].__class__ is Done
    assert in_flight(broker) == {"p1": 1, "p2": 0, "u1": 1, "u2": 0}
    assert ask(broker, held.report())[b"me"].__class__ is Done, "the digests agree"
    assert (given(broker, assign()), given(broker, assign("user"))) == ("p1", "u1")
    assert held.release("job/user", 1) is not None
    ask(broker, held.report(full=True))
    assert in_flight(broker) == {"p1": 1, "p2": 0, "u1": 0, "u2": 0}


def test_a_silent_owner_loses_the_backends_of_all_models() -> None:
    broker = handler(P1, U1)
    given(broker, assign()), given(broker, assign("user"))
    broker.tick(LEASE_S + 1)
    assert in_flight(broker) == {"p1": 0, "u1": 0}


def test_a_wait_for_a_model_that_starts_does_not_expire_and_others_do() -> None:
    broker = handler()
    start = EngineStart("engine-1", "starting", "", "user")
    ask(broker, ReportStarts("starts", "serve", (start,)))
    assert isinstance(ask(broker, assign("user", wait_s=1), client=b"user")[b"user"], WaitLonger)
    assert ask(broker, assign(wait_s=1), client=b"policy") == {}
    expired = replies(broker.tick(2.0))
    assert expired.keys() == {b"policy"}
    ask(broker, ReportStarts("starts", "serve", (EngineStart("engine-1", "failed", "no memory", "user"),)), 3.0)
    (refused,) = replies(broker.tick(10.0)).values()
    assert "no backend of the model user took job job within 1 s; engine engine-1 failed to start: no memory" in (
        refused.error.message
    )


def test_a_wait_for_a_model_without_backends_ends_with_its_name() -> None:
    broker = handler(P1)
    ask(broker, assign("usr", wait_s=1))
    (refused,) = replies(broker.tick(2.0)).values()
    assert isinstance(refused, Refused)
    assert refused.error.code == "no_backend"
    assert "no backend of the model usr took job job" in refused.error.message
    assert "name = 'usr'" in refused.error.message


def test_a_model_that_no_job_named_is_refused_at_once_unless_the_service_has_it() -> None:
    broker = handler(P1)
    unnamed = replace(assign("judge"), named=False)
    refused = ask(broker, unnamed)[b"me"]
    assert isinstance(refused, Refused)
    assert "no backend of the model judge took job job; start one with `name = 'judge'`" in refused.error.message
    ask(broker, ReportStarts("starts", "serve", (EngineStart("engine-1", "starting", "", "judge"),)))
    assert isinstance(ask(broker, unnamed)[b"me"], WaitLonger)


def versions(broker: BackendRequestHandler, now: float = 0.0) -> dict[str, tuple[int, str]]:
    listed = ask(broker, ListBackends("list"), now)[b"me"].backends
    return {one.backend.backend_id: (one.backend.weight_version, one.state) for one in listed}


def called(broker: BackendRequestHandler) -> dict[str, WeightUpdate]:
    """Return what engine hosts are asked now, by endpoint; all of them do it, and first fetch the weights."""
    calls = broker.weights.take_calls()
    for call in calls:
        broker.engine_answered(call.request.request_id, None, 0.0)
    if any(call.request.step == "fetch" for call in calls):
        return called(broker)
    return {call.address.endpoint: call.request for call in calls}


def updated(broker: BackendRequestHandler, version: int, model: str = "policy", trainer: str = "") -> dict[str, Any]:
    path = f"/weights/{model}/{version}"
    ask(broker, WeightUpdate(f"load-{model}-{version}", "load", version, path, model=model, trainer=trainer))
    return called(broker)


def test_weight_updates_pass_frozen_backends_by() -> None:
    broker = handler(P1, U1)
    ask(broker, WeightUpdate("begin", "begin", 7, timeout_s=5.0, limit_s=60.0))
    assert called(broker).keys() == {"ipc://p1"}
    assert given(broker, assign("user")) == "u1", "it does not wait for the new weights"
    ask(broker, WeightUpdate("end", "end", 7, timeout_s=5.0))
    called(broker)
    assert versions(broker) == {"p1": (7, "ready"), "u1": (0, "ready")}
    ask(broker, AddBackend("back", U1, heartbeats=True))
    ask(broker, BackendAlive("alive", "u1", 0))
    broker.tick(1.0)
    assert broker.weights.take_calls() == [], "it is not asked to catch up"
    assert versions(broker)["u1"] == (0, "ready")


def test_an_update_of_one_model_leaves_the_others_as_they_are() -> None:
    broker = handler(P1, B1)
    ask(broker, WeightUpdate("begin", "begin", 7, limit_s=60.0, model="b"))
    (request,) = called(broker).values()
    assert (request.model, request.weight_version) == ("b", 7)
    assert versions(broker) == {"p1": (0, "ready"), "b1": (0, "updating")}
    assert given(broker, assign()) == "p1"
    assert ask(broker, assign("b"), client=b"b") == {}, "it waits for the new weights"
    ask(broker, WeightUpdate("begin", "begin", 3, limit_s=60.0))
    assert called(broker).keys() == {"ipc://p1"}, "both models are updated at the same time"
    refused = ask(broker, WeightUpdate("other", "begin", 8, limit_s=60.0, model="b"))[b"me"]
    assert refused.error.message.startswith("an update to weights 7 of the model b was begun and has not ended")
    ask(broker, WeightUpdate("cancel", "cancel", 3))
    called(broker)
    assert versions(broker) == {"p1": (0, "ready"), "b1": (0, "updating")}
    ask(broker, WeightUpdate("end", "end", 7, model="b"))
    (call,) = broker.weights.take_calls()
    answers = replies(broker.engine_answered(call.request.request_id, None, 0.0))
    assert answers[b"b"].backend.weight_version == 7
    assert versions(broker) == {"p1": (0, "ready"), "b1": (7, "ready")}


def test_an_update_that_is_late_is_given_up_for_its_model_alone() -> None:
    broker = handler(P1, B1)
    ask(broker, WeightUpdate("begin-b", "begin", 7, limit_s=10.0, model="b"))
    ask(broker, WeightUpdate("begin", "begin", 3, limit_s=60.0))
    called(broker)
    broker.tick(11.0)
    assert versions(broker, 11.0) == {"p1": (0, "updating"), "b1": (0, "ready")}


def test_each_model_has_a_trainer_of_its_own() -> None:
    broker = handler(P1, B1)
    assert updated(broker, 1, trainer="first").keys() == {"ipc://p1"}
    assert updated(broker, 9, "b", trainer="second").keys() == {"ipc://b1"}
    assert versions(broker) == {"p1": (1, "ready"), "b1": (9, "ready")}
    refused = ask(broker, WeightUpdate("load", "load", 2, "/2", model="b", trainer="first"))[b"me"]
    assert (refused.error.code, refused.error.fields["session"]) == ("weights_held", "second")
    assert "the weights of the model b," in refused.error.message
    ask(broker, HoldWeights("goodbye", "second", goodbye=True, model="policy"))
    ask(broker, HoldWeights("alive", "second", model="b"), LEASE_S)
    refused = ask(broker, WeightUpdate("load", "load", 2, "/2", model="b", trainer="first"), LEASE_S + 10)[b"me"]
    assert refused.error.code == "weights_held", "only the lease of the policy was given back"
    ask(broker, HoldWeights("goodbye", "second", goodbye=True, model="b"))
    assert updated(broker, 10, "b", trainer="first").keys() == {"ipc://b1"}


def test_a_backend_that_returns_loads_the_weights_of_its_own_model() -> None:
    broker = handler(P1, B1)
    updated(broker, 5), updated(broker, 2, "b")
    records, weights = broker.take_changes(), broker.take_weights()
    assert weights == (
        WeightsRecord(5, path="/weights/policy/5"),
        WeightsRecord(2, path="/weights/b/2", model="b"),
    )
    again = BackendRequestHandler(LEASE_S)
    again.restore([record for record in records.values() if record], 0.0, weights=weights)
    assert again.take_weights() is None, "the file has them already"
    for backend in (B1, P1):
        ask(again, AddBackend("back", backend, heartbeats=True))
    asked = {endpoint: (one.path, one.weight_version, one.model) for endpoint, one in called(again).items()}
    assert asked == {"ipc://b1": ("/weights/b/2", 2, "b"), "ipc://p1": ("/weights/policy/5", 5, "policy")}
    assert versions(again) == {"p1": (5, "ready"), "b1": (2, "ready")}


def test_a_host_that_serves_another_model_now_does_not_need_the_weights_of_its_old_one() -> None:
    broker = handler(P1)
    updated(broker, 5)
    ask(broker, AddBackend("add", Backend(backend_id="p1", endpoint="ipc://p1", name="b"), heartbeats=True))
    assert versions(broker) == {"p1": (0, "ready")}


def test_the_version_of_one_backend_is_that_of_its_model() -> None:
    broker = handler(P1, B1)
    ask(broker, WeightUpdate("begin", "begin", 3, limit_s=60.0))
    called(broker)
    ask(broker, WeightUpdate("set", "set", 4, backend_id="b1"))
    assert versions(broker) == {"p1": (0, "updating"), "b1": (4, "ready")}


def test_weights_of_a_model_that_nobody_serves_are_refused_with_those_there_are() -> None:
    broker = handler(P1, B1)
    refused = ask(broker, WeightUpdate("load", "load", 2, "/2", model="c"))[b"me"]
    assert refused.error.code == "no_backend"
    assert "no backend serves the model c (there are b, policy)" in refused.error.message


def test_a_backend_that_is_behind_says_how_to_update_its_model() -> None:
    broker = handler(B1)
    ask(broker, WeightUpdate("set", "set", 4, model="b"))
    called(broker)
    ask(broker, AddBackend("add", Backend(backend_id="b2", endpoint="ipc://b2", name="b"), heartbeats=True))
    (behind,) = [one for one in ask(broker, ListBackends("list"))[b"me"].backends if one.state == "behind"]
    assert "`prorl backends set-version 4 --model-name b`" in behind.problem


def test_weights_of_frozen_backends_cannot_be_set() -> None:
    broker = handler(U1)
    refused = ask(broker, WeightUpdate("set", "set", 7, backend_id="u1"))[b"me"]
    assert refused.error.message == "backend u1 is frozen: its weights stay"
    nobody = ask(broker, WeightUpdate("set", "set", 7))[b"me"]
    assert nobody.error.code == "no_backend"
    assert "no backend serves the model policy (there are user)" in nobody.error.message
    frozen = ask(broker, WeightUpdate("set", "set", 7, model="user"))[b"me"]
    assert "all backends of the model user are frozen" in frozen.error.message


@pytest.mark.parametrize("how", ["registered", "starting", "silent"])
def test_the_models_there_are_include_those_that_will_be_back(how: str) -> None:
    broker = handler(P1)
    if how == "starting":
        ask(broker, ReportStarts("starts", "serve", (EngineStart("engine-1", "starting", "", "user"),)))
    else:
        ask(broker, AddBackend("add", U1, heartbeats=True))
    if how == "silent":
        broker.tick(LEASE_S + 1)
    listed = ask(broker, ListModels("models"))[b"me"]
    live = {"policy": "p1", **({"user": "u1"} if how == "registered" else {})}
    names = (*RECORD_NAMES, TEACHER)
    lacking = (LackedRecord(model, name, backend_id, "") for model, backend_id in live.items() for name in names)
    assert listed == ModelList("models", ("policy", "user"), tuple(lacking))


def test_of_each_record_the_backend_that_gives_least_is_listed_with_its_reason() -> None:
    few = Backend(backend_id="few", endpoint="ipc://few", model="m", records=("top_logprobs",), top_limit=5)
    fewer = Backend(
        backend_id="fewer",
        endpoint="ipc://fewer",
        model="m",
        records=("top_logprobs", "sampling_mask", "experts"),
        top_limit=3,
    )
    broker = handler(few, fewer)
    listed = ask(broker, ListModels("models"))[b"me"]
    assert set(listed.lacking) == {
        LackedRecord("policy", "top_logprobs", "fewer", "m", "", 3),
        LackedRecord("policy", "sampling_mask", "few", "m"),
        LackedRecord("policy", "experts", "few", "m"),
        LackedRecord("policy", "teacher", "few", "m"),
    }
    none = Backend(backend_id="none", endpoint="ipc://none", model="m", unrecorded={"experts": "its model is dense"})
    ask(broker, AddBackend("add", none))
    lacking = {one.record: one for one in ask(broker, ListModels("models"))[b"me"].lacking}
    assert lacking["top_logprobs"] == LackedRecord("policy", "top_logprobs", "none", "m")
    assert lacking["experts"].backend_id == "few"
    ask(broker, RemoveBackend("remove", "few"))
    lacking = {one.record: one for one in ask(broker, ListModels("models"))[b"me"].lacking}
    assert lacking["experts"] == LackedRecord("policy", "experts", "none", "m", "its model is dense")


def test_a_host_that_returns_as_another_model_has_none_of_its_old_jobs() -> None:
    broker = handler(P1, U1)
    given(broker, assign("user"))
    ask(broker, AddBackend("add", Backend(backend_id="u1", endpoint="ipc://u1")))
    assert in_flight(broker) == {"p1": 0, "u1": 0}
    assert ask(broker, assign("user")) == {}
    assert {given(broker, assign(job_id=name)) for name in ("a", "b")} == {"p1", "u1"}


def test_a_job_that_holds_a_backend_of_one_model_does_not_wait_for_room_on_anothers() -> None:
    """Otherwise two jobs could wait for each other: each has what the other one needs."""
    broker = handler(P1, U1)
    broker.heap.set_room("p1", 1)
    broker.heap.set_room("u1", 1)
    assert given(broker, assign(job_id="a")) == "p1"
    assert given(broker, assign("user", job_id="b")) == "u1"
    assert given(broker, assign("user", job_id="a")) == "u1"
    assert given(broker, assign(job_id="b")) == "p1"
    assert ask(broker, assign(job_id="c")) == {b"me": WaitLonger("c-policy-1-")}
    assert ask(broker, assign("user", job_id="c")) == {b"me": WaitLonger("c-user-1-")}
