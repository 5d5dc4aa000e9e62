"""Engines that are starting: no wait for a backend runs out meanwhile."""

from __future__ import annotations

from prorl_zmq.brokers.backends.request_handler import BackendRequestHandler
from prorl_zmq.wire.messages.backends import (
    AddBackend,
    Assign,
    Assigned,
    Backend,
    BackendList,
    EngineStart,
    ListBackends,
    ReportStarts,
    WaitLonger,
)
from prorl_zmq.wire.messages.base import Done, Refused

LEASE_S = 10.0
ENVELOPE = [b"c", b""]
ASSIGN = Assign("assign", owner="run", job_id="a", attempt=1, wait_s=5.0)


def report(handler: BackendRequestHandler, now: float, *engines: EngineStart, owner: str = "serve") -> None:
    assert handler.handle(ENVELOPE, ReportStarts("starts", owner, engines), now) == [(ENVELOPE, Done("starts"))]


def starting(name: str = "x") -> EngineStart:
    return EngineStart(name, "starting")


def failed(name: str = "x") -> EngineStart:
    return EngineStart(name, "failed", "too little memory")


def listed(handler: BackendRequestHandler, now: float) -> tuple[EngineStart, ...]:
    ((_, reply),) = handler.handle(ENVELOPE, ListBackends("list"), now)
    assert isinstance(reply, BackendList)
    return reply.starts


def test_a_wait_begins_when_no_backend_is_starting() -> None:
    handler = BackendRequestHandler(LEASE_S)
    report(handler, 0.0, starting())
    assert handler.handle(ENVELOPE, ASSIGN, 1.0) == [(ENVELOPE, WaitLonger("assign"))]
    assert handler.next_deadline() is None
    for now in range(2, 60):
        report(handler, float(now), starting())
        assert handler.tick(float(now)) == []
    report(handler, 60.0, failed())
    assert listed(handler, 60.0) == (failed(),)
    assert handler.handle(ENVELOPE, ASSIGN, 61.0) == []
    assert handler.next_deadline() == 65.0
    assert handler.tick(64.9) == []
    ((_, reply),) = handler.tick(65.0)
    assert isinstance(reply, Refused)
    assert reply.error.code == "no_backend"
    assert "engine x failed to start: too little memory" in reply.error.message


def test_an_engine_that_registers_is_not_starting_any_more() -> None:
    handler = BackendRequestHandler(LEASE_S)
    report(handler, 0.0, starting("x"))
    assert handler.handle(ENVELOPE, ASSIGN, 1.0) == [(ENVELOPE, WaitLonger("assign"))]
    answers = handler.handle([b"x", b""], AddBackend("add", Backend(backend_id="x", endpoint="ipc://x")), 2.0)
    assert [type(answer.reply) for answer in answers] == [Done, Assigned]
    report(handler, 3.0, starting("x"))
    assert listed(handler, 3.0) == (), "the report is older than the registration"


def test_reports_replace_their_owners_and_expire() -> None:
    handler = BackendRequestHandler(LEASE_S)
    report(handler, 0.0, starting("x"), failed("y"))
    report(handler, 0.0, starting("z"), owner="other")
    assert listed(handler, 0.0) == (starting("x"), failed("y"), starting("z"))
    report(handler, 5.0, starting("y"))
    assert listed(handler, 5.0) == (starting("z"), starting("y"))
    handler.handle(ENVELOPE, ASSIGN, 6.0)
    handler.tick(10.0)
    assert listed(handler, 10.0) == (starting("y"),)
    assert handler.tick(15.0) == []
    assert listed(handler, 15.0) == ()
    assert handler.next_deadline() == 20.0, "a whole wait after the report expired"
    report(handler, 16.0)
    ((_, reply),) = handler.tick(20.0)
    assert isinstance(reply, Refused)
    assert "register one with `prorl backends add`" in reply.error.message
