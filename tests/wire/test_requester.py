"""When requests are sent, sent again and given up, under any course of events and on a virtual clock."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.wire.requester import Request, Requester, Step

if TYPE_CHECKING:
    from prorl_zmq.errors import RequestTimeout

TIMES = st.floats(0.01, 30.0)
EVENTS = st.lists(st.tuples(st.floats(0.0, 5.0), st.sampled_from(["connected", "disconnected", "moved", "look"])))


class Course:
    """Follows one request to its end: steps are taken when they are due, and after each event."""

    def __init__(
        self,
        events: list[tuple[float, str]],
        wait_s: float,
        held_s: float = 0.0,
        resend_s: float = math.inf,
        reconnect_s: float = math.inf,
    ) -> None:
        self.places = ["ipc://place-0"]
        self.requester = Requester(
            self.places[0], 0.0, lambda: self.places[-1], resend_s=resend_s, reconnect_s=reconnect_s
        )
        self.request = Request(0.0, wait_s, held_s, warns=False)
        self.now = 0.0
        self.sent: list[tuple[float, int]] = []
        """The time of each sending, and how many connections there had been."""
        self.connections = 0
        self.is_up = reconnect_s == math.inf
        self.moves: list[str] = []
        self.error: RequestTimeout | None = None
        self._step()
        for pause_s, event in events:
            self._wait(self.now + pause_s)
            if self.error is not None:
                return
            self._happen(event)
            self._step()
        self._wait(math.inf)

    def _happen(self, event: str) -> None:
        if event == "moved":
            self.places.append(f"ipc://place-{len(self.places)}")
        elif self.requester.reconnect_s < math.inf and event == "connected":
            self.requester.connected()
            self.is_up, self.connections = True, self.connections + 1
        elif self.requester.reconnect_s < math.inf and event == "disconnected":
            self.requester.disconnected(self.now)
            self.is_up = False

    def _wait(self, until: float) -> None:
        while self.error is None and (wake_at := self.requester.wake_at(self.request)) <= until:
            before = self.now
            self.now = max(self.now, wake_at)
            step = self._step()
            assert step != Step(), "it is due, and nothing is to be done"
            assert self.error is not None or self.requester.wake_at(self.request) > before, "it is due again at once"
        if self.error is None:
            self.now = max(self.now, until)

    def _step(self) -> Step:
        step = self.requester.step(self.request, self.now)
        if step.move_to:
            self.moves.append(step.move_to)
        if step.send:
            assert self.is_up
            assert step.error is None
            self.sent.append((self.now, self.connections))
        self.error = step.error
        return step


@given(EVENTS, TIMES, TIMES, TIMES)
def test_a_request_without_a_reply_is_resent_at_a_fixed_pace_until_its_limit(
    events: list[tuple[float, str]], wait_s: float, held_s: float, resend_s: float
) -> None:
    course = Course(events, wait_s, held_s, resend_s)
    times = [time for time, _ in course.sent]
    assert times[0] == 0.0
    assert all(after - before == pytest.approx(held_s + resend_s) for before, after in pairwise(times))
    assert times[-1] < wait_s <= times[-1] + held_s + resend_s + 1e-6
    assert course.error is not None
    assert course.error.timeout_s == pytest.approx(wait_s)
    assert "unreachable" not in course.error.fields


@given(EVENTS, TIMES, TIMES)
def test_over_a_watched_connection_it_is_sent_once_per_connection(
    events: list[tuple[float, str]], wait_s: float, reconnect_s: float
) -> None:
    course = Course(events, wait_s, reconnect_s=reconnect_s)
    connections = [number for _, number in course.sent]
    assert connections == sorted(set(connections))
    assert 0 not in connections
    assert course.error is not None
    if course.error.fields.get("unreachable"):
        assert not course.is_up
        assert reconnect_s <= course.now < wait_s
    else:
        assert course.now == pytest.approx(wait_s)


@given(EVENTS, TIMES, TIMES)
def test_a_place_is_looked_for_when_a_reply_is_late_and_moved_to_once(
    events: list[tuple[float, str]], wait_s: float, resend_s: float
) -> None:
    course = Course(events, wait_s, resend_s=resend_s)
    assert len(set(course.moves)) == len(course.moves)
    assert all(place in course.places for place in course.moves)
    assert course.requester.endpoint == course.places[-1]


def test_requests_of_one_outage_fail_together_and_later_ones_have_their_own_chance() -> None:
    requester = Requester("ipc://engine", 0.0, resend_s=math.inf, reconnect_s=5.0)
    first, second = Request(0.0, 600.0, 0.0, warns=False), Request(4.0, 600.0, 0.0, warns=False)
    assert requester.wake_at(first) == requester.wake_at(second) == 5.0
    later = Request(7.0, 600.0, 0.0, warns=False)
    assert requester.wake_at(later) == 12.0
    error = requester.step(later, 12.0, "refused the key").error
    assert error is not None
    assert error.message == "no connection to ipc://engine for 5 s; refused the key"
    assert error.unreachable


def test_a_connection_that_returns_has_each_request_sent_again() -> None:
    requester = Requester("ipc://engine", 0.0, resend_s=math.inf, reconnect_s=5.0)
    request = Request(0.0, 600.0, 0.0, warns=False)
    assert requester.step(request, 0.0) == Step()
    requester.connected()
    assert requester.step(request, 1.0) == Step(send=True)
    assert requester.step(request, 2.0) == Step()
    requester.disconnected(3.0)
    requester.disconnected(4.0)
    assert requester.down_s(7.0) == 4.0
    requester.connected()
    assert requester.step(request, 7.0) == Step(send=True)
    assert requester.down_s(7.0) == 0.0


def test_a_process_that_was_paused_resends_once() -> None:
    requester = Requester("ipc://door", 0.0, resend_s=2.0)
    request = Request(0.0, 600.0, 0.0, warns=False)
    assert requester.step(request, 0.0).send
    assert requester.step(request, 100.0).send
    assert requester.step(request, 100.0) == Step()
    assert requester.wake_at(request) == 102.0


def test_the_first_late_reply_is_warned_of_once() -> None:
    requester = Requester("ipc://door", 0.0, resend_s=2.0, hint="is it running?")
    request = Request(0.0, 30.0, 0.0, warns=True)
    assert requester.step(request, 0.0) == Step(send=True)
    warning = "no reply from ipc://door yet; waiting for up to 28 s more: is it running?"
    assert requester.step(request, 2.0) == Step(warning=warning, send=True)
    assert requester.step(request, 4.0) == Step(send=True)
