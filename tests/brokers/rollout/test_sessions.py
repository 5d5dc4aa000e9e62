"""Sessions at the front door: nameless ones end with their client, an operator lists them and ends one."""

from __future__ import annotations

from typing import Any

import pytest

from prorl_zmq.brokers.journal.journal import MemoryJournal
from prorl_zmq.brokers.rollout.job_record import JobStatus
from prorl_zmq.brokers.rollout.sessions import ENDED_LIMIT, JOBS_PER_TICK
from prorl_zmq.errors import UnknownSession
from prorl_zmq.security.rights import Sender
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.base import SESSIONS_LIMIT, Done, KeyRole, new_id
from prorl_zmq.wire.messages.batches import BatchOptions, Feed, NextGroup, OpenBatch, SessionAlive
from prorl_zmq.wire.messages.front_door import (
    Accepted,
    EndSession,
    Hello,
    ListSessions,
    SessionList,
    SessionRow,
    SessionStopped,
    Submit,
)
from prorl_zmq.wire.messages.jobs import Phase

from .test_front_door import MATH, Door, collect, ids, job

LEASE_S = 600.0


def submit(door: Door, *job_ids: str, session: str = "s", lease_s: float | None = LEASE_S) -> Any:
    return door.ask(Submit(new_id(), session, lease_s), *(codec.encode(job(job_id)) for job_id in job_ids))


def rows(door: Door) -> dict[str, SessionRow]:
    reply = door.ask(ListSessions("list"))
    assert isinstance(reply, SessionList)
    return {row.session: row for row in reply.sessions}


def wait_until(door: Door, now: float) -> None:
    """What the broker does with time."""
    door.now = now
    door.door.sessions.tick(now)
    door.perform([])
    door.writes.settle(now)


def held(door: Door) -> tuple[int, int]:
    return sum(door.table.count(JobStatus.QUEUED).values()), len(door.results)


def test_a_nameless_session_ends_when_its_client_was_silent_for_its_lease() -> None:
    door = Door()
    submit(door, "a", "b")
    door.end("c")
    wait_until(door, LEASE_S - 1.0)
    assert held(door) == (2, 1)
    wait_until(door, LEASE_S)
    assert held(door) == (0, 0)
    assert rows(door) == {}
    assert not any((door.quota._jobs, door.quota._job_bytes)), "it frees what it took"


@pytest.mark.parametrize("request_of_it", [SessionAlive("alive", "s"), collect(max_results=0)])
def test_each_request_of_its_client_renews_the_lease(request_of_it: Any) -> None:
    door = Door()
    submit(door, "a")
    door.now = LEASE_S - 1.0
    door.ask(request_of_it)
    wait_until(door, 2 * LEASE_S - 2.0)
    assert held(door) == (1, 0)
    assert rows(door)["s"].silent_s == LEASE_S - 1.0
    wait_until(door, 2 * LEASE_S)
    assert held(door) == (0, 0)


def test_a_named_session_lasts_and_so_does_one_that_is_taken_up_by_its_name() -> None:
    door = Door()
    submit(door, "a", session="named", lease_s=None)
    submit(door, "b")
    submit(door, "c", lease_s=None)
    wait_until(door, 10 * LEASE_S)
    assert held(door) == (3, 0)
    assert [row.lease_s for row in rows(door).values()] == [None, None]


def test_a_client_that_comes_back_too_late_learns_why_its_jobs_are_gone() -> None:
    door = Door()
    submit(door, "a")
    wait_until(door, LEASE_S)
    assert isinstance(door.ask(SessionAlive("alive", "s")), Done), "nobody sees the answer to a renewal"
    reply = door.ask(collect())
    assert door.refusal(reply) == ("session_ended", {"session": "s"})
    assert "its client was silent for 600 s" in reply.error.message
    assert isinstance(submit(door, "a"), Accepted), "it is said once"


def test_a_restarted_broker_begins_the_lease_anew() -> None:
    journal = MemoryJournal()
    submit(Door(journal=journal), "a")
    recovered = journal.recover()
    door = Door()
    left = door.door.sessions.restore({**recovered.notes, "lease:bad": b"\xc1", "weights": b"\x01"}, 0.0)
    assert left == {"weights": b"\x01"}
    door.table.restore(recovered.unfinished, recovered.last_sequence, 0.0)
    for state in recovered.unfinished:
        door.quota.submitted(state.holder, state.job_id, len(state.packed))
    wait_until(door, LEASE_S - 1.0)
    assert held(door) == (1, 0)
    wait_until(door, LEASE_S)
    assert held(door) == (0, 0)


def test_the_journal_keeps_no_lease_of_a_session_that_has_ended() -> None:
    door = Door()
    submit(door, "a")
    assert list(door.journal.recover().notes) == ["lease:s"]
    wait_until(door, LEASE_S)
    assert door.journal.recover().notes == {}


