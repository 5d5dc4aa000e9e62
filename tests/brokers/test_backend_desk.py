from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from prorl_zmq.brokers import backend_desk
from prorl_zmq.brokers.backend_desk import BackendDesk
from prorl_zmq.messages import (
    AddBackend,
    Assign,
    Assigned,
    Backend,
    BackendAlive,
    BackendList,
    BackendRefused,
    ChatSettings,
    ClearBackends,
    Done,
    DrainBackend,
    EngineLoad,
    ListBackends,
    OwnerAlive,
    Release,
    RemoveBackend,
    SetWeightVersion,
)

if TYPE_CHECKING:
    from prorl_zmq.brokers.backend_heap import Affinity

LEASE_S = 10.0


class Desk:
    """A desk and what it answered: client name to reply."""

    def __init__(self, affinity: Affinity = "job") -> None:
        self.desk = BackendDesk(LEASE_S, affinity)
        self.now = 0.0

    def ask(self, request: Any, client: bytes = b"client") -> dict[bytes, Any]:
        answers = self.desk.handle([client, b""], request, self.now)
        return {bytes(answer.envelope[0]): answer.reply for answer in answers}

    def tick(self, now: float) -> dict[bytes, Any]:
        self.now = now
        return {bytes(answer.envelope[0]): answer.reply for answer in self.desk.tick(now)}

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
    unreachable: str = "",
) -> Assign:
    return Assign(
        f"assign-{job_id}-{attempt}-{unreachable}" if unreachable else f"assign-{job_id}-{attempt}",
        owner=owner,
        job_id=job_id,
        attempt=attempt,
        wait_s=wait_s,
        group_id=group,
        unreachable=unreachable,
    )


def test_an_assignment_is_answered_with_the_backend() -> None:
    desk = Desk()
    assert desk.ask(add()) == {b"client": Done("add")}
    assert desk.ask(assign()) == {b"client": Assigned("assign-a-1", add().backend)}


def test_a_waiting_assignment_is_served_when_a_backend_is_added() -> None:
    desk = Desk()
    assert desk.ask(assign("a"), b"first") == {}
    assert desk.ask(assign("b"), b"second") == {}
    assert desk.ask(ListBackends("list"))[b"client"].waiting == 2
    answers = desk.ask(add())
    assert {client: type(reply) for client, reply in answers.items()} == {
        b"client": Done,
        b"first": Assigned,
        b"second": Assigned,
    }
    assert desk.in_flight() == {"x": 2}


def test_an_assignment_that_waited_as_long_as_its_job_allows_is_refused() -> None:
    desk = Desk()
    desk.ask(assign(wait_s=5.0))
    assert desk.desk.next_deadline() == 5.0
    assert desk.tick(4.9) == {}
    reply = desk.tick(5.0)[b"client"]
    assert isinstance(reply, BackendRefused)
    assert reply.error.code == "no_backend"
    assert reply.error.fields == {"job_id": "a", "waited_s": 5.0}
    assert desk.desk.next_deadline() is None
    assert desk.ask(add()) == {b"client": Done("add")}


def test_asking_again_does_not_start_the_wait_anew() -> None:
    desk = Desk()
    desk.ask(assign(wait_s=12.0))
    for desk.now in (5.0, 10.0):
        assert desk.ask(assign(wait_s=12.0), b"reconnected") == {}
    assert desk.desk.next_deadline() == 12.0
    assert isinstance(desk.tick(12.0)[b"reconnected"], BackendRefused)


def test_of_two_attempts_that_wait_the_newer_one_is_served() -> None:
    desk = Desk()
    desk.ask(assign(attempt=2), b"new")
    desk.ask(assign(attempt=1), b"old")
    assert list(desk.ask(add())) == [b"client", b"new"]


def test_a_release_withdraws_a_waiting_assignment_unless_it_is_older() -> None:
    desk = Desk()
    desk.ask(assign("a", attempt=2))
    desk.ask(Release("release", "a", 1))
    assert desk.ask(ListBackends("list"))[b"client"].waiting == 1
    desk.ask(Release("release", "a", 2))
    assert desk.ask(ListBackends("list"))[b"client"].waiting == 0


