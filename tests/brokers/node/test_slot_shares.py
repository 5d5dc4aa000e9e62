"""Shares of a node's slots: never one twice, and by weight up to what is asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.brokers.node.slot_shares import Demand, divide

NAMES = ("rollout-0", "rollout-1", "rollout-2", "rollout-3")
DEMANDS = st.dictionaries(
    st.sampled_from(NAMES), st.builds(Demand, st.integers(0, 1000), st.floats(0.01, 100.0)), min_size=1
)


@given(slots=st.integers(0, 64), demands=DEMANDS, data=st.data())
def test_no_slot_is_given_while_another_uses_it_and_none_is_left_over(
    slots: int, demands: dict[str, Demand], data: st.DataObject
) -> None:
    left = slots
    used = {}
    for name in demands:
        used[name] = data.draw(st.integers(0, left))
        left -= used[name]
    shares = divide(slots, demands, used, "node")
    assert shares.keys() == demands.keys()
    assert sum(max(shares[name], used[name]) for name in demands) == slots
    rested = divide(slots, demands, {}, "node")
    assert all(min(used[name], rested[name]) <= shares[name] <= rested[name] for name in demands)


@given(slots=st.integers(0, 64), demands=DEMANDS, node=st.text(max_size=3))
def test_each_broker_gets_its_share_by_weight_or_what_it_asks_for(
    slots: int, demands: dict[str, Demand], node: str
) -> None:
    """However much others ask for; and no slot is idle that one asks for."""
    shares = divide(slots, demands, {}, node)
    weight = sum(demand.weight for demand in demands.values() if demand.slots)
    for name, demand in demands.items():
        if demand.slots:
            assert shares[name] >= min(demand.slots, int(slots * demand.weight / weight + 1e-9))
    asked = {name: demand.slots for name, demand in demands.items()}
    if sum(asked.values()) >= slots:
        assert all(shares[name] <= asked[name] for name in demands)
    else:
        assert all(shares[name] >= asked[name] for name in demands)


def test_a_bulk_submission_at_one_broker_does_not_crowd_others() -> None:
    assert divide(8, {"bulk": Demand(1000), "one": Demand(1)}, {}, "n") == {"bulk": 7, "one": 1}
    assert divide(8, {"bulk": Demand(1000), "batch": Demand(16)}, {}, "n") == {"bulk": 4, "batch": 4}
    assert divide(9, {"bulk": Demand(1000), "batch": Demand(16, 2.0)}, {}, "n") == {"bulk": 3, "batch": 6}


def test_who_uses_more_than_its_share_starts_no_more_until_others_have_theirs() -> None:
    demands = {"bulk": Demand(1000), "one": Demand(1)}
    assert divide(8, demands, {"bulk": 8}, "n") == {"bulk": 7, "one": 0}
    assert divide(8, demands, {"bulk": 7}, "n") == {"bulk": 7, "one": 1}


def test_what_nobody_asks_for_is_dealt_out_evenly() -> None:
    assert divide(8, {"a": Demand(0), "b": Demand(0)}, {}, "n") == {"a": 4, "b": 4}
    assert divide(8, {"a": Demand(4), "b": Demand(0)}, {}, "n") == {"a": 6, "b": 2}


def test_a_slot_that_does_not_divide_goes_to_another_broker_on_another_node() -> None:
    both = {"a": Demand(5), "b": Demand(5)}
    winners = {max((shares := divide(1, both, {}, f"n{k}")), key=lambda one: shares[one]) for k in range(20)}
    assert winners == {"a", "b"}


def test_slots_that_are_gone_while_they_are_used_are_owed() -> None:
    assert divide(2, {"a": Demand(5), "b": Demand(5)}, {"a": 3, "b": 1}, "n") == {"a": 1, "b": 1}
    assert divide(2, {"a": Demand(5), "b": Demand(5)}, {"a": 3}, "n") == {"a": 1, "b": 0}
