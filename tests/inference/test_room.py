from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.inference.hosting.room import LEAST, RESUMED_S, SETTLED_S, Held, KvReport, Room

if TYPE_CHECKING:
    from collections.abc import Collection

CAPACITY = 400_000
CONTEXT = 40_000
"""The prior of the mean is 20,000 tokens, so 20 rollouts fit."""
BEAT_S = 5.0
CALM = KvReport(CAPACITY, 0.3)


class Host:
    """A room that is updated as an engine host does it."""

    def __init__(self, slots: int = 256, context_tokens: int = CONTEXT) -> None:
        self.room = Room(slots, context_tokens)
        self.now = 1_000.0
        self.ended = 0

    def beat(
        self,
        report: KvReport | None = CALM,
        held: int | None = None,
        contexts: Collection[float] = (),
        seconds: float = BEAT_S,
        mean_tokens: float = 0.0,
    ) -> int | None:
        """Update once; by default as many rollouts are held as the engine takes."""
        self.now += seconds
        rollouts = held if held is not None else self.room.rollouts or 0
        known = Held(rollouts, self.ended, 10_000 if mean_tokens else 0, mean_tokens)
        self.room.update(report, known, contexts, self.now)
        return self.room.rollouts

    def calm(self, seconds: float, report: KvReport = CALM, held: int | None = None) -> int | None:
        for _ in range(int(seconds / BEAT_S)):
            self.beat(report, held)
        return self.room.rollouts

    def turn_over(self, report: KvReport = CALM, held: int | None = None) -> int | None:
        """Replace all rollouts once."""
        self.beat(report, held)
        self.ended += held if held is not None else self.room.rollouts or 0
        return self.beat(report, held)


@pytest.fixture
def host() -> Host:
    host = Host()
    assert host.beat() == 20
    return host


def test_an_engine_without_kv_figures_takes_as_many_as_its_slots() -> None:
    host = Host()
    assert host.room.rollouts is None
    assert host.beat(None) is None
    assert host.beat(KvReport(0, 0.0)) is None
    assert host.beat() == 20


def test_the_first_number_is_the_capacity_over_the_mean_context() -> None:
    assert Host().beat() == 20
    assert Host(slots=7).beat() == 7
    assert Host().beat(mean_tokens=10_000) == 39, "a few rollouts of the prior are in the mean"
    assert Host(context_tokens=0).beat() == 8, "of an unknown longest context"
    assert Host(context_tokens=10 * CAPACITY).beat() == LEAST


@pytest.mark.parametrize("mean_tokens", [math.nan, math.inf, -1.0, 0.0])
def test_an_impossible_mean_context_is_ignored(mean_tokens: float) -> None:
    host = Host()
    host.room.update(CALM, Held(0, 0, 1_000, mean_tokens), (), 0.0)
    assert host.room.rollouts == 20


def test_young_rollouts_are_charged_with_the_mean_and_old_ones_with_their_contexts(host: Host) -> None:
    assert host.beat(held=10, contexts=[100.0] * 10) == 20
    assert host.beat(held=10, contexts=[100.0] * 3) == 20, "the others have had no turn yet"
    assert host.beat(held=10, contexts=[40_000.0] * 5) == 15
    assert host.beat(held=10, contexts=[40_000.0] * 10) == 10
    assert host.beat(held=12, contexts=[40_000.0] * 12) == 8, "no new ones until others have ended"


def test_it_grows_once_all_rollouts_were_replaced(host: Host) -> None:
    assert host.calm(600) == 20
    host.ended = 19
    assert host.beat() == 20
    host.ended = 20
    assert host.beat() == 21
    assert host.calm(600) == 21
    host.ended = 42
    assert host.beat() == 22


def test_it_grows_the_slower_the_more_kv_is_in_use() -> None:
    grown = []
    for used in (0.0, 0.3, 0.55):
        host = Host()
        host.beat(replace(CALM, used=used))
        for _ in range(6):
            host.turn_over(replace(CALM, used=used))
        grown.append(host.room.rollouts)
    assert grown == [59, 26, 20]


@pytest.mark.parametrize(
    "report",
    [
        replace(CALM, used=0.61),
        replace(CALM, waiting=1),
        replace(CALM, prompt_tokens=1_000, again_tokens=60),
    ],
    ids=["KV in use", "requests wait", "computed again"],
)
def test_it_does_not_grow_while_the_engine_has_enough(report: KvReport) -> None:
    host = Host()
    host.beat(report)
    for _ in range(5):
        assert host.turn_over(report) == 20