def test_a_draining_backend_lets_jobs_wait() -> None:
    desk = Desk()
    desk.ask(add())
    desk.ask(DrainBackend("drain", "x"))
    assert desk.ask(assign()) == {}


def test_the_assignments_of_a_silent_owner_are_released() -> None:
    desk = Desk()
    desk.ask(add())
    desk.ask(assign("a", owner="dead"))
    desk.ask(assign("b", owner="alive"))
    desk.now = 9.0
    desk.ask(OwnerAlive("alive", "alive", {"b": 1}))
    desk.tick(LEASE_S)
    assert desk.in_flight() == {"x": 1}
    desk.ask(OwnerAlive("alive", "alive", {}))
    assert desk.in_flight() == {"x": 0}


def test_an_owner_that_died_while_it_waited_does_not_keep_what_it_is_given_later() -> None:
    desk = Desk()
    desk.ask(assign("a", owner="dead", wait_s=60.0), b"dead")
    desk.tick(2 * LEASE_S)
    desk.ask(add())
    assert desk.in_flight() == {"x": 1}
    desk.tick(3 * LEASE_S)
    assert desk.in_flight() == {"x": 0}


def test_a_silent_engine_host_is_removed_and_has_to_register_again() -> None:
    desk = Desk()
    desk.ask(add(heartbeats=True))
    desk.ask(add("static"))
    desk.now = 9.0
    assert desk.ask(BackendAlive("alive", "x", 3)) == {b"client": Done("alive")}
    assert desk.ask(ListBackends("list"))[b"client"].backends[0].backend.weight_version == 3
    desk.tick(18.9)
    assert set(desk.in_flight()) == {"x", "static"}
    desk.tick(19.0)
    assert set(desk.in_flight()) == {"static"}
    reply = desk.ask(BackendAlive("alive", "x", 3))[b"client"]
    assert isinstance(reply, BackendRefused)
    assert reply.error.code == "unknown_backend"


def test_a_host_that_was_dismissed_stays_removed_until_it_is_added_again() -> None:
    for dismissal in (RemoveBackend("remove", "x"), ClearBackends("clear")):
        desk = Desk()
        desk.ask(add(heartbeats=True))
        desk.ask(dismissal)
        assert desk.ask(BackendAlive("alive", "x", 1)) == {b"client": Done("alive")}
        assert desk.in_flight() == {}
        desk.ask(add(heartbeats=True))
        desk.ask(BackendAlive("alive", "x", 1))
        assert desk.in_flight() == {"x": 0}


def test_wrong_ids_are_refused_and_change_nothing() -> None:
    desk = Desk()
    desk.ask(add(heartbeats=True))
    for request, code in (
        (add(endpoint="ipc://elsewhere"), "duplicate_backend"),
        (DrainBackend("r", "unknown"), "unknown_backend"),
        (RemoveBackend("r", "unknown"), "unknown_backend"),
        (SetWeightVersion("r", 1, "unknown"), "unknown_backend"),
        (BackendAlive("r", "unknown", 1), "unknown_backend"),
    ):
        before = desk.ask(ListBackends("list"))
        reply = desk.ask(request)[b"client"]
        assert isinstance(reply, BackendRefused)
        assert reply.error.code == code
        assert reply.request_id == request.request_id
        assert desk.ask(ListBackends("list")) == before


def test_a_job_that_holds_an_assignment_gets_the_same_again() -> None:
    desk = Desk()
    desk.ask(add("x"))
    desk.ask(add("y"))
    first = desk.ask(assign())[b"client"]
    assert desk.ask(assign())[b"client"] == first
    assert desk.in_flight() == {"x": 1, "y": 0}


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
    desk = Desk()
    desk.ask(assign(), b"waits")
    answers = desk.ask(AddBackend("add", backend))
    assert list(answers) == [b"client"], "the job that waits is not given it"
    assert answers[b"client"].error.code == code
    assert desk.in_flight() == {}


