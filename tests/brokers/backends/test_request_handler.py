from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from prorl_zmq.brokers.backends import backend_registry
from prorl_zmq.brokers.backends.request_handler import BackendRequestHandler
from prorl_zmq.errors import UpdateNotBegun
from prorl_zmq.wire.messages.backends import (
    AddBackend,
    Assign,
    Assigned,
    Backend,
    BackendAlive,
    BackendList,
    ClearBackends,
    DrainBackend,
    EngineLoad,
    HeldAssignment,
    ListBackends,
    OwnerAlive,
    Release,
    RemoveBackend,
)
from prorl_zmq.wire.messages.base import Done, Refused
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.engines import WeightUpdate

if TYPE_CHECKING:
    from prorl_zmq.brokers.backends.backend_heap import Affinity

LEASE_S = 10.0


class Broker:
    """A request handler and what it answered: client name to reply. Engine hosts do what they are asked at once."""

    def __init__(self, affinity: Affinity = "job") -> None:
        self.handler = BackendRequestHandler(LEASE_S, affinity)
        self.now = 0.0
        self.late: set[str] = set()
        """Backends whose hosts had begun nothing when an update ends."""

    def ask(self, request: Any, client: bytes = b"client") -> dict[bytes, Any]:
        answers = self.handler.handle([client, b""], request, self.now)
        for call in self.handler.weights.take_calls():
            late = call.request.step == "end" and call.address.endpoint.removeprefix("ipc://") in self.late
            error = UpdateNotBegun(f"no update to weights {call.request.weight_version} was begun") if late else None
            answers += self.handler.engine_answered(call.request.request_id, error, self.now)
        return {bytes(answer.envelope[0]): answer.reply for answer in answers}

    def tick(self, now: float) -> dict[bytes, Any]:
        self.now = now
        return {bytes(answer.envelope[0]): answer.reply for answer in self.handler.tick(now)}

    def in_flight(self) -> dict[str, int]:
        reply = self.ask(ListBackends("list"))[b"client"]
        assert isinstance(reply, BackendList)
        return {status.backend.backend_id: status.in_flight for status in reply.backends}

    def listed(self, name: str = "x") -> tuple[str, int]:
        """The state and the weight version of one backend."""
        (found,) = (s for s in self.ask(ListBackends("list"))[b"client"].backends if s.backend.backend_id == name)
        return found.state, found.backend.weight_version


def add(name: str = "x", *, heartbeats: bool = False, endpoint: str = "", version: int = 0) -> AddBackend:
    backend = Backend(backend_id=name, endpoint=endpoint or f"ipc://{name}", weight_version=version)
    return AddBackend("add", backend, heartbeats)


def assign(
    job_id: str = "a",
    attempt: int = 1,
    owner: str = "run-1",
    wait_s: float = 60.0,
    group: str = "",
    leaving: str = "",
) -> Assign:
    return Assign(
        f"assign-{job_id}-{attempt}-{leaving}" if leaving else f"assign-{job_id}-{attempt}",
        owner=owner,
        job_id=job_id,
        attempt=attempt,
        wait_s=wait_s,
        group_id=group,
        leaving=leaving,
    )


def test_an_assignment_is_answered_with_the_backend() -> None:
    broker = Broker()
    assert broker.ask(add()) == {b"client": Done("add")}
    assert broker.ask(assign()) == {b"client": Assigned("assign-a-1", add().backend)}


def test_a_waiting_assignment_is_served_when_a_backend_is_added() -> None:
    broker = Broker()
    assert broker.ask(assign("a"), b"first") == {}
    assert broker.ask(assign("b"), b"second") == {}
    assert broker.ask(ListBackends("list"))[b"client"].waiting == 2
    answers = broker.ask(add())
    assert {client: type(reply) for client, reply in answers.items()} == {
        b"client": Done,
        b"first": Assigned,
        b"second": Assigned,
    }
    assert broker.in_flight() == {"x": 2}


