"""Deadlines against a plain dictionary that is looked through."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.brokers.rollout.deadlines import MOVES, SPARE_ENTRIES, Deadlines

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 5), st.integers(0, 30)),
        st.tuples(st.just("discard"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("due"), st.just(0), st.integers(0, 30)),
    )
)


@given(STEPS)
def test_what_is_due_is_what_a_look_at_all_finds(steps: list[tuple[str, int, int]]) -> None:
    deadlines: Deadlines[int] = Deadlines()
    model: dict[int, int] = {}
    for what, key, at in steps:
        if what == "set":
            deadlines.set(key, at)
            model[key] = at
        elif what == "discard":
            deadlines.discard(key)
            model.pop(key, None)
        else:
            due = list(deadlines.due(at))
            assert sorted(due) == sorted(key for key, when in model.items() if when <= at)
            assert [model[key] for key in due] == sorted(model[key] for key in due)
            model = {key: when for key, when in model.items() if when > at}
        assert len(deadlines) == len(model)
        assert all((key in deadlines) == (key in model) for key in range(6))


def test_deadlines_that_were_dropped_take_no_room() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for key in range(10_000):
        deadlines.set(key, 1e9)
        deadlines.discard(key)
    assert len(deadlines._heap) <= SPARE_ENTRIES + 1


def test_many_that_moved_are_looked_at_in_parts_and_none_is_forgotten() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for key in range(2 * MOVES + 1):
        deadlines.set(key, 1.0)
        deadlines.set(key, 3.0)
    assert list(deadlines.due(2.0)) == []
    assert sum(at == 1.0 for at, _ in deadlines._heap) == MOVES + 1
    looks = 0
    found: list[int] = []
    while len(found) < 2 * MOVES + 1:
        found += deadlines.due(3.0)
        looks += 1
    assert sorted(found) == list(range(2 * MOVES + 1))
    assert looks <= 3


def test_a_later_deadline_costs_nothing_until_its_earlier_time() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for at in range(1, 1001):
        deadlines.set("a", float(at))
    assert len(deadlines._heap) == 1
    assert list(deadlines.due(999.0)) == []
    assert list(deadlines.due(1000.0)) == ["a"]
