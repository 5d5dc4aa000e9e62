"""The account and the simulation of bench/dapo.py: that they would see what they say did not happen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from dapo_account import Share, account, alike, bound_s, busy, informative_length, until
from dapo_prompts import GROUP, NOT_INFORMATIVE, Ran, rollouts_of
from dapo_simulation import PARTS, Simulation

INFORMATIVE, OTHER, *_ = [number for number in range(100) if rollouts_of(number).informative]
ALIKE, *_ = [number for number in range(100) if not rollouts_of(number).informative]


def group(prompt: int, whole: int = GROUP, seconds: float = 1.0) -> list[Ran]:
    return [Ran(f"{prompt}.{place}", prompt, 10.0, 10.0 + seconds, place < whole) for place in range(GROUP)]


def test_kept_groups_are_used_and_those_all_alike_were_needed() -> None:
    ran = [*group(INFORMATIVE), *group(ALIKE, seconds=2.0)]
    assert account(ran, {INFORMATIVE}) == (Share(GROUP, GROUP), Share(GROUP, 2 * GROUP), Share(0, 0))


def test_an_informative_group_that_is_not_kept_is_wasted() -> None:
    ran = [*group(INFORMATIVE), *group(OTHER)]
    found = account(ran, {INFORMATIVE})
    assert found.wasted == Share(GROUP, GROUP)
    assert found.wasted_rollouts == found.wasted_time == 0.5


def test_a_rollout_that_was_cut_short_is_wasted_even_of_a_kept_group() -> None:
    ran = [*group(INFORMATIVE), Ran("again", INFORMATIVE, 10.0, 13.0, False)]
    found = account(ran, {INFORMATIVE})
    assert found.wasted == Share(1, 3.0)
    assert found.used == Share(GROUP, GROUP)


def test_a_group_all_alike_is_only_found_out_when_it_is_whole() -> None:
    ran = group(ALIKE, whole=GROUP - 1)
    assert alike(ran) == set()
    assert account(ran, set()).wasted == Share(GROUP, GROUP)


def test_what_is_under_way_at_the_end_is_cut_short_and_what_comes_later_is_left_out() -> None:
    ran = [Ran("before", 0, 1.0, 2.0, True), Ran("across", 0, 1.5, 9.0, True), Ran("after", 0, 3.5, 4.0, True)]
    assert until(ran, 3.0) == [ran[0], Ran("across", 0, 1.5, 3.0, False)]


def test_the_bound_is_the_drawn_work_over_the_slots() -> None:
    work = float(rollouts_of(INFORMATIVE).lengths.sum() + rollouts_of(ALIKE).lengths.sum())
    assert bound_s({INFORMATIVE, ALIKE}, mean_s=0.5, slots=4) == pytest.approx(0.5 * work / 4)


def test_busy_slots_are_counted_over_time() -> None:
    times, counts = busy([Ran("a", 0, 11.0, 13.0, True), Ran("b", 0, 12.0, 14.0, True)], origin=10.0)
    assert times.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert counts.tolist() == [0, 1, 2, 1, 0]


def test_prompts_are_what_they_are_said_to_be() -> None:
    drawn = [rollouts_of(number) for number in range(4000)]
    assert sum(not one.informative for one in drawn) / len(drawn) == pytest.approx(NOT_INFORMATIVE, abs=0.03)
    assert sum(float(one.lengths.mean()) for one in drawn) / len(drawn) == pytest.approx(1.0, abs=0.1)
    assert (rollouts_of(7).lengths == rollouts_of(7).lengths).all()
    assert informative_length({INFORMATIVE}) == informative_length(None, 1)


def test_the_simulation_leaves_no_job_out() -> None:
    result = Simulation(slots=64, target_groups=8).run(1000)
    assert result.batches > 1
    assert len(result.sampler_s) == PARTS
    assert result.jobs["ended"] == 1000
    assert result.jobs["launched"] == 1000 + result.jobs["under_way"]
    assert result.jobs["under_way"] >= 64
    assert 500 < result.jobs["kept"] + result.jobs["not_kept"] <= 1000
    assert 0.5 < result.use <= 1.0