def test_an_assignment_that_waited_as_long_as_its_job_allows_is_refused() -> None:
    broker = Broker()
    broker.ask(assign(wait_s=5.0))
    assert broker.handler.next_deadline() == 5.0
    assert broker.tick(4.9) == {}
    reply = broker.tick(5.0)[b"client"]
    assert isinstance(reply, Refused)
    assert reply.error.code == "no_backend"
    assert reply.error.fields == {"job_id": "a", "waited_s": 5.0}
    assert broker.handler.next_deadline() is None
    assert broker.ask(add()) == {b"client": Done("add")}


def test_asking_again_does_not_start_the_wait_anew() -> None:
    broker = Broker()
    broker.ask(assign(wait_s=12.0))
    for broker.now in (5.0, 10.0):
        assert broker.ask(assign(wait_s=12.0), b"reconnected") == {}
    assert broker.handler.next_deadline() == 12.0
    assert isinstance(broker.tick(12.0)[b"reconnected"], Refused)


def test_of_two_attempts_that_wait_the_newer_one_is_served() -> None:
    broker = Broker()
    broker.ask(assign(attempt=2), b"new")
    broker.ask(assign(attempt=1), b"old")
    assert list(broker.ask(add())) == [b"client", b"new"]


def test_a_release_withdraws_a_waiting_assignment_unless_it_is_older() -> None:
    broker = Broker()
    broker.ask(assign("a", attempt=2))
    broker.ask(Release("release", "a", 1))
    assert broker.ask(ListBackends("list"))[b"client"].waiting == 1
    broker.ask(Release("release", "a", 2))
    assert broker.ask(ListBackends("list"))[b"client"].waiting == 0


def test_a_draining_backend_lets_jobs_wait() -> None:
    broker = Broker()
    broker.ask(add())
    broker.ask(DrainBackend("drain", "x"))
    assert broker.ask(assign()) == {}


def test_the_assignments_of_a_silent_owner_are_released() -> None:
    broker = Broker()
    broker.ask(add())
    broker.ask(assign("a", owner="dead"))
    broker.ask(assign("b", owner="alive"))
    broker.now = 9.0
    broker.ask(OwnerAlive("alive", "alive", {"b": HeldAssignment(1, "x")}))
    broker.tick(LEASE_S)
    assert broker.in_flight() == {"x": 1}
    broker.ask(OwnerAlive("alive", "alive", {}))
    assert broker.in_flight() == {"x": 0}


def test_a_broker_that_was_started_anew_learns_which_jobs_are_where() -> None:
    broker = Broker()
    broker.ask(add("x"))
    broker.ask(add("y"))
    jobs = {"a": HeldAssignment(1, "y", 3), "b": HeldAssignment(2, "y"), "waits": HeldAssignment(1)}
    for _ in range(2):
        broker.ask(OwnerAlive("alive", "run-1", jobs))
    assert broker.in_flight() == {"x": 0, "y": 2}
    assert broker.ask(assign("b", attempt=2))[b"client"].backend.backend_id == "y"
    broker.tick(LEASE_S)
    assert broker.in_flight() == {"x": 0, "y": 0}


def test_an_owner_that_died_while_it_waited_does_not_keep_what_it_is_given_later() -> None:
    broker = Broker()
    broker.ask(assign("a", owner="dead", wait_s=60.0), b"dead")
    broker.tick(2 * LEASE_S)
    broker.ask(add())
    assert broker.in_flight() == {"x": 1}
    broker.tick(3 * LEASE_S)
    assert broker.in_flight() == {"x": 0}


