"""bench/guard.py: a ratio that is worse twice in a row fails, and only that."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import guard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

BEFORE = {guarded.key: 2.0 for guarded in guard.GUARDED}
HIGHER, LOWER = "assign: assign+release", "frontdoor: CPU of an empty job, all processes"
SHOWN = "frontdoor: throughput"


def in_turn(bench: str, *runs: Mapping[str, float]) -> tuple[Callable[[str], Mapping[str, float]], list[str]]:
    """Return a measurement that finds these in a benchmark's runs, and what there was elsewhere; and what has run."""
    ran: list[str] = []
    left = list(runs)

    def measure(name: str) -> Mapping[str, float]:
        ran.append(name)
        return {**BEFORE, **(left.pop(0) if name == bench else {})}

    return measure, ran


@pytest.mark.parametrize(
    ("key", "ratio", "worse"), [(HIGHER, 1.0, 1.0), (HIGHER, 4.0, -0.5), (LOWER, 4.0, 1.0), (LOWER, 1.0, -0.5)]
)
def test_which_way_is_worse(key: str, ratio: float, worse: float) -> None:
    guarded = next(one for one in guard.GUARDED if one.key == key)
    assert guarded.worse(2.0, ratio) == worse


@pytest.mark.parametrize("key", [one.key for one in guard.GUARDED if one.is_judged])
def test_a_ratio_that_is_worse_twice_fails(key: str) -> None:
    bad, bench = {key: 4.0}, key.partition(":")[0]
    measure, ran = in_turn(bench, bad, bad)
    found = guard.verdicts(BEFORE, measure)
    assert [one.guarded.key for one in found if one.fails] == [key]
    assert ran.count(bench) == 2
    assert len(found) == len(guard.GUARDED)


def test_a_ratio_that_is_worse_once_passes() -> None:
    measure, ran = in_turn("frontdoor", {LOWER: 4.0}, {LOWER: 2.2})
    found = guard.verdicts(BEFORE, measure)
    assert not any(one.fails for one in found)
    assert ran.count("frontdoor") == 2


def test_what_is_within_the_tolerance_or_only_shown_is_measured_once() -> None:
    measure, ran = in_turn("frontdoor", {SHOWN: 0.1, LOWER: 2.0 * 1.14})
    assert not any(one.fails for one in guard.verdicts(BEFORE, measure))
    assert ran.count("frontdoor") == 1


def test_what_the_last_landing_did_not_have_is_new() -> None:
    measure, _ = in_turn("frontdoor", {LOWER: 100.0})
    before = {key: ratio for key, ratio in BEFORE.items() if key != LOWER}
    assert not any(one.fails for one in guard.verdicts(before, measure))


def test_all_that_is_guarded_is_recorded() -> None:
    recorded = json.loads(guard.RECORD.read_text())["ratios"]
    assert recorded.keys() == BEFORE.keys()
    assert all(ratio > 0 for ratio in recorded.values())