def test_a_version_that_the_trainer_set_was_undone_by_the_next_heartbeat() -> None:
    desk = Desk()
    desk.ask(add(heartbeats=True, version=1))
    for backend_id, version in (("x", 7), (None, 8)):
        desk.ask(SetWeightVersion("set", version, backend_id))
        desk.ask(BackendAlive("alive", "x", 1))
        assert desk.listed() == ("ready", version)
    desk.ask(BackendAlive("alive", "x", 2))
    assert desk.listed() == ("ready", 2), "the host's own change counts"
    desk.ask(add(version=5))
    desk.ask(BackendAlive("alive", "x", 2))
    assert desk.listed() == ("ready", 2), "added by hand: the host knows better"


def test_an_engine_that_was_restarted_served_its_first_weights_unnoticed(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    desk.ask(add(heartbeats=True))
    desk.ask(BackendAlive("alive", "x", 7))
    desk.ask(add(heartbeats=True))  # killed and started again within the lease
    assert desk.listed() == ("draining", 0)
    assert "backend x came with weights 0 after it had served 7" in caplog.text
    assert desk.ask(assign()) == {}
    desk.ask(BackendAlive("alive", "x", 6))
    assert desk.listed() == ("draining", 6)
    desk.ask(add(heartbeats=True))  # and once more: it is still 7 that it has to reach
    assert isinstance(desk.ask(BackendAlive("alive", "x", 7), b"host")[b"client"], Assigned)
    assert desk.listed() == ("ready", 7)


def test_a_host_that_came_back_after_its_lease_was_not_held_to_its_weights() -> None:
    desk = Desk()
    desk.ask(add(heartbeats=True, version=7))
    desk.tick(LEASE_S)
    assert desk.in_flight() == {}
    desk.ask(add(heartbeats=True, endpoint="tcp://127.0.0.1:5555"))
    assert desk.listed() == ("draining", 0)
    desk.ask(SetWeightVersion("set", 8, "x"))
    desk.ask(BackendAlive("alive", "x", 0))
    assert desk.listed() == ("ready", 8)


@pytest.mark.parametrize("forget", [RemoveBackend("forget", "x"), ClearBackends("forget"), add()])
@pytest.mark.parametrize("lost", [False, True])
def test_a_version_is_forgotten_on_request(forget: Any, lost: bool) -> None:
    desk = Desk()
    desk.ask(add(heartbeats=True, version=7))
    if lost:
        desk.tick(LEASE_S)
    assert isinstance(desk.ask(forget)[b"client"], Done)
    assert desk.ask(BackendAlive("alive", "x", 0)).keys() == {b"client"}
    desk.ask(add(heartbeats=True))
    if isinstance(forget, AddBackend):
        desk.ask(add())  # by hand, for the live host: it is wanted as it is
    assert desk.listed() == ("ready", 0)


def test_not_every_host_that_ever_was_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_desk, "LOST_LIMIT", 2)
    desk = Desk()
    for number, name in enumerate("xyz"):
        desk.ask(add(name, heartbeats=True, version=7))
        desk.tick((number + 1) * LEASE_S)
    for name in "xyz":
        desk.ask(add(name, heartbeats=True))
    assert [desk.listed(name)[0] for name in "xyz"] == ["ready", "draining", "draining"]


def test_an_http_server_is_refused_with_the_command_that_serves_it() -> None:
    reply = Desk().ask(add(endpoint="https://gpu-1:8000"))[b"client"]
    assert "`prorl-engine --engine http --url https://gpu-1:8000`" in reply.error.message


def test_the_jobs_of_a_group_get_one_backend_if_the_topology_says_so() -> None:
    by_group, by_job = Desk("group"), Desk("job")
    for desk in (by_group, by_job):
        for name in "xy":
            desk.ask(add(name))
        for job in "ab":
            desk.ask(assign(job, group="g"))
    assert by_group.in_flight() == {"x": 2, "y": 0}
    assert by_job.in_flight() == {"x": 1, "y": 1}


def test_the_last_load_of_a_host_is_listed() -> None:
    desk = Desk()
    desk.ask(add(heartbeats=True))
    desk.ask(add("static"))
    load = EngineLoad(running=3, tokens_per_s=120.5, prompt_tokens=1000, cached_tokens=900, generated_tokens=70)
    loads = [[status.load for status in desk.ask(ListBackends("list"))[b"client"].backends]]
    desk.ask(BackendAlive("alive", "x", 0, load))
    loads.append([status.load for status in desk.ask(ListBackends("list"))[b"client"].backends])
    assert loads == [[EngineLoad(), None], [load, None]]


