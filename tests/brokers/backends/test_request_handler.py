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
    GenerationFailed,
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


def failed(name: str = "x", job_id: str = "a") -> GenerationFailed:
    return GenerationFailed("failed", job_id, name, "it coughs")


def test_a_backend_that_failed_is_listed_with_its_problem_and_gets_one_job_at_a_time_at_growing_intervals() -> None:
    broker = Broker()
    broker.ask(add("x"))
    broker.ask(add("y"))
    assert broker.ask(assign("a"))[b"client"].backend.backend_id == "x"
    broker.ask(failed())
    assert broker.ask(assign("a", leaving="x"))[b"client"].backend.backend_id == "y"
    tried = []
    for tenth in range(1, 1300):
        broker.now = tenth / 10
        broker.tick(broker.now)
        given = broker.ask(assign(f"job-{tenth}"))[b"client"].backend.backend_id
        if given == "x":
            tried.append(broker.now)
            broker.ask(failed(job_id=f"job-{tenth}"))
            assert broker.ask(assign(f"job-{tenth}", leaving="x"))[b"client"].backend.backend_id == "y"
        status = broker.ask(ListBackends("list"))[b"client"].backends[0]
        assert (status.state, status.problem) == ("probation", "it coughs")
    assert tried == [1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 123.0]
    assert status.next_try_s == pytest.approx(183.0 - broker.now)


def test_a_job_that_is_served_ends_the_probation() -> None:
    for served in (
        OwnerAlive("alive", "run-1", {"b": HeldAssignment(1, "x", 1)}),
        Release("release", "b", 1, 1),
    ):
        broker = Broker()
        broker.ask(add("x"))
        broker.ask(failed())
        broker.tick(1.0)
        assert isinstance(broker.ask(assign("b"))[b"client"], Assigned)
        assert broker.ask(assign("c"), b"c") == {}
        for silent in (OwnerAlive("alive", "run-1", {"b": HeldAssignment(1, "x")}), Release("release", "b", 0, 1)):
            assert list(broker.ask(silent)) == [b"client"]
        assert isinstance(broker.ask(served)[b"c"], Assigned)
        assert broker.listed()[0] == "ready"
        broker.ask(failed())
        broker.now = 2.0
        assert isinstance(broker.ask(assign("d"))[b"client"], Assigned), "the pause is the first one again"


def test_what_may_have_been_served_before_the_failure_does_not_end_a_probation() -> None:
    broker = Broker()
    broker.ask(add("x"))
    broker.ask(assign("held"))
    broker.ask(failed())
    for broker.now, served, state in ((1.9, 1, "probation"), (2.5, 1, "probation"), (2.6, 2, "ready")):
        broker.ask(OwnerAlive("alive", "run-1", {"held": HeldAssignment(1, "x", served)}))
        assert broker.listed()[0] == state


def test_many_failures_at_once_are_one() -> None:
    broker = Broker()
    broker.ask(add("x"))
    for number in range(64):
        broker.ask(failed(job_id=f"job-{number}"))
    broker.now = 1.0
    assert isinstance(broker.ask(assign("a"))[b"client"], Assigned)


@pytest.mark.parametrize("again", [add(), add(heartbeats=True)])
def test_a_backend_that_is_added_again_is_ready(again: Any) -> None:
    broker = Broker()
    broker.ask(add(heartbeats=True))
    broker.ask(failed())
    assert broker.ask(assign(), b"waits") == {}
    broker.ask(BackendAlive("alive", "x", 0))
    assert broker.listed()[0] == "probation", "its host lives, but that says little"
    assert isinstance(broker.ask(again)[b"waits"], Assigned)
    assert broker.listed()[0] == "ready"


def test_jobs_wait_while_all_are_on_probation_and_are_the_ones_that_try_them() -> None:
    broker = Broker()
    broker.ask(add("x"))
    broker.ask(assign("a"))
    broker.ask(failed())
    assert broker.ask(assign("a", leaving="x"), b"a") == {}
    assert broker.ask(assign("b"), b"b") == {}
    assert broker.handler.next_deadline() == 1.0
    assert [type(reply) for reply in broker.tick(1.0).values()] == [Assigned]
    assert broker.handler.next_deadline() == 3.0
    assert list(broker.tick(3.0)) == [b"b"]
    assert broker.handler.next_deadline() is None