def test_a_silent_engine_host_is_removed_and_has_to_register_again() -> None:
    broker = Broker()
    broker.ask(add(heartbeats=True))
    broker.ask(add("static"))
    broker.now = 9.0
    assert broker.ask(BackendAlive("alive", "x", 3)) == {b"client": Done("alive")}
    assert broker.ask(ListBackends("list"))[b"client"].backends[0].backend.weight_version == 3
    broker.tick(18.9)
    assert set(broker.in_flight()) == {"x", "static"}
    broker.tick(19.0)
    assert set(broker.in_flight()) == {"static"}
    reply = broker.ask(BackendAlive("alive", "x", 3))[b"client"]
    assert isinstance(reply, Refused)
    assert reply.error.code == "unknown_backend"


def test_a_host_that_was_dismissed_stays_removed_until_it_is_added_again() -> None:
    for dismissal in (RemoveBackend("remove", "x"), ClearBackends("clear")):
        broker = Broker()
        broker.ask(add(heartbeats=True))
        broker.ask(dismissal)
        assert broker.ask(BackendAlive("alive", "x", 1)) == {b"client": Done("alive")}
        assert broker.in_flight() == {}
        broker.ask(add(heartbeats=True))
        broker.ask(BackendAlive("alive", "x", 1))
        assert broker.in_flight() == {"x": 0}


def test_wrong_ids_are_refused_and_change_nothing() -> None:
    broker = Broker()
    broker.ask(add(heartbeats=True))
    for request, code in (
        (add(endpoint="ipc://elsewhere"), "duplicate_backend"),
        (DrainBackend("r", "unknown"), "unknown_backend"),
        (RemoveBackend("r", "unknown"), "unknown_backend"),
        (WeightUpdate("r", "set", 1, backend_id="unknown"), "unknown_backend"),
        (BackendAlive("r", "unknown", 1), "unknown_backend"),
    ):
        before = broker.ask(ListBackends("list"))
        reply = broker.ask(request)[b"client"]
        assert isinstance(reply, Refused)
        assert reply.error.code == code
        assert reply.request_id == request.request_id
        assert broker.ask(ListBackends("list")) == before


def test_a_job_that_holds_an_assignment_gets_the_same_again() -> None:
    broker = Broker()
    broker.ask(add("x"))
    broker.ask(add("y"))
    first = broker.ask(assign())[b"client"]
    assert broker.ask(assign())[b"client"] == first
    assert broker.in_flight() == {"x": 1, "y": 0}


@pytest.mark.parametrize(
    ("backend", "code"),
    [
        (Backend(backend_id="bad", endpoint="nonsense"), "invalid_endpoint"),
        (Backend(backend_id="bad", endpoint=""), "invalid_endpoint"),
        (Backend(backend_id="bad", endpoint=f"ipc:///{'long' * 30}"), "invalid_endpoint"),
        (Backend(backend_id="bad", endpoint="tcp://127.0.0.1:*"), "invalid_endpoint"),
        (Backend(backend_id="bad", endpoint="tcp://*:5555"), "invalid_endpoint"),
        (Backend(backend_id="bad", endpoint="tcp://127.0.0.1:0"), "invalid_endpoint"),
        (Backend(backend_id="bad", endpoint="http://127.0.0.1:8000/v1"), "invalid_endpoint"),
        (Backend(backend_id="bad", endpoint="ipc://bad", chat=ChatSettings(kind="transformers")), "config_error"),
    ],
)
def test_a_backend_that_no_job_could_use_was_accepted(backend: Backend, code: str) -> None:
    broker = Broker()
    broker.ask(assign(), b"waits")
    answers = broker.ask(AddBackend("add", backend))
    assert list(answers) == [b"client"], "the job that waits is not given it"
    assert answers[b"client"].error.code == code
    assert broker.in_flight() == {}


def test_a_version_that_the_trainer_set_was_undone_by_the_next_heartbeat() -> None:
    broker = Broker()
    broker.ask(add(heartbeats=True, version=1))
    for backend_id, version in (("x", 7), (None, 8)):
        broker.ask(WeightUpdate("set", "set", version, backend_id=backend_id))
        broker.ask(BackendAlive("alive", "x", 1))
        assert broker.listed() == ("ready", version)
    broker.ask(BackendAlive("alive", "x", 2))
    assert broker.listed() == ("behind", 2), "the host's own change counts: older weights than announced"
    broker.ask(add(version=5))
    broker.ask(BackendAlive("alive", "x", 2))
    assert broker.listed() == ("behind", 2), "added by hand: the host knows better"


