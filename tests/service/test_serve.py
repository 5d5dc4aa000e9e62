"""`prorl serve` and the commands that talk to it, as a user runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from prorl_zmq import RolloutClient

from .conftest import until

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S = 60.0
ROOT = Path(__file__).resolve().parents[2]
TOPOLOGY = """
[rollout_broker]
heartbeat_s = 0.2
lease_s = 2.0
[sandbox]
kind = "process"
"""


class Served:
    """A running `prorl serve`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "topology.toml"
        self.config.write_text(TOPOLOGY)
        self.run_dir = folder / "run"
        self.front_door = f"ipc://{self.run_dir}/front_door"
        self.lines: list[str] = []
        # In the folder of the sources, whose prorl_zmq/ lacks the mapped packages: it must not hide the installed one.
        self.process = subprocess.Popen(
            [*PRORL, "serve", *self.flags()], cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def flags(self) -> list[str]:
        return ["--config", str(self.config), "--run-dir", str(self.run_dir)]

    def wait_ready(self) -> None:
        until(lambda: any("ready at" in line for line in self.lines) or self.process.poll() is not None, "it", START_S)
        assert self.process.poll() is None, "".join(self.lines)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, role: str) -> int:
        (child,) = [one.pid for one in self.children() if f"--role {role}" in " ".join(one.cmdline())]
        return child

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*PRORL, *arguments, "--connect", self.front_door]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=self.folder)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(40)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))


PRORL = [sys.executable, "-P", "-m", "prorl_zmq.cli", "prorl"]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        served = Served(Path(folder))
        try:
            served.wait_ready()
            yield served
        finally:
            served.close()


@pytest.fixture
def own_served() -> Iterator[Served]:
    """A service that the test may break."""
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        served = Served(Path(folder))
        try:
            served.wait_ready()
            yield served
        finally:
            served.close()


MATH = {"task": "math", "instance": {"problem": "1+1?", "ground_truth": "2"}, "sampling": {"max_tokens": 8}}
SHELL = {
    "task": "shell",
    "instance": {"instruction": "Write 1 to answer.txt.", "check": "echo 'reward: 0.25'", "files": {"data.txt": "1\n"}},
    "episode": {"max_turns": 2, "max_tokens": 400},
    "sampling": {"max_tokens": 40, "seed": 3},
}


def test_submit_runs_both_tasks_and_writes_what_came_of_them(served: Served) -> None:
    tasks = served.folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(job) + "\n" for job in (MATH, SHELL, MATH, SHELL)))
    done = served.run("submit", str(tasks), "--out", "results")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("completed") == 2
    results = [json.loads(line) for line in (served.folder / "results" / "results.jsonl").read_text().splitlines()]
    assert sorted((result["task"], result["reward"]) for result in results) == [
        ("math", 0.0),
        ("math", 0.0),
        ("shell", 0.25),
        ("shell", 0.25),
    ]
    for result in results:
        arrays = np.load(served.folder / "results" / "arrays" / f"{result['job_id']}.npz")
        assert len(arrays["token_ids"]) == len(arrays["logprobs"]) == result["tokens"] > 0
        assert (arrays["logprobs"][arrays["loss_mask"]] <= 0).all()
        assert (arrays["logprobs"][~arrays["loss_mask"]] == 0).all()
        assert (arrays["weight_versions"][~arrays["loss_mask"]] == -1).all()
        assert arrays["turns"][:, 1].max() == result["tokens"]


def test_submit_of_a_wrong_job_is_one_line(served: Served) -> None:
    tasks = served.folder / "wrong.jsonl"
    tasks.write_text(json.dumps({"task": "math", "instance": {"problem": "1+1?"}}) + "\n")
    done = served.run("submit", str(tasks))
    assert done.returncode == 2
    assert "missing required field `ground_truth`" in done.stderr.splitlines()[-1]


def test_status_shows_stages_and_backends(served: Served) -> None:
    done = served.run("status")
    assert done.returncode == 0
    for word in ("INIT", "RUN", "EVAL", "engine-0", "ready", "tasks: math, shell"):
        assert word in done.stdout


def test_cancel_of_an_unknown_job(served: Served) -> None:
    done = served.run("cancel", "never-was")
    assert (done.returncode, done.stdout) == (1, "never-was: unknown\n")


def test_backends_come_and_go(served: Served) -> None:
    assert served.run("backends", "add", "mine", "ipc:///tmp/nobody").returncode == 0
    assert served.run("backends", "drain", "mine").returncode == 0
    listed = served.run("backends", "list").stdout
    assert "mine" in listed
    assert "draining" in listed
    assert served.run("backends", "remove", "mine").returncode == 0
    done = served.run("backends", "remove", "mine")
    assert done.returncode == 2
    assert done.stderr == "prorl: no backend is called mine\n"


def test_second_service_in_one_run_folder_is_refused(served: Served) -> None:
    done = subprocess.run([*PRORL, "serve", *served.flags()], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "another service runs in" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("broker", ["rollout", "backend"])
def test_second_broker_on_one_endpoint_is_refused(served: Served, broker: str) -> None:
    command = [*PRORL, "broker", broker, *served.flags()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "is in use by another process" in done.stderr.splitlines()[-1]
    assert served.run("status").returncode == 0


def test_child_that_is_killed_is_started_again(own_served: Served) -> None:
    with RolloutClient(own_served.front_door) as client:
        for role in ("init", "run", "eval"):
            killed = own_served.child(role)
            before = {stage.stage_id for stage in client.status().stages}
            os.kill(killed, signal.SIGKILL)
            until(lambda before=before, role=role: _new(client, before, role), f"another {role} process")
            assert own_served.child(role) != killed


def _new(client: RolloutClient, before: set[str], role: str) -> list[str]:
    stages = client.status().stages
    return [stage.stage_id for stage in stages if stage.role == role and stage.stage_id not in before]


def test_sigterm_leaves_nothing(own_served: Served) -> None:
    children = own_served.children()
    assert len(children) >= 6
    own_served.process.send_signal(signal.SIGTERM)
    assert own_served.process.wait(40) == 0
    assert not [child for child in children if child.is_running()]
    assert [path.name for path in own_served.run_dir.iterdir() if path.is_socket()] == []


def test_children_die_with_the_supervisor(own_served: Served) -> None:
    children = own_served.children()
    os.kill(own_served.process.pid, signal.SIGKILL)
    own_served.process.wait(10)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []


@pytest.mark.parametrize(
    ("python", "said"), [("/nonexistent/python", "cannot be started"), ("/bin/false", "has no prorl")]
)
def test_an_interpreter_without_an_engine_is_named_at_once(tmp_path: Path, python: str, said: str) -> None:
    """`prorl serve` waited for ever for an engine that could not be started."""
    config = tmp_path / "topology.toml"
    config.write_text(f'{TOPOLOGY}\n[backends]\npython = "{python}"\n')
    command = [*PRORL, "serve", "--config", str(config), "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert f"{python} {said}" in done.stderr
