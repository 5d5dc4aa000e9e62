"""Which trainer's weights the engines serve: one at a time, by a lease that ends with its client."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.brokers.backends.trainer_lease import LEASE_S, TrainerLease
from prorl_zmq.errors import WeightsHeld
from prorl_zmq.wire.messages.backends import HoldWeights
from prorl_zmq.wire.messages.engines import WeightUpdate

TRAINERS = st.sampled_from(["a", "b", "c"])


def ask(lease: TrainerLease, request: WeightUpdate, now: float) -> None:
    """Have a request accepted, as the broker does."""
    lease.check(request, now)
    lease.begin(request, now)


def asked(trainer: str, *, take_over: bool = False) -> WeightUpdate:
    return WeightUpdate("r", "set", 1, trainer=trainer, take_over=take_over)


def test_a_second_trainer_is_refused_by_name_until_the_first_is_gone() -> None:
    lease = TrainerLease()
    ask(lease, asked("a"), 0.0)
    with pytest.raises(WeightsHeld, match=r"session a gives .* weights of the model policy.* heard 4 s ago") as found:
        ask(lease, WeightUpdate("r", "begin", 1, limit_s=60.0, trainer="b"), 4.0)
    assert found.value.session == "a"
    lease.renew(HoldWeights("r", "a"), 10.0)
    with pytest.raises(WeightsHeld):
        ask(lease, asked("b"), 10.0 + LEASE_S - 0.1)
    ask(lease, asked("b"), 10.0 + LEASE_S)
    assert lease.holder(10.0 + LEASE_S) == "b"


def test_a_client_that_is_closed_lets_others_follow_at_once() -> None:
    lease = TrainerLease()
    ask(lease, asked("a"), 0.0)
    lease.renew(HoldWeights("r", "b", goodbye=True), 1.0)
    assert lease.holder(1.0) == "a"
    lease.renew(HoldWeights("r", "a", goodbye=True), 1.0)
    ask(lease, asked("b"), 1.0)
    assert lease.holder(1.0) == "b"


def test_who_takes_over_keeps_the_other_out() -> None:
    lease = TrainerLease()
    ask(lease, asked("a"), 0.0)
    ask(lease, asked("b", take_over=True), 1.0)
    lease.renew(HoldWeights("r", "a"), 2.0)
    assert lease.holder(2.0) == "b"
    with pytest.raises(WeightsHeld):
        ask(lease, asked("a"), 2.0)


def test_a_broker_that_was_restarted_learns_who_it_was() -> None:
    lease = TrainerLease()
    lease.renew(HoldWeights("r", "a"), 0.0)
    with pytest.raises(WeightsHeld):
        ask(lease, asked("b"), 1.0)


def test_what_is_no_trainer_holds_nothing() -> None:
    lease = TrainerLease()
    ask(lease, asked(""), 0.0)
    assert lease.holder(0.0) == ""
    ask(lease, asked("a"), 0.0)
    with pytest.raises(WeightsHeld):
        ask(lease, asked(""), 1.0)
    ask(lease, asked("", take_over=True), 1.0)
    assert lease.holder(1.0) == ""


@given(
    st.lists(
        st.tuples(TRAINERS, st.sampled_from(["check", "take_over", "renew", "goodbye"]), st.floats(0.0, 2 * LEASE_S)),
        max_size=40,
    )
)
def test_only_a_trainer_that_takes_over_replaces_one_that_lives(steps: list[tuple[str, str, float]]) -> None:
    lease, now = TrainerLease(), 0.0
    for trainer, what, pause_s in steps:
        now += pause_s
        before = lease.holder(now)
        if what == "check" and before not in ("", trainer):
            with pytest.raises(WeightsHeld, match=f"session {before} "):
                ask(lease, asked(trainer), now)
            assert lease.holder(now) == before
            continue
        if what in ("renew", "goodbye"):
            lease.renew(HoldWeights("r", trainer, goodbye=what == "goodbye"), now)
        else:
            ask(lease, asked(trainer, take_over=what == "take_over"), now)
        after = lease.holder(now)
        if what == "goodbye":
            assert after == ("" if before == trainer else before)
        elif what == "renew":
            assert after == (before or trainer)
        else:
            assert after == trainer