def test_it_grows_only_while_it_is_what_limits(host: Host) -> None:
    for _ in range(20):
        assert host.turn_over(held=12) == 20


def test_slots_that_limit_let_no_budget_pile_up() -> None:
    host = Host(slots=12)
    host.beat()
    for _ in range(50):
        assert host.turn_over() == 12
    assert host.beat(replace(CALM, preempted=1)) == 9, "a reduction begins with what is held"


def test_what_happens_while_nothing_is_held_is_not_the_rollouts_doing(host: Host) -> None:
    """A restarted broker knows of no rollouts until the stage processes have named theirs."""
    for _ in range(10):
        host.beat(replace(CALM, preempted=1, used=1.0, waiting=30), held=0)
    assert host.beat(replace(CALM, preempted=1, used=0.0), held=1) == 8, "it is reduced to two fifths at most"


def test_a_restarted_broker_counts_from_the_beginning(host: Host) -> None:
    host.ended = 1_000
    host.turn_over()
    assert host.room.rollouts == 22
    host.ended = 0
    host.beat()
    host.ended = 22
    assert host.beat() == 23


def test_a_preemption_reduces_the_number(host: Host) -> None:
    assert host.beat(replace(CALM, preempted=1)) == 16


def test_high_use_reduces_the_number_in_proportion(host: Host) -> None:
    assert host.calm(600, replace(CALM, used=0.74)) == 20
    host.beat(replace(CALM, used=1.0))
    assert host.beat(replace(CALM, used=1.0)) == 15


@pytest.mark.parametrize(
    "report",
    [replace(CALM, waiting=11), replace(CALM, prompt_tokens=1_000, again_tokens=260)],
    ids=["requests wait", "computed again"],
)
def test_a_lasting_queue_or_loss_of_prefixes_reduces_the_number(host: Host, report: KvReport) -> None:
    assert host.calm(55, report) == 20
    for _ in range(20):
        host.beat(replace(CALM, prompt_tokens=1_000))
    assert host.calm(55, replace(report, prompt_tokens=report.prompt_tokens * 9)) == 20, "it was over in between"
    host = Host()
    host.beat()
    assert host.calm(65, report) == 16


def test_half_of_the_rollouts_may_wait(host: Host) -> None:
    assert host.calm(600, replace(CALM, waiting=10)) == 20


def test_one_late_report_does_not_stand_for_the_time_before(host: Host) -> None:
    assert host.beat(replace(CALM, waiting=20), seconds=600) == 20
    assert host.room.used == pytest.approx(0.3)


def test_nothing_is_reduced_twice_before_it_has_settled(host: Host) -> None:
    thrash = replace(CALM, used=0.95, preempted=1, waiting=15)
    assert host.beat(thrash) == 16
    assert host.calm(3_600, thrash, held=20) == 16, "as long as more are held"
    assert host.calm(SETTLED_S, thrash, held=16) == 16
    host.beat(thrash, held=16)
    assert host.room.rollouts == 12


def test_a_reduced_number_grows_again(host: Host) -> None:
    host.beat(replace(CALM, preempted=1))
    host.ended += 100
    assert host.calm(SETTLED_S + BEAT_S) == 16, "rollouts that ended before do not count"
    for _ in range(2):
        host.ended += 16
        host.beat()
    assert host.room.rollouts == 17


def test_it_is_not_reduced_below_the_least_and_grows_from_there(host: Host) -> None:
    for _ in range(50):
        host.beat(replace(CALM, preempted=1))
        host.calm(SETTLED_S + BEAT_S)
    assert host.room.rollouts == LEAST
    for _ in range(12):
        host.turn_over(replace(CALM, used=0.0))
    assert host.room.rollouts is not None
    assert host.room.rollouts > 2 * LEAST


def test_the_least_grows_although_contexts_exceed_its_budget(host: Host) -> None:
    mean = 15_000.0
    for beat in range(48 * 60):
        mean += 0.1
        storm = replace(CALM, preempted=1) if beat < 24 * 60 else replace(CALM, used=0.1)
        host.beat(storm, mean_tokens=mean)
        host.ended += LEAST * (beat % 60 == 0)
        assert host.room.rollouts == LEAST or not 12 * 60 < beat < 24 * 60
    assert host.room.rollouts is not None
    assert host.room.rollouts > LEAST