def test_time_that_stood_still_does_not_count() -> None:
    door = Door()
    submit(door, "a")
    door.door.sessions.restart_leases(LEASE_S)
    wait_until(door, LEASE_S)
    assert held(door) == (1, 0)


def test_an_operator_lists_sessions_and_ends_one_with_its_batches() -> None:
    door = Door()
    submit(door, "a", "b", session="mine", lease_s=None)
    submit(door, "c", session="other", lease_s=None)
    door.end("d", session="mine")
    options = BatchOptions(target_groups=1, group_size=2)
    door.ask(OpenBatch("open", "mine", "batch", options))
    door.ask(Feed("feed", "mine", "batch", 0), codec.encode(job("prompt")))
    door.batches.launch(0.0)
    door.perform([])
    assert rows(door) == {
        "mine": SessionRow("mine", queued=3, results=1, batches=1),
        "other": SessionRow("other", queued=1),
    }
    assert door.ask(EndSession("end", "mine")) == SessionStopped("end", jobs=2, results=1, batches=1)
    wait_until(door, 1.0)
    assert rows(door) == {"other": SessionRow("other", queued=1)}
    assert held(door) == (1, 0)
    code, _ = door.refusal(door.ask(collect().__class__("collect", "mine", "me")))
    assert code == "session_ended"
    submit(door, "e", session="mine", lease_s=None)
    wait_until(door, 2.0)
    assert rows(door)["mine"].queued == 1, "its name is free again"


def test_a_session_that_was_ended_leaves_no_result_behind() -> None:
    door = Door()
    submit(door, "a", "b")
    door.ask(EndSession("end", "s"))
    assert held(door) == (0, 0), "at once: no client is given what was cancelled"
    recovered = door.journal.recover()
    assert (recovered.unfinished, recovered.uncollected, recovered.notes) == ([], [], {}), "nor after a restart"


def test_a_new_client_may_use_the_name_of_a_session_that_was_ended() -> None:
    door = Door()
    submit(door, "a", session="mine", lease_s=None)
    door.ask(EndSession("end", "mine"))
    door.ask(Hello("hello", session="mine"))
    assert isinstance(submit(door, "b", session="mine", lease_s=None), Accepted)


def test_clients_that_wait_learn_at_once_that_their_session_was_ended() -> None:
    door = Door()
    submit(door, "a")
    door.ask(OpenBatch("open", "s", "batch", BatchOptions(target_groups=1, group_size=2)))
    door.send(codec.encode(collect(wait_s=60.0)), client=b"collecting")
    door.send(codec.encode(NextGroup("next", "s", "batch", "me", wait_s=60.0)), client=b"training")
    assert not door.replies
    door.ask(EndSession("end", "s"))
    for client in (b"collecting", b"training"):
        assert door.refusal(door.reply(client)) == ("session_ended", {"session": "s"})
    assert isinstance(submit(door, "b"), Accepted), "it is said once"


def test_many_leases_that_expire_at_once_do_not_hold_up_the_broker() -> None:
    jobs = JOBS_PER_TICK // 2 + 1
    door = Door(max_jobs=4 * JOBS_PER_TICK)
    for session in ("one", "two", "three"):
        submit(door, *(f"{session}-{number}" for number in range(jobs)), session=session)
    wait_until(door, LEASE_S)
    assert held(door) == (jobs, 0)
    wait_until(door, LEASE_S + 1.0)
    assert held(door) == (0, 0)


def test_a_session_that_holds_nothing_is_not_ended() -> None:
    door = Door()
    code, fields = door.refusal(door.ask(EndSession("end", "typo")))
    assert (code, fields) == (UnknownSession.code, {"session": "typo"})
    assert ids(door.ask(collect())) == []


def test_a_trainers_key_may_not_end_sessions() -> None:
    door = Door()
    for request in (ListSessions("list"), EndSession("end", "s")):
        door.send(codec.encode(request), sender=Sender(KeyRole.TRAINER, "t", "key"))
        code, _ = door.refusal(door.reply())
        assert code == "not_allowed"


def test_what_is_remembered_and_listed_has_a_limit() -> None:
    door = Door(tasks=(MATH,), max_jobs=2 * SESSIONS_LIMIT)
    for number in range(SESSIONS_LIMIT + 100):
        submit(door, f"job-{number}", session=f"s-{number}")
    reply = door.ask(ListSessions("list"))
    assert (len(reply.sessions), reply.left_out) == (SESSIONS_LIMIT, 100)
    wait_until(door, LEASE_S)
    assert held(door) == (0, 0)
    assert len(door.door.sessions._ended) <= ENDED_LIMIT
    assert door.table.count(JobStatus.QUEUED)[Phase.INIT] == 0
