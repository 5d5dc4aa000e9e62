from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.brokers.least_loaded import COMPACT_FROM, LeastLoaded

CHANGES = st.lists(
    st.tuples(
        st.sampled_from("abcdef"),
        st.one_of(st.none(), st.integers(0, 3), st.sampled_from([0.25, 0.5])),
        st.integers(0, 2),
    ),
    max_size=200,
)


def test_ties_go_to_the_key_that_changed_longest_ago() -> None:
    heap: LeastLoaded[str] = LeastLoaded()
    for key in "abc":
        heap.set(key, 0)
    assert heap.first() == "a"
    heap.set("a", 1)
    heap.set("a", 0)
    assert heap.first() == "b"


def test_a_lower_tier_comes_first_whatever_the_load() -> None:
    heap: LeastLoaded[str] = LeastLoaded()
    heap.set("idle", 0, tier=1)
    heap.set("busy", 9)
    assert heap.first() == "busy"


def test_nothing_is_first_of_nothing() -> None:
    heap: LeastLoaded[str] = LeastLoaded()
    assert heap.first() is None
    heap.set("a", 0)
    heap.discard("a")
    heap.discard("a")
    assert heap.first() is None
    assert len(heap) == 0


@given(CHANGES)
def test_agrees_with_a_sorted_list(changes: list[tuple[str, float | None, int]]) -> None:
    heap: LeastLoaded[str] = LeastLoaded()
    model: dict[str, tuple[int, float, int]] = {}
    for sequence, (key, load, tier) in enumerate(changes):
        if load is None:
            heap.discard(key)
            model.pop(key, None)
        else:
            heap.set(key, load, tier)
            model[key] = (tier, load, sequence)
            assert heap.load(key) == load
        assert heap.first() == min(model, key=model.__getitem__, default=None)
        assert sorted(heap) == sorted(model)


def test_stale_entries_do_not_pile_up() -> None:
    heap: LeastLoaded[str] = LeastLoaded()
    heap.set("idle", 0)
    for load in range(1, 10_000):
        heap.set("busy", load)
    assert len(heap._heap) <= COMPACT_FROM + 1
    assert heap.first() == "idle"
