"""Shares of a node's slots: never one twice, never fewer than are used, and by demand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.brokers.node.slot_shares import divide

NAMES = ("rollout-0", "rollout-1", "rollout-2", "rollout-3")
COUNTS = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 1000), min_size=1)


@given(slots=st.integers(0, 64), demand=COUNTS, data=st.data())
def test_no_slot_is_given_twice_and_none_is_taken_from_its_user(
    slots: int, demand: dict[str, int], data: st.DataObject
) -> None:
    left = slots
    used = {}
    for name in demand:
        used[name] = data.draw(st.integers(0, left))
        left -= used[name]
    shares = divide(slots, demand, used, "node")
    assert shares.keys() == demand.keys()
    assert sum(shares.values()) == slots
    assert all(shares[name] >= used[name] for name in demand)


def test_shares_follow_the_demand() -> None:
    shares = divide(64, {"a": 70_000, "b": 10_000, "c": 10_000, "d": 10_000}, {}, "n")
    assert shares["a"] in (44, 45)
    assert all(shares[name] in (6, 7) for name in "bcd")


def test_what_nobody_asks_for_is_dealt_out_evenly() -> None:
    assert divide(8, {"a": 0, "b": 0}, {}, "n") == {"a": 4, "b": 4}
    assert divide(8, {"a": 4, "b": 0}, {}, "n") == {"a": 6, "b": 2}


def test_a_slot_that_does_not_divide_goes_to_another_broker_on_another_node() -> None:
    winners = {
        max((shares := divide(1, {"a": 5, "b": 5}, {}, f"n{k}")), key=lambda one: shares[one]) for k in range(20)
    }
    assert winners == {"a", "b"}


def test_slots_that_are_gone_while_they_are_used_are_owed() -> None:
    assert divide(2, {"a": 5, "b": 5}, {"a": 3, "b": 1}, "n") == {"a": 3, "b": 1}
