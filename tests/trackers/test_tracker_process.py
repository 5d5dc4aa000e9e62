"""A tracker that is absent, fails, hangs, or dies never ends a run: one warning, in real processes.

The tracker is TensorBoard, whose files say what arrived; it hangs since its process is stopped, or its disk full.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import psutil
import pytest
from command_lines import words_of
from needed import lacking
from support.waiting import until

import prorl_zmq
from prorl_zmq.errors import ConfigError
from prorl_zmq.trackers import Conversation, open_tracker
from prorl_zmq.trackers.tracker_process import PENDING_BYTES

from . import readback

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_zmq.trackers import Tracker

WAIT_S = 60.0
ROW = Conversation("j", "t", "completed", 1.0, 1, "x" * 12_000)


@pytest.fixture
def tensorboard(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[..., Tracker]:
    readback.library("tensorboardX")
    caplog.set_level(logging.WARNING, "prorl.trackers")
    return lambda **more: open_tracker("tensorboard", run="run", folder=tmp_path, **more)


def only_child() -> psutil.Process:
    living = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    (child,) = [each for each in living if "prorl_zmq.trackers.tracker_child" in words_of(each)]
    return child


@pytest.mark.proof(quick=True)
def test_a_tracker_that_cannot_begin_is_told_once_and_tried_again(
    tensorboard: Callable[..., Tracker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    steps = count()

    def log_until(condition: Callable[[], object], what: str) -> None:
        def condition_after_a_step() -> bool:
            tracker.log({"value": 1}, next(steps))
            return bool(condition())

        until(condition_after_a_step, what)

    with tensorboard() as tracker:
        log_until(lambda: caplog.messages, "a warning")
        (tmp_path / "tensorboard").unlink()
        log_until(lambda: tracker.where, "the run to begin")
    (message,) = caplog.messages
    assert message.startswith("tracker tensorboard: it cannot begin its run, and tries again: NotADirectoryError: ")
    points = readback.tensorboard(tmp_path, "run")[0]["value"]
    assert [step for step, _ in points] == list(range(next(steps)))  # nothing is lost


def test_a_tracker_that_can_never_begin_does_not_hold_up_the_end(
    tensorboard: Callable[..., Tracker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    with tensorboard(close_s=WAIT_S) as tracker:
        for step in range(100):
            tracker.log({"value": 1}, step)
    (message,) = caplog.messages
    assert "tries again" in message


def test_values_that_a_run_does_not_take_are_told_once(
    tensorboard: Callable[..., Tracker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tensorboard() as tracker:
        for step in (1, 2**63, 2**63, 2):  # beyond what TensorBoard's files take
            tracker.log({"value": 1}, step)
    (message,) = caplog.messages
    assert message.startswith("tracker tensorboard: it loses what it cannot take: ")
    assert readback.tensorboard(tmp_path, "run")[0]["value"] == [(1, 1.0), (2, 1.0)]
    assert (tmp_path / "tensorboard.log").read_text().count("it loses") == 2


def test_a_tracker_that_hangs_is_told_once_and_ended_by_close(
    tensorboard: Callable[..., Tracker], caplog: pytest.LogCaptureFixture
) -> None:
    tracker = tensorboard(close_s=0.5)
    child = only_child()
    child.send_signal(signal.SIGSTOP)
    for step in range(3 * PENDING_BYTES // 100_000):
        tracker.samples([ROW] * 8, step)
        tracker.log({"value": step}, step)
    (message,) = caplog.messages
    assert message == "tracker tensorboard takes nothing at the moment: what is logged until it does is lost"
    tracker.close()
    assert caplog.messages[1:] == [
        "tracker tensorboard did not end its run in time, and was killed: the last values may be lost"
    ]
    assert not child.is_running()
    assert not tracker.is_on
    tracker.log({"value": 1}, 1)
    tracker.close()


@pytest.mark.proof(quick=True)
def test_a_pause_of_the_tracker_loses_nothing(tensorboard: Callable[..., Tracker], tmp_path: Path) -> None:
    steps = 400
    with tensorboard() as tracker:
        child = only_child()
        child.send_signal(signal.SIGSTOP)
        for step in range(steps):
            tracker.log({f"value-{number}": step for number in range(20)}, step)
            if step % 100 == 0:
                tracker.samples([ROW] * 8, step)
        child.send_signal(signal.SIGCONT)
    points, tables = readback.tensorboard(tmp_path, "run")
    assert points["value-19"][-1] == (steps - 1, steps - 1)
    assert len(tables) == 4


def test_a_tracker_that_dies_is_told_once(
    tensorboard: Callable[..., Tracker], caplog: pytest.LogCaptureFixture
) -> None:
    with tensorboard() as tracker:
        child = only_child()
        child.kill()
        until(lambda: child.status() == psutil.STATUS_ZOMBIE, "its end")
        for step in range(100):
            tracker.log({"value": step}, step)
    assert caplog.messages == ["tracker tensorboard has ended (exit code -9), and is off"]


TRAINER = """
    import resource, sys
    from pathlib import Path
    from prorl_zmq.trackers import open_tracker
    tracker = open_tracker("tensorboard", run="run", folder=Path(sys.argv[1]), close_s=3)
    for step in range(STEPS):
        tracker.log({f"value-{number}": step for number in range(50)}, step)
    print("trained", flush=True)
