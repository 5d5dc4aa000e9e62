"""How many jobs ended when, from the broker's counts of outcomes."""

from __future__ import annotations

from collections import Counter

from prorl_zmq.brokers.rollout.ended_counts import INTERVALS, EndedCounts
from prorl_zmq.wire.messages.jobs import Outcome
from prorl_zmq.wire.messages.watching import ENDED_INTERVAL_S, EndedJobs


def counted(counts: EndedCounts) -> list[tuple[float, dict[Outcome, int]]]:
    return [(one.at, one.outcomes) for one in counts.intervals()]


def test_each_interval_has_what_ended_within_it() -> None:
    counts, outcomes = EndedCounts(), Counter[Outcome]()
    for second in range(1003, 1033):
        outcomes[Outcome.COMPLETED] += second < 1010
        outcomes[Outcome.FAILED] += second >= 1029
        counts.note(outcomes, second + 0.5)
        counts.note(outcomes, second + 0.6)  # nothing is counted twice
    assert counts.intervals() == (
        EndedJobs(1000.0, ENDED_INTERVAL_S, {Outcome.COMPLETED: 7}),
        EndedJobs(1020.0, ENDED_INTERVAL_S, {Outcome.FAILED: 1}),
        EndedJobs(1030.0, ENDED_INTERVAL_S, {Outcome.FAILED: 3}),
    )


def test_an_hour_is_kept() -> None:
    counts = EndedCounts()
    for number in range(2 * INTERVALS):
        counts.note({Outcome.COMPLETED: number + 1}, number * ENDED_INTERVAL_S)
    assert [at for at, _ in counted(counts)] == [
        number * ENDED_INTERVAL_S for number in range(INTERVALS, 2 * INTERVALS)
    ]
    assert {tuple(outcomes.items()) for _, outcomes in counted(counts)} == {((Outcome.COMPLETED, 1),)}


def test_a_clock_that_is_set_back_leaves_no_interval_in_the_future() -> None:
    counts = EndedCounts()
    counts.note({Outcome.COMPLETED: 1}, 1000.0)
    counts.note({Outcome.COMPLETED: 2}, 9000.0)
    counts.note({Outcome.COMPLETED: 5}, 1005.0)
    assert counted(counts) == [(1000.0, {Outcome.COMPLETED: 4})]
