"""`python -m prorl_zmq.examples.train_torch` as a user meets it: mistakes, and the whole of it, stopped and resumed."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import psutil
import pytest
from documents import TRAIN_COMMAND

from prorl_zmq.examples.train_torch import __main__ as program
from prorl_zmq.system.installation import how_to_install

from ..trackers import readback

if TYPE_CHECKING:
    from pathlib import Path

PNG = b"\x89PNG\r\n"
needs_torch = pytest.mark.skipif(
    find_spec("torch") is None, reason="the example needs torch: install the extra `train`"
)


def test_without_torch_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "find_spec", lambda name: None if name == "torch" else find_spec(name))
    assert program.main([]) == 2
    assert capsys.readouterr().err == f"train_torch needs torch: {how_to_install('train')}\n"


@needs_torch
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--resume"], "there is no checkpoint at"),
        (["--steps", "0"], "--steps"),
        (["--group-size", "1"], "--group-size"),
        (["--lr", "many"], "--lr"),
        (["--lr", "nan"], "--lr"),
        (["--sandbox", "none"], "--sandbox"),
        (["--device", "tpu"], "is not cpu, cuda or cuda:N"),
        (["--device", "cuda:99"], "use --device cpu"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_mistakes_get_one_clear_line(
    arguments: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["--sandbox", "process", "--out", str(tmp_path), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line


@needs_torch
def test_a_folder_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for out, problem in ((tmp_path / "file", "it is not a folder"), (tmp_path / "file" / "out", "Not a directory")):
        assert program.main(["--sandbox", "process", "--out", str(out)]) == 2
        assert problem in capsys.readouterr().err
    (tmp_path / "checkpoint.pt").write_bytes(b"")
    assert program.main(["--sandbox", "process", "--out", str(tmp_path)]) == 2
    assert "--resume continues it" in capsys.readouterr().err


@needs_torch
def test_a_resumed_run_keeps_its_seed_and_needs_steps_to_make(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from prorl_zmq.examples.train_torch.weights import Checkpoint

    Checkpoint(7, "session", 3, 0, {}).save(tmp_path / "checkpoint.pt")
    for arguments, problem in ((["--seed", "4"], "has seed 3"), (["--steps", "7"], "give more --steps")):
        assert program.main(["--sandbox", "process", "--out", str(tmp_path), "--resume", *arguments]) == 2
        assert problem in capsys.readouterr().err


@needs_torch
@pytest.mark.proof
@pytest.mark.timeout(600)
def test_two_steps_through_the_service_a_stop_and_a_resumed_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    python, *arguments = shlex.split(TRAIN_COMMAND)
    assert python == "python"
    command = [sys.executable, "-P", *arguments, "--out", str(out), "--sandbox", "process"]
    options = [
        "--groups",
        "3",
        "--group-size",
        "6",
        "--epochs",
        "1",
        "--measure",
        "1",
        "--eval-every",
        "2",
        "--warm-steps",
        "120",
        "--log",
        "tensorboard",
    ]
    readback.library("tensorboardX")
    with subprocess.Popen([*command, *options, "--steps", "100"], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        children: list[psutil.Process] = []
        for line in run.stdout:
            if "step   2/100" in line:
                children = psutil.Process(run.pid).children(recursive=True)
                run.send_signal(signal.SIGINT)
        code = run.wait(60)
    assert code == 130
    assert len(children) >= 7, "the service's supervisor, two brokers, three stage processes and the engine"
    _, left = psutil.wait_procs(children, 10)  # sandboxes of jobs under way end as their folder is gone
    assert not left
    made = [json.loads(line)["step"] for line in (out / "steps.jsonl").read_text().splitlines()]
    assert made[:2] == [0, 1]

    steps = len(made) + 2
    done = subprocess.run(
        [*command, *options, "--steps", str(steps), "--resume"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "continuing after step" in done.stdout
    records = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(steps))
    for record in records:
        assert record["stats"]["logprob_gap"] < 1e-4, "the engine's log-probs are the learner's"
        assert 0 <= record["stats"]["staleness_max"] <= 4
        assert record["batch"]["kept_groups"] <= 3
        assert record["batch"]["opened_s"] <= record["batch"]["met_s"] <= record["learn_from_s"] <= record["pushed_s"]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == steps
    assert summary["overlap"]["steps"] == 1
    assert {"shell", "math"} == set(summary["tests"][-1]["reward"])
    (logged,) = (out / "trackers" / "tensorboard").iterdir()  # a run that is resumed is the same one
    points, tables = readback.tensorboard(out / "trackers", logged.name)
    assert {step for step, _ in points["batch/kept_groups"]} == set(range(steps))
    assert dict(points["batch/kept_groups"]) == {each["step"]: each["batch"]["kept_groups"] for each in records}
    assert {"batch/launched", "batch/kept/reward/mean", "reward/mean", "staleness/most", "seconds/tool.bash"} <= set(
        points
    )
    assert dict(points["learn/loss"])[steps - 1] == pytest.approx(records[-1]["stats"]["loss"], rel=1e-5)
    assert "[assistant]" in tables[0]
    assert (out / "train_torch.png").read_bytes().startswith(PNG)
    assert [path.name for path in (out / "weights").iterdir()] == [f"{steps}.safetensors"]