"""


def trainer(end: str, steps: int = 200) -> list[str]:
    return [sys.executable, "-P", "-c", f"STEPS = {steps}\n" + textwrap.dedent(TRAINER) + textwrap.dedent(end)]


@pytest.mark.proof(quick=True)
def test_a_trainer_that_is_killed_leaves_its_run_whole(tmp_path: Path) -> None:
    readback.library("tensorboardX")
    with subprocess.Popen([*trainer("sys.stdin.read()", 50), str(tmp_path)], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"trained\n"
        (child,) = psutil.Process(process.pid).children()
        process.kill()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the tracker's end")
    # As many as the socket has room for: what it has not taken yet is lost with the trainer.
    assert readback.tensorboard(tmp_path, "run")[0]["value-49"][-1] == (49, 49.0)


@pytest.mark.proof
def test_a_full_disk_ends_no_run(tmp_path: Path) -> None:
    """No file may grow beyond 10 kB, which a write beyond finds out as it would on a full disk."""
    readback.library("tensorboardX")
    command = trainer("tracker.close()")
    command[-1] = command[-1].replace(
        "tracker = ", "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000,) * 2)\ntracker = "
    )
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.count("it loses what it cannot take: OSError: [Errno 27] File too large") == 1
    assert done.stderr.count("tracker tensorboard") <= 2  # its writer has ended, so its close may hang


def test_a_library_that_is_absent_is_named_with_its_remedy(tmp_path: Path) -> None:
    code = """
        import sys
        sys.path[:] = [path for path in sys.path if "site-packages" not in path]
        sys.path += sys.argv[1:]
        from prorl_zmq.trackers import open_tracker
        open_tracker("wandb")
    """
    here = tmp_path / "site-packages-of-its-own"
    here.mkdir()
    for module in (msgspec, np, prorl_zmq):
        (here / module.__name__).symlink_to(Path(module.__file__).parent)
    libraries = Path(np.__file__).parents[1] / "numpy.libs"
    if libraries.exists():
        (here / "numpy.libs").symlink_to(libraries)
    (here / "prorl_zmq-0.dist-info").mkdir()
    (here / "prorl_zmq-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: prorl_zmq\nVersion: 0\n")
    points = "[prorl_zmq.trackers]\nwandb = prorl_zmq.trackers.wandb:Wandb\n"
    (here / "prorl_zmq-0.dist-info" / "entry_points.txt").write_text(points)
    done = subprocess.run(
        [sys.executable, "-P", "-S", "-c", textwrap.dedent(code), str(here)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.splitlines()[-1].endswith(
        "ConfigError: the tracker wandb needs wandb, which is not installed: pip install wandb"
    ), done.stderr


@pytest.mark.parametrize(
    ("names", "more", "said"),
    [
        (("comet",), {}, "'comet' is not a kind of tracker; installed are: mlflow, tensorboard, trackio, wandb"),
        ((), {"run": "a/b"}, "run 'a/b': letters, digits and ._- make its name, at most 64"),
        ((), {"project": ""}, "project ''"),
    ],
)
def test_what_is_wrong_is_said_at_once(names: tuple[str, ...], more: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        open_tracker(*names, **more)


def test_a_folder_that_cannot_be_is_said(tmp_path: Path) -> None:
    readback.library("tensorboardX")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Not a directory"):
        open_tracker("tensorboard", folder=tmp_path / "file" / "trackers")
    with pytest.raises(ConfigError, match="config is larger than"):
        open_tracker("tensorboard", folder=tmp_path, config={str(number): "x" * 500 for number in range(300)})


def test_other_ranks_log_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readback.library("tensorboardX")
    monkeypatch.setenv("RANK", "1")
    with open_tracker("tensorboard", folder=tmp_path / "trackers") as tracker:
        assert not tracker.is_on
        tracker.log({"value": 1}, 0)
        tracker.samples([ROW], 0)
    assert tracker.where == {}
    assert not (tmp_path / "trackers").exists()


RANKS = """
    import sys
    from pathlib import Path
    from torch import distributed
    from prorl_zmq.trackers import open_tracker
    rank = int(sys.argv[1])
    distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/meet", rank=rank, world_size=2)
    with open_tracker("tensorboard", run="run", folder=Path(sys.argv[2])) as tracker:
        tracker.log({"rank": rank}, 0)
    distributed.destroy_process_group()
"""


@pytest.mark.proof
def test_of_a_distributed_trainer_rank_0_logs(tmp_path: Path) -> None:
    readback.library("tensorboardX")
    if subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, check=False).returncode:
        lacking("trainers", "PyTorch is not installed")
    command = [sys.executable, "-P", "-c", textwrap.dedent(RANKS)]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)], env=environment) for rank in range(2)]
    assert [each.wait(WAIT_S) for each in ranks] == [0, 0]
    assert readback.tensorboard(tmp_path, "run")[0] == {"rank": [(0, 0.0)]}
