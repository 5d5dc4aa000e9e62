"""`prorl demo` as a user runs it, for a few steps; `.ci/run` runs it whole and checks that the reward rises."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import psutil
import pytest
from documents import DEMO_COMMANDS
from support.commands import prorl

from prorl_zmq.commands.app import run as run_command
from prorl_zmq.demo.grpo import Grpo, Settings
from prorl_zmq.demo.trainer import Trainer
from prorl_zmq.inference.embedded.base_policy import base_policy
from prorl_zmq.inference.policy import save_arrays

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
    assert "step   2/2: reward" in done.stdout
    assert "reward: 2 steps are too few to tell" in done.stdout
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["rollouts"] == 80
    assert summary["failed"] == 0
    assert 0 <= summary["reward_first"] < 0.25
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
        "batch/launched",
    } <= points.keys()
    assert table.count("Write to answer.txt") == 8
    assert (tmp_path / "out" / "reward.png").read_bytes().startswith(PNG)
    assert [path.name for path in (tmp_path / "out" / "weights").iterdir()] == ["2.npz"]


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_overlapping_steps_a_stop_and_a_resumed_run(tmp_path: Path) -> None:
    begin, resume = (shlex.split(line) for line in DEMO_COMMANDS)
    assert begin[:3] == resume[:3] == ["prorl", "demo", "--overlap"]
    assert resume[-1] == "--resume"
    out = tmp_path / "out"
    command = [sys.executable, "-P", "-m", "prorl_zmq.cli", *begin[:3], "--out", str(out), "--sandbox", "process"]
    options = ["--groups", "3", "--group-size", "6", "--epochs", "2"]
    with subprocess.Popen([*command, *options, "--steps", "100"], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        children: list[psutil.Process] = []
        said = ""
        for line in run.stdout:
            said += line
            if "step   2/100" in line:
                children = psutil.Process(run.pid).children(recursive=True)
                run.send_signal(signal.SIGINT)
        code = run.wait(60)
    assert code == 130
    assert "--resume continues from the last whole step" in said
    assert len(children) >= 7, "the service's supervisor, two brokers, three stage processes and the engine"
    _, left = psutil.wait_procs(children, 10)  # sandboxes of jobs under way end as their folder is gone
    assert not left
    made = [json.loads(line)["step"] for line in (out / "steps.jsonl").read_text().splitlines()]
    assert made[:2] == [0, 1]

    steps = len(made) + 2
    done = prorl(*begin[1:3], "--out", out, "--sandbox", "process", *options, "--steps", str(steps), "--resume")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(steps))
    for record in records:
        assert record["stats"]["logprob_gap"] < 1e-4, "the engine's log-probs are the learner's"
        assert 0 <= record["stats"]["staleness_max"] <= 4
        assert record["kept_groups"] <= 3
        assert record["opened_s"] <= record["met_s"] <= record["learn_from_s"] <= record["pushed_s"]
    first = len(made)
    assert records[first + 1]["opened_s"] <= records[first]["learned_s"], "the next batch began before this was learned"
    assert len(json.loads((out / "summary.json").read_text())["rewards"]) == steps
    assert [path.name for path in (out / "weights").iterdir()] == [f"{steps}.npz"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--resume"], "there is no checkpoint at"),
        (["--steps", "0"], "--steps"),
        (["--group-size", "1"], "--group-size"),
        (["--lr", "many"], "--lr"),
        (["--lr", "nan"], "--lr"),
        (["--sandbox", "none"], "--sandbox"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_mistakes_get_one_clear_line(
    arguments: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("prorl", ["demo", "--sandbox", "process", "--out", str(tmp_path), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line


def test_an_earlier_run_moves_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was overwritten without a word."""
    monkeypatch.setattr(Trainer, "run", interrupted)
    names = ("reward.png", "steps.jsonl", "trajectories.jsonl", "summary.json", "checkpoint.npz")
    command = ["demo", "--sandbox", "process", "--out", str(tmp_path)]
    for number in (1, 2):
        for name in names:
            (tmp_path / name).write_text(f"{number}")
        assert run_command("prorl", command) == 130
        said = capsys.readouterr().out
        assert f"the run that {tmp_path} had is in {tmp_path / 'earlier' / str(number)}\n" in said
        assert "stopped before the first whole step\n" in said
        for name in names:
            assert (tmp_path / "earlier" / str(number) / name).read_text() == f"{number}"
        assert not (tmp_path / "checkpoint.npz").exists()


def test_a_stop_names_the_flag_that_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped_after_a_step(trainer: Trainer, *_: object) -> NoReturn:
        (tmp_path / "checkpoint.npz").write_text("1")
        interrupted(trainer)

    monkeypatch.setattr(Trainer, "run", stopped_after_a_step)
    assert run_command("prorl", ["demo", "--sandbox", "process", "--out", str(tmp_path)]) == 130
    assert f"stopped; --out {tmp_path} --resume continues from the last whole step" in capsys.readouterr().out


def interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for out, problem in ((tmp_path / "file", "it is not a folder"), (tmp_path / "file" / "out", "Not a directory")):
        assert run_command("prorl", ["demo", "--sandbox", "process", "--out", str(out)]) == 2
        assert problem in capsys.readouterr().err


def test_a_resumed_run_keeps_its_seed_and_needs_steps_to_make(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learner = Grpo(base_policy(), Settings())
    learner.weight_version = 7
    run = json.dumps({"session": "session", "seed": 3, "position": 0})
    save_arrays(tmp_path / "checkpoint.npz", {**learner.state(), "run": np.array(run)})
    resume = ["demo", "--sandbox", "process", "--out", str(tmp_path), "--resume"]
    for arguments, problem in ((["--seed", "4"], "has seed 3"), (["--steps", "7"], "give it more --steps")):
        assert run_command("prorl", [*resume, *arguments]) == 2
        assert problem in capsys.readouterr().err
    (tmp_path / "checkpoint.npz").write_bytes(b"no arrays")
    assert run_command("prorl", resume) == 2
    assert "is not a checkpoint of this program" in capsys.readouterr().err