def test_a_wait_ends_with_a_backend_that_may_work_rather_than_none() -> None:
    broker = Broker()
    broker.ask(add("x"))
    broker.ask(failed())
    broker.ask(assign("a", wait_s=0.5), b"a")
    assert isinstance(broker.tick(0.5)[b"a"], Assigned)
    broker.ask(DrainBackend("drain", "x"))
    broker.ask(assign("b", wait_s=0.5), b"b")
    assert broker.tick(1.0)[b"b"].error.code == "no_backend"


def test_the_failure_of_what_is_gone_changes_nothing() -> None:
    broker = Broker()
    assert broker.ask(failed()) == {b"client": Done("failed")}
    broker.ask(add("x"))
    broker.ask(failed())
    broker.ask(RemoveBackend("remove", "x"))
    broker.tick(5.0)
    broker.ask(add("x"))
    assert broker.listed()[0] == "ready"


@pytest.mark.parametrize("sent", [1, 2])
def test_a_job_that_waits_is_given_its_old_backend_once_that_is_back(sent: int) -> None:
    broker = Broker()
    broker.ask(add("x"))
    broker.ask(assign())
    broker.ask(DrainBackend("drain", "x"))
    moving = assign(leaving="x")
    for _ in range(sent):
        assert broker.ask(moving) == {}
    assert broker.in_flight() == {"x": 0}
    answers = broker.ask(add("x"), b"adds")
    assert {client: type(reply) for client, reply in answers.items()} == {b"adds": Done, b"client": Assigned}
    assert isinstance(broker.ask(moving)[b"client"], Assigned), "the answer was lost"
    assert broker.in_flight() == {"x": 1}


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


# Updates of weights -------------------------------------------------------------------------------------------------


def begun(*names: str) -> Broker:
    """A broker whose backends serve version 1 while version 2 is on its way."""
    broker = Broker()
    for name in names:
        broker.ask(add(name, heartbeats=True, version=1))
    assert broker.ask(WeightUpdate("begin", "begin", 2, limit_s=100.0)) == {b"client": Done("begin")}
    return broker


def refusal(answers: dict[bytes, Any]) -> tuple[str, str]:
    reply = answers[b"client"]
    assert isinstance(reply, Refused)
    return reply.error.code, reply.error.message


def test_jobs_wait_while_weights_are_on_their_way_for_the_backend_that_has_them_first() -> None:
    broker = begun("x", "y")
    assert broker.ask(assign("a"), b"first") == {}
    assert broker.listed("x") == ("updating", 1)
    given = broker.ask(BackendAlive("alive", "y", 2))[b"first"]
    assert given.backend.backend_id == "y"
    assert broker.ask(assign("b"), b"second")[b"second"].backend.backend_id == "y"
    broker.ask(WeightUpdate("set", "set", 2, backend_id="x"))
    assert broker.ask(assign("c"), b"third")[b"third"].backend.backend_id == "x"
    assert broker.ask(WeightUpdate("end", "end", 2)) == {b"client": Done("end")}
    assert broker.ask(WeightUpdate("end", "end", 2)) == {b"client": Done("end")}
    assert (broker.listed("x"), broker.listed("y")) == (("ready", 2), ("ready", 2))


def test_a_job_keeps_the_backend_that_it_has_while_weights_are_on_their_way() -> None:
    broker = Broker()
    broker.ask(add("x", version=1))
    broker.ask(assign("a"), b"first")
    broker.ask(WeightUpdate("begin", "begin", 2, limit_s=100.0))
    assert broker.ask(assign("a"), b"first")[b"first"].backend.backend_id == "x"
    assert broker.ask(assign("a", attempt=2), b"first") == {}, "a new attempt is a new assignment"


def test_a_group_goes_back_to_its_backend_when_the_weights_are_there() -> None:
    broker = Broker("group")
    for name in "xyz":
        broker.ask(add(name, version=1))
    at = broker.ask(assign("a", group="g"))[b"client"].backend.backend_id
    broker.ask(WeightUpdate("begin", "begin", 2, limit_s=100.0))
    broker.ask(assign("b", group="g"), b"second")
    for name in sorted("xyz", key=lambda name: name != at):
        answers = broker.ask(WeightUpdate("set", "set", 2, backend_id=name))
        if b"second" in answers:
            assert answers[b"second"].backend.backend_id == at