def test_an_engine_that_comes_with_older_weights_than_the_trainers_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker = Broker()
    broker.ask(add(heartbeats=True, version=1))
    broker.ask(WeightUpdate("set", "set", 8))
    assert "gets no jobs" not in caplog.text
    broker.ask(add("late", heartbeats=True, version=1))
    assert "backend late gets no jobs: it serves weights 1 where 8 are wanted: load them with" in caplog.text


def test_an_engine_that_was_restarted_served_its_first_weights_unnoticed(caplog: pytest.LogCaptureFixture) -> None:
    broker = Broker()
    broker.ask(add(heartbeats=True))
    broker.ask(BackendAlive("alive", "x", 7))
    broker.ask(add(heartbeats=True))  # killed and started again within the lease
    assert broker.listed() == ("behind", 0)
    assert "backend x gets no jobs: it serves weights 0 where 7 are wanted: load them with" in caplog.text
    assert broker.ask(assign()) == {}
    broker.ask(BackendAlive("alive", "x", 6))
    assert broker.listed() == ("behind", 6)
    broker.ask(add(heartbeats=True))  # and once more: it is still 7 that it has to reach
    assert isinstance(broker.ask(BackendAlive("alive", "x", 7), b"host")[b"client"], Assigned)
    assert broker.listed() == ("ready", 7)


def test_a_host_that_came_back_after_its_lease_was_not_held_to_its_weights() -> None:
    broker = Broker()
    broker.ask(add(heartbeats=True, version=7))
    broker.tick(LEASE_S)
    assert broker.in_flight() == {}
    broker.ask(add(heartbeats=True, endpoint="tcp://127.0.0.1:5555"))
    assert broker.listed() == ("behind", 0)
    broker.ask(WeightUpdate("set", "set", 8, backend_id="x"))
    broker.ask(BackendAlive("alive", "x", 0))
    assert broker.listed() == ("ready", 8)


def test_a_host_that_was_restarted_at_another_port_waits_for_no_lease() -> None:
    broker = Broker()
    broker.ask(add(heartbeats=True, version=7))
    elsewhere = add(heartbeats=True, endpoint="tcp://127.0.0.1:5555")
    broker.tick(0.2 * LEASE_S)
    assert broker.ask(elsewhere)[b"client"].error.code == "duplicate_backend", "two hosts of one name"
    broker.ask(BackendAlive("alive", "x", 7))
    broker.tick(0.4 * LEASE_S)
    assert broker.ask(elsewhere)[b"client"].error.code == "duplicate_backend", "it was heard of"
    broker.tick(0.51 * LEASE_S)
    assert broker.ask(elsewhere)[b"client"] == Done("add")
    assert broker.listed() == ("behind", 0), "it has to reach what its last life had served"


@pytest.mark.parametrize("forget", [RemoveBackend("forget", "x"), ClearBackends("forget"), add()])
@pytest.mark.parametrize("lost", [False, True])
def test_a_version_is_forgotten_on_request(forget: Any, lost: bool) -> None:
    broker = Broker()
    broker.ask(add(heartbeats=True, version=7))
    if lost:
        broker.tick(LEASE_S)
    assert isinstance(broker.ask(forget)[b"client"], Done)
    assert broker.ask(BackendAlive("alive", "x", 0)).keys() == {b"client"}
    broker.ask(add(heartbeats=True))
    if isinstance(forget, AddBackend):
        broker.ask(add())  # by hand, for the live host: it is wanted as it is
    assert broker.listed() == ("ready", 0)


