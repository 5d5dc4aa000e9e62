"""Each real library, without a network: what was logged is read back from what it wrote, also after a resume."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from prorl_zmq.trackers import Conversation, open_tracker
from prorl_zmq.trackers.conversation import conversation
from prorl_zmq.wire.messages.jobs import Outcome, Result

from . import readback

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = "<script>alert(1)</script> <img src=x onerror=alert(1)> \x1b[31m\n\n</pre>\n```\n# [x](javascript:alert(1))"
RESULT = Result(job_id="job-1", task="math", outcome=Outcome.COMPLETED, reward=0.5, tokens=7)
CONFIG = {"model": "tiny", "learning_rate": 0.001}
POINTS = {"reward/mean": [(0, 0.0), (1, 0.5), (1, 0.75), (2, 1.0)], "seconds/tool.bash": [(0, 2.0), (1, 2.0)]}
"""What the two halves of a run log: the second one makes a step again."""


def hostile() -> Conversation:
    return conversation(RESULT, [("user", HOSTILE), ("tool", HOSTILE * 1000)])


def log_twice(name: str, folder: Path) -> dict[str, str]:
    """Log a run, and continue it; return where each half was."""
    wheres = {}
    with open_tracker(name, project="sums", run="run-1", folder=folder, config=CONFIG) as tracker:
        tracker.log({"reward/mean": 0.0, "seconds/tool.bash": 2.0}, 0)
        tracker.log({"reward/mean": 0.5, "seconds/tool.bash": 2.0}, 1)
        tracker.samples([hostile(), Conversation("job-2", "math", "timeout", None, 0, "[user]\nhello")], 1)
    wheres["first"] = tracker.where[name]
    with open_tracker(name, project="sums", run="run-1", folder=folder, config=CONFIG) as tracker:
        tracker.log({"reward/mean": 0.75}, 1)
        tracker.log({"reward/mean": 1.0}, 2)
    wheres["second"] = tracker.where[name]
    return wheres


@pytest.mark.filterwarnings("ignore:html5lib")  # TensorBoard's copy of it warns of itself
def test_tensorboard(tmp_path: Path) -> None:
    readback.library("tensorboardX")
    wheres = log_twice("tensorboard", tmp_path)
    assert wheres["first"] == wheres["second"] == str(tmp_path / "tensorboard" / "run-1")
    points, (table,) = readback.tensorboard(tmp_path, "run-1")
    assert points == POINTS
    from tensorboard.plugin_util import markdown_to_safe_html

    assert "<script>alert(1)</script>" in table
    shown = markdown_to_safe_html(table)  # as TensorBoard's own page has it
    assert shown.startswith("<pre><code>==== job-1: math, completed, reward 0.5, 7 tokens\n")
    assert shown.endswith("[user]\nhello\n</code></pre>")
    inside = shown.removeprefix("<pre><code>").removesuffix("</code></pre>")
    assert "<" not in inside
    assert "&lt;script&gt;" in inside


@pytest.mark.proof
@pytest.mark.usefixtures("offline")
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readback.library("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    wheres = log_twice("wandb", tmp_path)
    assert all(where.startswith(str(tmp_path / "wandb")) and where.endswith("run-1") for where in wheres.values())
    points, (table,) = readback.wandb(tmp_path)
    assert {name: points[name] for name in POINTS} == POINTS
    assert table["columns"] == ["job_id", "task", "outcome", "reward", "tokens", "text"]
    assert table["data"][0] == ["job-1", "math", "completed", 0.5, 7, hostile().text]
    assert table["data"][1][3] is None


@pytest.mark.proof
@pytest.mark.usefixtures("offline")
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readback.library("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    wheres = log_twice("trackio", tmp_path)
    assert wheres == dict.fromkeys(["first", "second"], "trackio show --project sums")
    points, (table,) = readback.trackio(tmp_path / "trackio", "sums")
    assert {name: points[name] for name in POINTS} == POINTS
    assert [row["text"] for row in table] == [hostile().text, "[user]\nhello"]
    assert (table[0]["job_id"], table[0]["reward"], table[1]["reward"]) == ("job-1", 0.5, None)


@pytest.mark.proof
@pytest.mark.usefixtures("offline")
@pytest.mark.filterwarnings("default")  # MLflow's own
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readback.library("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    wheres = log_twice("mlflow", tmp_path)
    assert wheres["first"] == wheres["second"]
    points, (table,), run = readback.mlflow("sums", tuple(POINTS))
    assert {name: sorted(each) for name, each in points.items()} == POINTS
    assert run.info.run_name == "run-1"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"model": "tiny", "learning_rate": "0.001"}
    assert table["columns"][-1] == "text"
    assert [row[-1] for row in table["data"]] == [hostile().text, "[user]\nhello"]


@pytest.mark.proof
@pytest.mark.usefixtures("offline")
def test_several_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorboardX", "wandb"):
        readback.library(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    with open_tracker("tensorboard", "wandb", "tensorboard", run="run-2", folder=tmp_path) as tracker:
        tracker.log({"reward/mean": 0.25}, 3)
    assert list(tracker.where) == ["tensorboard", "wandb"]
    expected = {"reward/mean": [(3, 0.25)]}
    assert readback.tensorboard(tmp_path, "run-2")[0] == readback.wandb(tmp_path)[0] == expected


@pytest.mark.proof
@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_server_that_never_answers_holds_nobody_up(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    readback.library(name)
    with socket.create_server(("127.0.0.1", 0)) as server:  # it accepts, and says nothing
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        monkeypatch.setenv("WANDB_BASE_URL", url)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_MODE", "online")
        tracker = open_tracker(name, run="run-3", folder=tmp_path, close_s=4.0)
        for step in range(1000):
            tracker.log({"reward/mean": 1.0}, step)
        server.accept()[0].close()  # it has come so far
        tracker.close()
    assert caplog.messages[-1].endswith("did not end its run in time, and was killed: the last values may be lost")
    assert len(caplog.messages) <= 2
    assert tracker.where == {}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library tells anybody that it is used."""
    for name in ("HF_HUB_OFFLINE", "DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
