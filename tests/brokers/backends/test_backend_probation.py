from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.brokers.backends.backend_probation import MAX_PAUSE_S, STALE_S, Probation


def test_the_pause_before_a_try_doubles_up_to_a_limit() -> None:
    probation = Probation()
    probation.failed("x", 0.0)
    pauses, now = [], 0.0
    for _ in range(9):
        due = probation.next_due()
        assert due is not None
        assert probation.take_due(due - 0.01) == []
        assert probation.take_due(due) == ["x"]
        assert probation.take_due(due) == [], "once, until it was tried"
        assert probation.next_due() is None
        assert probation.next_try_s("x", due + 5) == 0.0
        probation.tried("x", due)
        probation.failed("x", due + 0.1)
        pauses.append(due - now)
        now = due
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, MAX_PAUSE_S]


def test_what_ends_a_probation() -> None:
    for end, ended in (
        (lambda p: p.served("x", STALE_S - 0.1, trial=False), False),
        (lambda p: p.served("x", STALE_S, trial=False), True),
        (lambda p: p.served("x", 0.0, trial=True), True),
        (lambda p: p.served("y", 9.0, trial=True), False),
        (lambda p: p.forget("x") is None, True),
        (lambda p: p.forget("y") is not None, False),
    ):
        probation = Probation()
        probation.failed("x", 0.0)
        assert end(probation) == ended
        assert ("x" not in probation) == ended
        assert (probation.next_try_s("x", 0.0) is None) == ended
        assert (probation.next_due() is None) == ended


EVENTS = st.tuples(st.sampled_from("xyz"), st.sampled_from(["failed", "tried", "served", "due"]), st.floats(0, 30))


@given(st.lists(EVENTS, max_size=60))
def test_no_backend_is_due_that_has_not_failed_nor_twice_without_a_try(events: list[tuple[str, str, float]]) -> None:
    probation = Probation()
    on, offered, now = set(), set(), 0.0
    for name, event, later in events:
        now += later
        match event:
            case "failed":
                probation.failed(name, now)
                on.add(name)
            case "tried" if name in on:
                probation.tried(name, now)
                offered.discard(name)
            case "served" if probation.served(name, now, trial=True):
                on.discard(name)
                offered.discard(name)
            case "due":
                due = set(probation.take_due(now))
                assert due <= on - offered
                offered |= due
        assert {one for one in "xyz" if one in probation} == on
        assert (probation.next_due() is None) == (on == offered)