def test_a_backend_that_joins_with_older_weights_gets_no_jobs_until_it_has_the_newer_ones() -> None:
    broker = begun("x")
    broker.ask(add("y", heartbeats=True, version=1))
    assert broker.listed("y") == ("updating", 1)
    broker.late = {"y"}
    broker.ask(WeightUpdate("end", "end", 2))
    broker.ask(add("z", version=1))
    broker.ask(add("new", heartbeats=True, version=2))
    assert [broker.listed(name) for name in ("x", "y", "z", "new")] == [
        ("ready", 2),
        ("behind", 1),
        ("behind", 1),
        ("ready", 2),
    ]
    broker.ask(BackendAlive("alive", "y", 2))
    assert broker.listed("y") == ("ready", 2)
    broker.ask(WeightUpdate("set", "set", 1))
    assert broker.listed("z") == ("ready", 1), "the trainer went back to these"


def test_a_trainer_that_goes_back_to_older_weights_updates_all() -> None:
    broker = begun("x", "y")
    for name in ("x", "y"):
        broker.ask(WeightUpdate("set", "set", 2, backend_id=name))
    broker.ask(WeightUpdate("end", "end", 2))
    broker.ask(WeightUpdate("begin", "begin", 1, limit_s=100.0))
    assert broker.listed("x") == ("updating", 2)
    broker.late = {"y"}
    broker.ask(WeightUpdate("end", "end", 1))
    assert (broker.listed("x"), broker.listed("y")) == (("ready", 1), ("behind", 2))


def test_an_update_whose_end_does_not_come_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    broker = Broker()
    broker.ask(add("x", version=1))
    broker.ask(WeightUpdate("begin", "begin", 2, limit_s=30.0))
    broker.ask(assign("a", wait_s=60.0), b"first")
    broker.tick(20.0)
    broker.ask(WeightUpdate("again", "begin", 2, limit_s=30.0))
    assert broker.handler.next_deadline() == 50.0
    assert broker.tick(49.0) == {}
    assert broker.tick(50.0)[b"first"].backend.backend_id == "x"
    assert "did not end within 30 s and was given up" in caplog.text
    (status,) = broker.ask(ListBackends("list"))[b"client"].backends
    assert (status.state, status.backend.weight_version) == ("ready", 1)
    assert "update to weights 2 did not end" in status.problem
    broker.late = {"x"}
    assert refusal(broker.ask(WeightUpdate("end", "end", 2)))[0] == "update_not_begun"
    broker.late = set()
    broker.ask(WeightUpdate("set", "set", 2, backend_id="x"))
    (status,) = broker.ask(ListBackends("list"))[b"client"].backends
    assert status.problem == ""
    assert broker.ask(WeightUpdate("late", "end", 2)) == {b"client": Done("late")}, "it only came late"


def test_a_job_waits_for_new_weights_no_longer_than_it_allows() -> None:
    broker = begun("x")
    broker.ask(assign("a", wait_s=5.0), b"first")
    error = broker.tick(5.0)[b"first"].error
    assert error.code == "no_backend"
    assert "weights 2 are on their way" in error.message


def test_one_update_at_a_time_and_each_has_its_end() -> None:
    broker = begun("x")
    assert broker.ask(WeightUpdate("again", "begin", 2, limit_s=100.0)) == {b"client": Done("again")}
    for other in (
        WeightUpdate("r", "begin", 3, limit_s=100.0),
        WeightUpdate("r", "end", 3),
        WeightUpdate("r", "cancel", 3),
        WeightUpdate("r", "set", 3, backend_id="x"),
        WeightUpdate("r", "set", 2),
    ):
        code, message = refusal(broker.ask(other))
        assert code == "update_in_progress"
        assert "an update to weights 2 was begun and has not ended" in message
    assert broker.ask(WeightUpdate("cancel", "cancel", 2)) == {b"client": Done("cancel")}
    assert broker.listed("x") == ("ready", 1)
    assert broker.ask(WeightUpdate("cancel", "cancel", 2)) == {b"client": Done("cancel")}
    broker.late = {"x"}
    code, message = refusal(broker.ask(WeightUpdate("end", "end", 2)))
    assert code == "update_not_begun"
    assert "no update to weights 2 was begun" in message
