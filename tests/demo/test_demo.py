"""`prorl demo` as a user runs it, for two steps; `.ci/run` runs it whole and checks that the reward rises."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from support.commands import prorl

from ..trackers import readback

if TYPE_CHECKING:
    from pathlib import Path

PNG = b"\x89PNG\r\n"


@pytest.mark.proof
def test_two_steps_leave_the_picture_the_conversations_and_the_figures(tmp_path: Path) -> None:
    readback.library("tensorboardX")
    flags = ("--steps", "2", "--sandbox", "process", "--out", tmp_path / "out", "--log", "tensorboard")
    done = prorl("demo", *flags)
    assert done.returncode == 0, done.stderr
    assert "what the policy runs is not isolated" in done.stdout
    assert "step  2/2: mean reward" in done.stdout
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["rollouts"] == sum(summary["outcomes"].values()) == 80
    assert summary["outcomes"] == {"completed": 80}
    assert 0 <= summary["reward_first"] < 0.2
    assert summary["seconds"] > 0
    assert summary["logprob_gap"] < 1e-4
    rows = [json.loads(line) for line in (tmp_path / "out" / "trajectories.jsonl").read_text().splitlines()]
    assert [row["weight_version"] for row in rows] == [0] * 40 + [1] * 40
    (run,) = (tmp_path / "out" / "trackers" / "tensorboard").iterdir()
    points, (table,) = readback.tensorboard(tmp_path / "out" / "trackers", run.name)
    assert points["reward/mean"][0] == (0, pytest.approx(summary["rewards"][0]))
    assert points["rollouts/completed"] == [(0, 40.0), (1, 40.0)]
    assert points["staleness/mean"] == [(0, 0.0), (1, 0.0)]
    assert {
        "seconds/run",
        "seconds/engine",
        "seconds/tool.bash",
        "seconds/step",
        "learn/gradient_norm",
    } <= points.keys()
    assert table.count("Write to answer.txt") == 8
    assert (tmp_path / "out" / "reward.png").read_bytes().startswith(PNG)


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = prorl("demo", "--out", tmp_path / "file" / "out", "--sandbox", "process")
    assert done.returncode == 2
    assert "--out" in done.stderr.splitlines()[-1]