@pytest.mark.parametrize("heard", [BackendAlive("heard", "x", 0), add(heartbeats=True)])
def test_a_suspect_that_is_heard_of_is_ready_again(heard: Any) -> None:
    desk = Desk()
    desk.ask(add("x", heartbeats=True))
    desk.ask(add("y", heartbeats=True))
    desk.ask(assign())
    moved = desk.ask(assign(unreachable="x"))[b"client"]
    assert isinstance(moved, Assigned)
    assert moved.backend.backend_id == "y"
    assert desk.listed("x") == ("suspect", 0)
    desk.ask(heard)
    assert desk.listed("x") == ("ready", 0)


def test_a_suspect_without_heartbeats_is_tried_again_a_lease_after_the_last_job_that_could_not_reach_it() -> None:
    desk = Desk()
    desk.ask(add("x"))
    desk.ask(assign("a"))
    desk.ask(assign("b"))
    desk.ask(add("y"))
    desk.ask(assign("a", unreachable="x"))
    desk.now = 5.0
    desk.ask(assign("b", unreachable="x"))
    desk.ask(OwnerAlive("alive", "run-1", {"a": 1, "b": 1}))
    desk.tick(14.9)
    assert desk.listed("x")[0] == "suspect"
    desk.tick(15.0)
    assert desk.listed("x")[0] == "ready"


@pytest.mark.parametrize("sent", [1, 2])
def test_a_backend_that_came_back_is_not_blamed_by_a_job_that_waits(sent: int) -> None:
    desk = Desk()
    desk.ask(add("x"))
    desk.ask(assign())
    desk.ask(DrainBackend("drain", "x"))
    moving = assign(unreachable="x")
    for _ in range(sent):
        assert desk.ask(moving) == {}
    assert desk.in_flight() == {"x": 0}
    answers = desk.ask(add("x"), b"adds")
    assert {client: type(reply) for client, reply in answers.items()} == {b"adds": Done, b"client": Assigned}
    assert desk.listed("x")[0] == "ready"
    assert isinstance(desk.ask(moving)[b"client"], Assigned), "the answer was lost"
    assert desk.listed("x")[0] == "ready"
    desk.ask(RemoveBackend("remove", "x"))
    desk.tick(LEASE_S)


def test_a_job_whose_backend_was_removed_gets_another() -> None:
    desk = Desk()
    desk.ask(add("x"))
    desk.ask(assign())
    desk.ask(add("y"))
    desk.ask(RemoveBackend("remove", "x"))
    moved = desk.ask(assign(unreachable="x"))[b"client"]
    assert isinstance(moved, Assigned)
    assert moved.backend.backend_id == "y"


def test_an_unwell_backend_is_listed_with_its_problem_and_gets_no_jobs() -> None:
    desk = Desk()
    desk.ask(add(heartbeats=True))
    assert desk.ask(assign("held"))[b"client"].backend.backend_id == "x"
    desk.ask(BackendAlive("alive", "x", 0, EngineLoad(), "it coughs"))
    (status,) = desk.ask(ListBackends("list"))[b"client"].backends
    assert (status.state, status.problem, status.in_flight) == ("unwell", "it coughs", 1)
    assert desk.ask(assign("b"), b"b") == {}
    answered = desk.ask(BackendAlive("alive", "x", 0), b"host")
    assert answered[b"b"].backend.backend_id == "x"
    assert desk.listed() == ("ready", 0)


def test_a_drained_host_that_fell_silent_drains_on_when_it_is_back() -> None:
    desk = Desk()
    desk.ask(add(heartbeats=True))
    desk.ask(DrainBackend("drain", "x"))
    desk.tick(LEASE_S)
    assert desk.in_flight() == {}
    desk.ask(add(heartbeats=True))
    assert desk.listed()[0] == "draining"
    desk.ask(add())
    assert desk.listed()[0] == "ready"
