"""What a stage process reports of its assignments, to a broker that forgets, and over a wire that loses and delays."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.brokers.backends.request_handler import BackendRequestHandler
from prorl_zmq.stages.held_assignments import HeldAssignments
from prorl_zmq.wire import codec
from prorl_zmq.wire.change_reports import FULL_EVERY
from prorl_zmq.wire.messages.backends import (
    AddBackend,
    Assign,
    Assigned,
    Backend,
    HeldAssignment,
    NameAll,
    OwnerAlive,
    Release,
    RemoveBackend,
)
from prorl_zmq.wire.messages.base import Done

LEASE_S = 10.0
OWNER = "run-1"
ENVELOPE = (b"client", b"")
WIRE = st.sampled_from(["arrives", "lost", "late"])
JOBS = st.sampled_from(["a", "b", "c"])
STEPS = st.lists(
    st.tuples(st.sampled_from(["assign", "leave", "serve", "release", "alive", "restart", "silence"]), JOBS, WIRE),
    max_size=30,
)


class Pair:
    """A stage process's view and a broker's, with a wire between them on which messages overtake others."""

    def __init__(self) -> None:
        self.held = HeldAssignments(OWNER)
        self.attempts: dict[str, int] = {}
        self.late: list[Any] = []
        self.now = 0.0
        self.sent = 0
        self.restart()

    def restart(self) -> None:
        self.handler = BackendRequestHandler(LEASE_S)
        for name in ("x", "y"):
            self.reply(AddBackend("add", Backend(backend_id=name, endpoint=f"ipc://{name}")))

    def reply(self, request: Any) -> Any:
        answers = self.handler.handle(ENVELOPE, request, self.now)
        return answers[0].reply if answers else None

    def send(self, request: Any, wire: str = "arrives") -> None:
        self.sent += 1
        if wire == "late":
            self.late.append(request)
        if wire != "arrives":
            return
        reply = self.reply(request)
        if isinstance(reply, Assigned):
            self.held.assigned(request.job_id, request.attempt, reply.backend.backend_id)
        if isinstance(reply, NameAll):
            self.send(self.held.report(full=True))

    def assign(self, job_id: str, wire: str = "arrives", leaving: str = "") -> None:
        attempt = self.attempts[job_id] = self.attempts.get(job_id, 0) + (not leaving)
        self.held.wait(job_id, attempt)
        self.sent += 1
        request = Assign(
            f"assign-{self.sent}", owner=OWNER, job_id=job_id, attempt=attempt, wait_s=60.0, leaving=leaving
        )
        self.send(request, wire)

    def release(self, job_id: str, wire: str = "arrives") -> None:
        held = self.held.release(job_id, self.attempts.get(job_id, 0))
        if held is not None:
            self.send(Release("release", job_id, held.attempt, held.served), wire)

    def broker_has(self) -> dict[str, tuple[int, str]]:
        found = {job_id: self.handler.heap.holds(job_id) for job_id in "abc"}
        return {job_id: (one.attempt, one.backend_id) for job_id, one in found.items() if one is not None}

    def stage_has(self) -> dict[str, tuple[int, str]]:
        everything = self.held.report(full=True).jobs
        return {job_id: (one.attempt, one.backend_id) for job_id, one in everything.items() if one.backend_id}


@given(STEPS)
def test_one_heartbeat_that_arrives_puts_right_what_was_lost_late_or_forgotten(
    steps: list[tuple[str, str, str]],
) -> None:
    pair = Pair()
    for what, job_id, wire in steps:
        pair.now += 1.0
        if what == "assign":
            pair.assign(job_id, wire)
        elif what == "leave" and job_id in pair.held.backends():
            pair.assign(job_id, wire, leaving=pair.held.backends()[job_id])
        elif what == "serve" and job_id in pair.held.backends():
            pair.held.note_served(job_id, pair.attempts.get(job_id, 0))
        elif what == "release":
            pair.release(job_id, wire)
        elif what == "alive":
            pair.send(pair.held.report(), wire)
        elif what == "restart":
            pair.restart()
        elif what == "silence":
            pair.now += 2 * LEASE_S
            pair.handler.tick(pair.now)
    for request in pair.late:
        pair.reply(request)
    waits = pair.held.report(full=True).jobs.keys() - pair.held.backends().keys()
    for job_id in waits:  # it asks again until it is answered
        request = Assign("again", owner=OWNER, job_id=job_id, attempt=pair.attempts[job_id], wait_s=60.0)
        pair.send(request)
    pair.send(pair.held.report())
    assert pair.broker_has() == pair.stage_has()
    assert pair.stage_has().keys() == pair.held.report(full=True).jobs.keys()


def test_a_heartbeat_names_what_changed_and_is_small() -> None:
    pair = Pair()
    for number in range(64):
        pair.held.wait(f"job-{number}", 1)
        pair.held.assigned(f"job-{number}", 1, "x")
    first = pair.held.report()
    assert (len(first.jobs), first.digest) == (64, None)
    pair.send(first)
    pair.held.note_served("job-7", 1)
    pair.held.note_served("job-8", 1)
    pair.held.release("job-8", 1)
    pair.send(Release("release", "job-8", 1, 1))
    news = pair.held.report()
    assert news.jobs == {"job-7": HeldAssignment(1, "x", 1)}
    assert pair.reply(news) == Done(news.request_id)
    assert pair.held.report().jobs == {}
    assert len(codec.encode(pair.held.report())) < 110 < 800 < len(codec.encode(first))


def test_the_end_of_an_older_attempt_leaves_the_newer_one_its_backend() -> None:
    pair = Pair()
    pair.assign("a")
    pair.assign("a")
    assert pair.held.release("a", 1) is None
    assert pair.stage_has() == pair.broker_has() == {"a": (2, pair.held.backends()["a"])}


def test_everything_is_said_now_and_then() -> None:
    held = HeldAssignments(OWNER)
    fulls = [held.report().digest is None for _ in range(2 * (FULL_EVERY + 1))]
    assert [number for number, full in enumerate(fulls) if full] == [0, FULL_EVERY + 1]


def test_a_broker_with_another_view_asks_and_releases_nothing_meanwhile() -> None:
    pair = Pair()
    pair.assign("a")
    pair.assign("b")
    pair.send(pair.held.report())
    stale = msgspec.structs.replace(pair.held.report(), jobs={}, digest=1)
    assert pair.reply(stale) == NameAll(stale.request_id)
    assert pair.broker_has() == pair.stage_has() != {}
    pair.now += 0.9 * LEASE_S
    pair.reply(stale)  # it lives, whatever it says
    pair.handler.tick(pair.now + 0.9 * LEASE_S)
    assert pair.broker_has() == pair.stage_has() != {}


def test_a_backend_that_is_gone_makes_it_name_all_until_its_jobs_have_others() -> None:
    pair = Pair()
    pair.assign("a")
    pair.send(pair.held.report())
    gone = pair.held.backends()["a"]
    pair.reply(RemoveBackend("remove", gone))
    assert isinstance(pair.reply(pair.held.report()), NameAll)
    assert isinstance(pair.reply(OwnerAlive("all", OWNER, pair.held.report(full=True).jobs)), Done)
    assert pair.broker_has() == {}
    pair.assign("a", leaving=gone)
    assert isinstance(pair.reply(pair.held.report()), Done)
    assert pair.broker_has() == pair.stage_has() != {}


def test_a_backend_that_served_before_it_was_moved_is_recorded_all_the_same() -> None:
    """Another conversation of the job is served while the job moves."""
    held = HeldAssignments(OWNER)
    held.wait("a", 1)
    held.note_served("a", 1)
    held.assigned("a", 1, "b")
    assert held.backends() == {"a": "b"}
    held.assigned("a", 2, "c")
    assert held.backends() == {"a": "b"}


def test_a_jobs_backend_is_that_of_its_own_model() -> None:
    held = HeldAssignments(OWNER)
    for holder, backend_id, own in (("a/b", "b1", True), ("a", "p1", False), ("c", "p2", True)):
        held.wait(holder, 1, own=own)
        held.assigned(holder, 1, backend_id)
    assert held.backends() == {"a": "b1", "c": "p2"}
    held.release("a", 1)
    held.wait("a", 2)
    held.assigned("a", 2, "p1")
    held.release("a/b", 1)
    assert held.backends() == {"a": "p1", "c": "p2"}, "run again, by the policy"
