"""Two runs compared. References are sums over all sign patterns, written out, and scipy's binomial test."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec
import pytest
from support.later import Later

from prorl_zmq.errors import ConfigError
from prorl_zmq.evaluation.run_comparison import Figures, compare, paired_p_value, read_figures
from prorl_zmq.evaluation.run_folder import PLAN, RESULTS, Sample
from prorl_zmq.evaluation.summary import Counting, summarise
from prorl_zmq.wire.messages.jobs import Outcome

from .conftest import HOSTILE, made_plan, made_sample, write_run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from scipy import stats

    from prorl_zmq.evaluation.plan import Plan
else:
    stats = Later("scipy.stats")


def figures(rewards: Sequence[Sequence[float | None]], plan: Plan | None = None, names: Sequence[str] = ()) -> Figures:
    """Return a run's figures from the rewards of each problem's samples."""
    plan = plan or made_plan(len(rewards), max(map(len, rewards), default=1))
    samples = [
        made_sample(plan, problem, sample, reward, name=names[problem] if names else "")
        for problem, row in enumerate(rewards)
        for sample, reward in enumerate(row)
    ]
    return Figures(plan, summarise(plan, samples, Counting()))


def test_problems_are_counted_by_who_solved_them() -> None:
    found = compare(
        figures([[1], [1], [1], [0], [0], [0], [0]]),
        figures([[1], [1], [0], [1], [1], [1], [0]]),
    )
    assert (found.shared, found.only_first, found.only_second) == (7, 0, 0)
    assert (found.solved_by_both, found.solved_by_first, found.solved_by_second, found.solved_by_none) == (2, 1, 3, 1)
    assert found.test == "McNemar's exact test"
    assert found.p_value == pytest.approx(stats.binomtest(1, 4).pvalue)
    assert [(each.name, each.change) for each in found.changed] == [
        ("problem-2", -1.0),
        *((f"problem-{number}", 1.0) for number in (3, 4, 5)),
    ]
    assert found.difference is not None
    assert found.difference.value == pytest.approx(2 / 7)


@pytest.mark.parametrize(("worse", "better"), [(0, 1), (3, 3), (2, 11), (40, 70)])
def test_with_one_sample_it_is_mcnemars_exact_test(worse: int, better: int) -> None:
    changes = [-1.0] * worse + [1.0] * better + [0.0] * 20
    assert paired_p_value(changes, 1) == pytest.approx(stats.binomtest(worse, worse + better).pvalue)


def test_with_several_samples_all_sign_patterns_are_counted() -> None:
    changes = [0.25, -0.5, 0.75, 0.75, 0.0, 1.0, -0.25, 0.5]
    sums = [
        abs(sum(sign * change for sign, change in zip(signs, changes, strict=True)))
        for signs in itertools.product((-1, 1), repeat=len(changes))
    ]
    far = sum(each >= abs(sum(changes)) - 1e-9 for each in sums) / len(sums)
    assert paired_p_value(changes, 4) == pytest.approx(far)


def test_large_denominators_are_rounded() -> None:
    changes = [0.5, 1 / 3, -0.25, 0.2, 0.125]
    assert paired_p_value(changes, 10**12) == pytest.approx(paired_p_value(changes, 120), abs=0.07)


def test_equal_runs_differ_by_nothing() -> None:
    one = figures([[1, 0], [0, 0], [1, 1]])
    found = compare(one, one)
    assert (found.settings, found.changed, found.p_value) == ((), (), 1.0)
    assert found.test == "exact sign-flip test over problems"


def test_settings_that_differ_come_with_both_values() -> None:
    first = figures([[1]], made_plan(1, 1, temperature=0.6, options={"a": 1}))
    second = figures([[1]], msgspec.structs.replace(made_plan(1, 1, temperature=1.0, max_tokens=64), version="1"))
    rows = {row.name: (row.first, row.second) for row in compare(first, second).settings}
    assert rows == {
        "--temperature": ("0.6", "1.0"),
        "--max-tokens": ("not given", "64"),
        "--set": ("{'a': 1}", "not given"),
        "prorl_zmq version": ("0", "1"),
    }


def test_only_problems_that_count_in_both_are_shared() -> None:
    plan = made_plan(3, 1)
    samples = [made_sample(plan, 0), made_sample(plan, 1, outcome=Outcome.INFRASTRUCTURE_ERROR), made_sample(plan, 2)]
    first = Figures(plan, summarise(plan, samples, Counting()))
    second = figures([[0], [1]])
    found = compare(first, second)
    assert (found.shared, found.only_first, found.only_second) == (1, 1, 1)


def test_row_numbers_of_two_data_files_are_no_names() -> None:
    numbered = figures([[1], [0]], names=("1", "2"))
    other_data = msgspec.structs.replace(numbered.plan.settings, data_sha256="1" * 64)
    other = Figures(msgspec.structs.replace(numbered.plan, settings=other_data), numbered.summary)
    assert compare(numbered, numbered).shared == 2
    found = compare(numbered, other)
    assert (found.shared, found.only_first, found.only_second) == (0, 2, 2)
    assert (found.p_value, found.difference, found.first_share) == (None, None, None)


def test_problems_of_two_data_files_are_paired_by_their_names() -> None:
    first = figures([[1], [0]], names=("aime-1", "aime-2"))
    settings = msgspec.structs.replace(first.plan.settings, data_sha256="1" * 64)
    plan = msgspec.structs.replace(made_plan(2, 1), settings=settings)
    found = compare(first, figures([[1], [1]], plan, names=("aime-2", "aime-3")))
    assert [(each.name, each.change) for each in found.changed] == [("aime-2", 1.0)]


def test_a_reward_that_is_no_number_solves_nothing() -> None:
    found = compare(figures([[float("nan")], [None], [1]]), figures([[1], [1], [1]]))
    assert (found.solved_by_both, found.solved_by_second) == (1, 2)
    assert found.p_value == 0.5


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a folder of `prorl eval`: it has no plan\.json"):
        read_figures(tmp_path)
    (tmp_path / PLAN).write_text("{")
    with pytest.raises(ConfigError, match="is not a plan of an evaluation"):
        read_figures(tmp_path)


def test_a_file_with_a_reward_that_is_no_number_is_refused_by_its_line(tmp_path: Path) -> None:
    write_run(tmp_path / "one", problems=1, samples=1)
    file = tmp_path / "one" / RESULTS
    file.write_bytes(file.read_bytes().replace(b'"reward":1.0', b'"reward":NaN'))
    with pytest.raises(ConfigError, match=r"results\.jsonl, line 1"):
        read_figures(tmp_path / "one")


def test_of_a_rollout_that_ran_again_the_newest_result_counts(tmp_path: Path) -> None:
    plan = write_run(tmp_path / "one", problems=1, samples=1, rewards=(0,))
    again: Sample = made_sample(plan, 0, 0, 1.0, trial=1, name=HOSTILE)
    with (tmp_path / "one" / RESULTS).open("ab") as file:
        file.write(msgspec.json.encode(again) + b"\n")
    assert [row.solved for row in read_figures(tmp_path / "one").summary.problems] == [1]