def test_what_follows_new_weights_is_no_thrash(host: Host) -> None:
    host.room.note_weights(host.now)
    loss = replace(CALM, used=1.0, preempted=9, waiting=20, prompt_tokens=1e6, again_tokens=1e6)
    assert host.beat(loss) == 20
    assert host.calm(RESUMED_S - 2 * BEAT_S, loss) == 20
    assert host.room.again == 0.0
    assert host.room.used == pytest.approx(0.3)
    assert host.calm(600) == 20
    assert host.beat(replace(CALM, preempted=1)) == 16


def test_weights_each_minute_do_not_stop_it(host: Host) -> None:
    for _ in range(6):
        host.room.note_weights(host.now)
        host.calm(30)
        host.turn_over()
    assert host.room.rollouts == 26
    for _ in range(2):
        host.room.note_weights(host.now)
        host.calm(60, replace(CALM, used=1.0))
    assert host.room.rollouts == 20


def test_a_report_that_does_not_come_stops_growth(host: Host) -> None:
    for _ in range(10):
        host.ended += 20
        assert host.beat(None) == 20
    assert host.beat() == 21, "once"
    assert host.beat() == 21


NONSENSE = [
    replace(CALM, capacity_tokens=math.nan),
    replace(CALM, capacity_tokens=math.inf),
    replace(CALM, capacity_tokens=-CAPACITY),
    replace(CALM, capacity_tokens=0),
    replace(CALM, used=math.nan),
    replace(CALM, used=-0.1),
    replace(CALM, used=1.1),
    replace(CALM, preempted=math.nan),
    replace(CALM, preempted=-1),
    replace(CALM, waiting=math.inf),
    replace(CALM, prompt_tokens=-1),
    replace(CALM, prompt_tokens=10, again_tokens=11),
    replace(CALM, prompt_tokens=10, again_tokens=math.nan),
]


@pytest.mark.parametrize("report", NONSENSE, ids=str)
def test_an_impossible_report_changes_nothing(host: Host, report: KvReport) -> None:
    for _ in range(30):
        assert host.turn_over(report) == 20
        assert host.room.used == pytest.approx(0.3)
    assert Host().beat(report) is None


def test_half_of_the_capacity_holds_half_of_the_rollouts(host: Host) -> None:
    half = replace(CALM, capacity_tokens=CAPACITY / 2)
    assert host.beat(half) == 10
    assert host.calm(600, replace(half, used=0.95, preempted=1), held=20) == 10, "those held must end first"
    assert host.beat(CALM, held=10) == 20
    assert host.calm(600) == 20


def test_a_capacity_that_is_wrong_once_leaves_no_trace(host: Host) -> None:
    for capacity in (1, 10 * CAPACITY):
        host.beat(replace(CALM, capacity_tokens=capacity), held=20)
        assert host.beat() == 20


def test_a_queue_is_measured_by_what_is_held(host: Host) -> None:
    """Rollouts that wait for a tool are held too, so a queue as long as the running requests may be short."""
    assert host.calm(300, replace(CALM, waiting=8), held=16) == 20


REPORTS = st.builds(
    KvReport,
    st.sampled_from([CAPACITY, CAPACITY, CAPACITY, CAPACITY / 2, 1, math.nan]),
    st.floats(-0.1, 1.1),
    st.sampled_from([0, 0, 0, 0, 1, 5]),
    st.integers(0, 40),
    st.just(1_000),
    st.integers(0, 1_000),
)


@given(
    beats=st.lists(st.tuples(st.none() | REPORTS, st.integers(0, 60), st.integers(0, 30), st.booleans()), max_size=60),
    slots=st.integers(LEAST, 64),
    contexts=st.lists(st.floats(0, CONTEXT), max_size=20),
)
def test_the_number_stays_within_its_bounds(
    beats: list[tuple[KvReport | None, int, int, bool]], slots: int, contexts: list[float]
) -> None:
    host, heard = Host(slots), False
    for report, held, ended, weights in beats:
        if weights:
            host.room.note_weights(host.now)
        host.ended += ended
        before, used, again = host.room.rollouts, host.room.used, host.room.again
        host.beat(report, held, contexts[:held])
        valid = report is not None and report.is_valid
        heard = heard or valid
        if not heard:
            assert host.room.rollouts is None
            continue
        assert host.room.rollouts is not None
        assert LEAST <= host.room.rollouts <= slots
        assert 0 <= host.room.used <= 1
        assert 0 <= host.room.again <= 1
        if not valid:
            assert (host.room.rollouts, host.room.used, host.room.again) == (before, used, again)
