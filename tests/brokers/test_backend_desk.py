from __future__ import annotations

from typing import Any

from prorl_zmq.brokers.backend_desk import BackendDesk
from prorl_zmq.messages import (
    AddBackend,
    Assign,
    Assigned,
    Backend,
    BackendAlive,
    BackendList,
    BackendRefused,
    ClearBackends,
    Done,
    DrainBackend,
    ListBackends,
    OwnerAlive,
    Release,
    RemoveBackend,
    SetWeightVersion,
)

LEASE_S = 10.0


class Desk:
    """A desk and what it answered: client name to reply."""

    def __init__(self) -> None:
        self.desk = BackendDesk(LEASE_S)
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


def add(name: str = "x", *, heartbeats: bool = False, endpoint: str = "") -> AddBackend:
    return AddBackend("add", Backend(backend_id=name, endpoint=endpoint or f"ipc://{name}"), heartbeats)


def assign(job_id: str = "a", attempt: int = 1, owner: str = "run-1", wait_s: float = 60.0) -> Assign:
    return Assign(f"assign-{job_id}-{attempt}", owner=owner, job_id=job_id, attempt=attempt, wait_s=wait_s)


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