def test_not_every_host_that_ever_was_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_registry, "LOST_LIMIT", 2)
    broker = Broker()
    for number, name in enumerate("xyz"):
        broker.ask(add(name, heartbeats=True, version=7))
        broker.tick((number + 1) * LEASE_S)
    for name in "xyz":
        broker.ask(add(name, heartbeats=True))
    assert [broker.listed(name)[0] for name in "xyz"] == ["ready", "behind", "behind"]


def test_an_http_server_is_refused_with_the_command_that_serves_it() -> None:
    reply = Broker().ask(add(endpoint="https://gpu-1:8000"))[b"client"]
    assert "`prorl-engine --engine http --url https://gpu-1:8000`" in reply.error.message


def test_the_jobs_of_a_group_get_one_backend_if_the_topology_says_so() -> None:
    by_group, by_job = Broker("group"), Broker("job")
    for broker in (by_group, by_job):
        for name in "xy":
            broker.ask(add(name))
        for job in "ab":
            broker.ask(assign(job, group="g"))
    assert by_group.in_flight() == {"x": 2, "y": 0}
    assert by_job.in_flight() == {"x": 1, "y": 1}


def test_the_last_load_of_a_host_is_listed() -> None:
    broker = Broker()
    broker.ask(add(heartbeats=True))
    broker.ask(add("static"))
    load = EngineLoad(running=3, tokens_per_s=120.5, prompt_tokens=1000, cached_tokens=900, generated_tokens=70)
    loads = [[status.load for status in broker.ask(ListBackends("list"))[b"client"].backends]]
    broker.ask(BackendAlive("alive", "x", 0, load))
    loads.append([status.load for status in broker.ask(ListBackends("list"))[b"client"].backends])
    assert loads == [[EngineLoad(), None], [load, None]]


def test_the_last_report_of_a_host_and_its_lease_are_listed() -> None:
    broker = Broker()
    broker.ask(add("x", heartbeats=True))
    broker.ask(add("by-hand"))
    broker.tick(3.0)
    broker.ask(BackendAlive("alive", "x", 0))
    broker.tick(5.0)
    listed = broker.ask(ListBackends("list"))[b"client"].backends
    assert {status.backend.backend_id: (status.silent_s, status.lease_s) for status in listed} == {
        "x": (2.0, LEASE_S),
        "by-hand": (None, 0.0),
    }


def test_a_job_whose_backend_was_removed_gets_another() -> None:
    broker = Broker()
    broker.ask(add("x"))
    broker.ask(assign())
    broker.ask(add("y"))
    broker.ask(RemoveBackend("remove", "x"))
    moved = broker.ask(assign(leaving="x"))[b"client"]
    assert isinstance(moved, Assigned)
    assert moved.backend.backend_id == "y"


def test_an_unwell_backend_is_listed_with_its_problem_and_gets_no_jobs() -> None:
    broker = Broker()
    broker.ask(add(heartbeats=True))
    assert broker.ask(assign("held"))[b"client"].backend.backend_id == "x"
    broker.ask(BackendAlive("alive", "x", 0, EngineLoad(), "it coughs"))
    (status,) = broker.ask(ListBackends("list"))[b"client"].backends
    assert (status.state, status.problem, status.in_flight) == ("unwell", "it coughs", 1)
    assert broker.ask(assign("b"), b"b") == {}
    answered = broker.ask(BackendAlive("alive", "x", 0), b"host")
    assert answered[b"b"].backend.backend_id == "x"
    assert broker.listed() == ("ready", 0)


def test_a_drained_host_that_fell_silent_drains_on_when_it_is_back() -> None:
    broker = Broker()
    broker.ask(add(heartbeats=True))
    broker.ask(DrainBackend("drain", "x"))
    broker.tick(LEASE_S)
    assert broker.in_flight() == {}
    broker.ask(add(heartbeats=True))
    assert broker.listed()[0] == "draining"
    broker.ask(add())
    assert broker.listed()[0] == "ready"
