"""Runs as the dashboard lists and compares them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec
import pytest

from prorl_zmq.errors import ConfigError
from prorl_zmq.evaluation.run_folder import RESULTS, read_samples
from prorl_zmq.evaluation.summary import Counting, summarise
from prorl_zmq.gateway.dashboard.run_list import RunList

from ..evaluation.conftest import made_sample, write_run

if TYPE_CHECKING:
    from pathlib import Path


def test_runs_are_found_two_folders_deep_and_nothing_else_is(tmp_path: Path) -> None:
    for name in ("one", "week/two", "week/deep/three"):
        write_run(tmp_path / "runs" / name, problems=1, samples=1)
    write_run(tmp_path / "outside", problems=1, samples=1)
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "runs" / "damaged").mkdir()
    (tmp_path / "runs" / "damaged" / "plan.json").write_text("{")
    runs = RunList(tmp_path / "runs")
    assert {row.run for row in runs.rows().runs} == {"one", "week/two"}
    for name in ("../outside", "outside", "/etc", "other", ""):
        with pytest.raises(ConfigError, match="no run"):
            runs.figures(name)
    assert [row.run for row in RunList(tmp_path / "runs" / "one").rows().runs] == ["one"]
    assert RunList(None).rows().folder == ""
    assert RunList(tmp_path / "later").rows().runs == ()  # no evaluation was made yet


def test_figures_are_those_of_the_newest_results(tmp_path: Path) -> None:
    plan = write_run(tmp_path / "one", problems=2, samples=2, rewards=(0, 1, 0, 0))
    runs = RunList(tmp_path)
    before = runs.figures("one")
    assert before.summary == summarise(plan, read_samples(tmp_path / "one" / RESULTS), Counting(ks=(1, 2)))
    assert runs.figures("one") is before
    with (tmp_path / "one" / RESULTS).open("ab") as file:  # the first rollout ran again
        file.write(msgspec.json.encode(made_sample(plan, 0, 0, 1.0, trial=1)) + b"\n")
    after = runs.figures("one").summary
    assert [(row.solved, row.samples) for row in after.problems] == [(2, 2), (0, 2)]
    assert [row.reward for row in runs.rollouts("one", "problem-0").rollouts] == [0.0, 1.0, 1.0]


def test_the_threshold_is_that_of_the_runs_own_summary(tmp_path: Path) -> None:
    write_run(tmp_path / "one", problems=1, samples=1, rewards=(0.5,))
    (tmp_path / "one" / "summary.json").write_text(
        '{"threshold": 0.5, "passes": [], "ended": 1, "models": ["tiny"], "more": null}'
    )
    assert [row.solved for row in RunList(tmp_path).figures("one").summary.problems] == [1]
    assert [row.models for row in RunList(tmp_path).rows().runs] == [("tiny",)]


ENDLESS = "/dev/zero"
DEEP = b'{"more": ' + b"[" * 100_000


@pytest.mark.parametrize(
    "content",
    [DEEP, b'{"passes": [{"k": -5, "estimate": null, "left_out": 0}]}', ENDLESS],
    ids=["deep", "k", "endless"],
)
def test_a_damaged_summary_counts_as_none(tmp_path: Path, content: bytes | str) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name, problems=1, samples=1)
    put(tmp_path / "one" / "summary.json", content)
    runs = RunList(tmp_path)
    assert {row.run: row.passes for row in runs.rows().runs} == {"one": (), "two": ()}
    assert [row.k for row in runs.figures("one").summary.passes] == [1]


@pytest.mark.parametrize(
    "content",
    [b'{"settings": {"data_sha256": "", "options": {"a": ' + b"[" * 100_000, ENDLESS, None],
    ids=["deep", "endless", "pipe"],
)
def test_a_plan_that_cannot_be_read_hides_no_other_run(tmp_path: Path, content: bytes | str | None) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name, problems=1, samples=1)
    put(tmp_path / "one" / "plan.json", content)
    assert [row.run for row in RunList(tmp_path).rows().runs] == ["two"]


@pytest.mark.parametrize("content", [ENDLESS, None, 2**40], ids=["endless", "pipe", "huge"])
def test_results_that_are_endless_or_a_pipe_are_refused(tmp_path: Path, content: str | int | None) -> None:
    write_run(tmp_path / "one", problems=1, samples=1)
    put(tmp_path / "one" / RESULTS, content)
    for read in (lambda runs: runs.figures("one"), lambda runs: runs.rollouts("one", "problem-0")):
        with pytest.raises(ConfigError, match=r"not a regular file|larger than"):
            read(RunList(tmp_path))


def put(file: Path, content: bytes | str | int | None) -> None:
    """Have a file be this content, a link to it, so many zeros, or a pipe."""
    file.unlink(missing_ok=True)
    match content:
        case bytes():
            file.write_bytes(content)
        case str():
            file.symlink_to(content)
        case int():
            file.touch()
            os.truncate(file, content)
        case None:
            os.mkfifo(file)


def test_two_runs_are_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "before", problems=3, samples=1, rewards=(1, 0, 0))
    write_run(tmp_path / "after", problems=3, samples=1, rewards=(0, 1, 0))
    runs = RunList(tmp_path)
    compared = runs.comparison("before", "after")
    assert (compared.run, compared.other, compared.comparison.shared) == ("before", "after", 3)
    assert (compared.comparison.solved_by_first, compared.comparison.solved_by_second) == (1, 1)
    with pytest.raises(ConfigError, match="no run other"):
        runs.comparison("before", "other")


def test_a_problems_text_is_that_of_a_rollout_that_can_be_read(tmp_path: Path) -> None:
    write_run(tmp_path / "one", problems=1, samples=2)
    first, second = sorted((tmp_path / "one" / "trajectories").glob("*.json"))
    first.write_text("{")
    runs = RunList(tmp_path)
    assert "What is 2 + 2?" in runs.rollouts("one", "problem-0").text
    second.write_text("{")
    assert runs.rollouts("one", "problem-0").text == ""
    assert runs.rollouts("one", "no such problem").text == ""
