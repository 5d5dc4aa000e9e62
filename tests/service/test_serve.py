"""`prorl serve` and the commands that talk to it, as a user runs them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import psutil
import pytest
from support.commands import prorl
from support.services import Service, serving
from support.waiting import until

from prorl_zmq import Backend, Job, RolloutClient
from prorl_zmq.security.keys import KeyFolder
from prorl_zmq.system.run_folder import RUN_DIR_MARK, own_run_dir
from prorl_zmq.wire.messages.base import KeyRole
from prorl_zmq.wire.messages.engines import WeightUpdate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from subprocess import CompletedProcess

    from support.services import SharedService

START_S = 60.0
TOPOLOGY = """
[rollout_broker]
heartbeat_s = 0.2
lease_s = 2.0
[sandbox]
kind = "process"
"""


def living(processes: list[psutil.Process]) -> list[str]:
    """Those that have not ended; in some containers nobody reaps what has lost its parent."""
    found = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.NoSuchProcess:
            continue
    return found


def using(words: str) -> list[str]:
    """The command lines and folders of all processes that have these words in them."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join([*process.cmdline(), process.cwd()])
        except psutil.Error:
            continue
        if words in line:
            found.append(line)
    return found


@pytest.fixture
def own_served() -> Iterator[Service]:
    """A service that the test may break, started as a user starts it."""
    with serving(TOPOLOGY, interpreter=True) as service:
        yield service


MATH = {"task": "math", "instance": {"problem": "1+1?", "ground_truth": "2"}, "sampling": {"max_tokens": 8}}
SHELL = {
    "task": "shell",
    "instance": {"instruction": "Write 1 to answer.txt.", "check": "echo 'reward: 0.25'", "files": {"data.txt": "1\n"}},
    "episode": {"max_turns": 2, "max_tokens": 400},
    "sampling": {"max_tokens": 40, "seed": 3},
}


def test_submit_runs_both_tasks_and_writes_what_came_of_them(served: SharedService) -> None:
    tasks = served.folder / "tasks.jsonl"
    recorded = {**MATH, "record": ["top_logprobs:3"]}
    tasks.write_text("".join(json.dumps(job) + "\n" for job in (recorded, SHELL, MATH, SHELL)))
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
    (kept,) = (served.folder / "results" / "records").iterdir()
    records = np.load(kept)
    generated = np.flatnonzero(np.load(kept.parents[1] / "arrays" / kept.name)["loss_mask"])
    assert records["top_ids"].shape == (len(generated), 3)
    np.testing.assert_array_equal(records["top_logprobs_rows"], generated)


def test_submit_of_a_wrong_job_is_one_line(served: SharedService) -> None:
    tasks = served.folder / "wrong.jsonl"
    tasks.write_text(json.dumps({"task": "math", "instance": {"problem": "1+1?"}}) + "\n")
    done = served.run("submit", str(tasks))
    assert done.returncode == 2
    assert "missing required field `ground_truth`" in done.stderr.splitlines()[-1]


def test_status_shows_stages_and_backends(served: SharedService) -> None:
    done = served.run("status")
    assert done.returncode == 0
    for word in (
        "INIT",
        "RUN",
        "EVAL",
        "engine-0",
        "ready",
        "tasks: code, environment, harbor, harness, math, outside, sample, score, shell, stem, swe",
    ):
        assert word in done.stdout


def test_cancel_of_an_unknown_job(served: SharedService) -> None:
    done = served.run("cancel", "never-was")
    assert (done.returncode, done.stdout) == (1, "never-was: unknown\n")


def test_backends_come_and_go(served: SharedService) -> None:
    assert served.run("backends", "add", "mine", "ipc:///tmp/nobody").returncode == 0
    assert served.run("backends", "drain", "mine").returncode == 0
    listed = served.run("backends", "list").stdout
    assert "mine" in listed
    assert "draining" in listed
    assert served.run("backends", "remove", "mine").returncode == 0
    done = served.run("backends", "remove", "mine")
    assert done.returncode == 2
    assert done.stderr == "prorl: no backend is called mine\n"


def test_second_service_in_one_run_folder_is_refused(served: SharedService) -> None:
    done = prorl("serve", *served.flags())
    assert done.returncode == 2
    assert "another service or node runs in" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("broker", ["rollout", "backend"])
def test_second_broker_on_one_journal_is_refused(served: SharedService, broker: str) -> None:
    done = prorl("broker", broker, *served.flags())
    assert done.returncode == 1
    assert "is in use by another process" in done.stderr.splitlines()[-1]
    assert served.run("status").returncode == 0


@pytest.mark.proof
def test_child_that_is_killed_is_started_again(own_served: Service) -> None:
    with RolloutClient(own_served.front_door) as client:
        for role in ("init", "run", "eval"):
            killed = own_served.child(f"stage_{role}.json")
            before = {stage.stage_id for stage in client.status().stages}
            os.kill(killed, signal.SIGKILL)
            until(lambda before=before, role=role: _new(client, before, role), f"another {role} process")
            assert own_served.child(f"stage_{role}.json") != killed


def _new(client: RolloutClient, before: set[str], role: str) -> list[str]:
    stages = client.status().stages
    return [stage.stage_id for stage in stages if stage.role == role and stage.stage_id not in before]


def test_sigterm_leaves_nothing(own_served: Service) -> None:
    children = own_served.children()
    assert len(children) >= 6
    assert own_served.end() == 0
    assert not [child for child in children if child.is_running()]
    assert [path.name for path in own_served.run_dir.iterdir() if path.is_socket()] == []


@pytest.mark.proof
def test_killed_it_leaves_its_run_folder_and_another_one_takes_that_up(own_served: Service) -> None:
    seconds = f"{1000 + os.getpid()}.25"
    busy = {**SHELL, "instance": {**SHELL["instance"], "check": f"sleep {seconds}"}}  # type: ignore[dict-item]
    with RolloutClient(own_served.front_door, session="mine") as client:
        endless = client.submit(msgspec.convert(busy, Job) for _ in range(4))
        client.submit(msgspec.convert(MATH, Job) for _ in range(50))
        until(lambda: client.status().running["eval"] == 4, "the checks to run", START_S)
        client.backends.add(Backend(backend_id="mine", endpoint="ipc:///tmp/nobody"))
        client.backends.drain("mine")
    until(lambda: len(using(seconds)) >= 4, "the checks' commands")
    processes = own_served.children()
    own_served.process.kill()
    own_served.process.wait(10)
    with contextlib.suppress(AssertionError):
        until(lambda: living(processes) == [], "all its processes to end")
    assert living(processes) == []
    for words in (seconds, str(own_served.run_dir)):
        until(lambda words=words: using(words) == [], f"all processes with {words} to end")
    again = Service(own_served.folder, TOPOLOGY)
    try:
        again.wait_ready()
        (resumed,) = [line for line in again.lines if "resuming" in line]
        assert re.search(r"resuming \d+ jobs and \d+ uncollected results of .*rollout\.journal", resumed)
        assert list((again.run_dir / "sandboxes").glob("*")) == []
        with RolloutClient(again.front_door, session="mine") as client:
            assert [one.state for one in client.backends.list() if one.backend.backend_id == "mine"] == ["draining"]
            client.cancel(endless)
            outcomes = Counter(one.outcome for one in client.stream(timeout_s=60))
            assert outcomes == {"completed": 50, "cancelled": 4}
    finally:
        again.close()
    left = {path.name for path in again.run_dir.iterdir() if ".journal" not in path.name}
    assert left <= {"sandboxes", "serve.lock", RUN_DIR_MARK}


@pytest.mark.proof
def test_a_backend_broker_that_is_killed_under_load_costs_no_job_an_attempt(own_served: Service) -> None:
    with RolloutClient(own_served.front_door) as client:
        client.backends.add(Backend(backend_id="mine", endpoint="ipc:///tmp/nobody"))
        client.backends.drain("mine")
        jobs = [msgspec.convert({**MATH, "sampling": {"max_tokens": 400}}, Job) for _ in range(40)]
        client.submit(jobs)
        client.backends.ask(WeightUpdate("set", "set", 3, backend_id="engine-0"))
        until(lambda: sum(one.in_flight for one in client.backends.list()) >= 4, "jobs on the engine")
        killed = own_served.child("backend_broker.json")
        os.kill(killed, signal.SIGKILL)
        assert {one.backend.backend_id: one.backend.weight_version for one in client.backends.list()} == {
            "engine-0": 3,
            "mine": 0,
        }
        assert own_served.child("backend_broker.json") != killed
        done = list(client.stream(timeout_s=60))
        assert {(one.outcome, one.result.attempt) for one in done} == {("completed", 1)}
        assert len(done) == 40
        until(lambda: [one.in_flight for one in client.backends.list()] == [0, 0], "the releases")
        assert {one.backend.backend_id: one.state for one in client.backends.list()} == {
            "engine-0": "ready",
            "mine": "draining",
        }


@pytest.mark.proof
def test_a_process_that_was_stopped_ends_in_good_order(own_served: Service) -> None:
    children = own_served.children()
    os.kill(own_served.child("stage_run.json"), signal.SIGSTOP)
    assert own_served.end() == 0
    assert living(children) == []
    assert not any("killing it" in line for line in own_served.lines)


DEAF = """#!/bin/sh
case "$*" in *"import prorl_zmq.cli"*) exit 0 ;; esac
trap '' TERM
sleep 1000.5 & wait
while :; do sleep 1000.5; done
"""


@pytest.mark.proof
def test_a_second_signal_kills_what_does_not_end(tmp_path: Path) -> None:
    deaf = tmp_path / "deaf"
    deaf.write_text(DEAF)
    deaf.chmod(0o700)
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        served = Service(Path(folder), f'{TOPOLOGY}[backends]\npython = "{deaf}"\n')
        try:
            served.wait_line("waiting for engine-0")
            children = served.children()
            served.process.send_signal(signal.SIGINT)
            served.wait_line("waiting for engine-0 to end, to be killed in")
            assert served.process.poll() is None
            served.process.send_signal(signal.SIGINT)
            assert served.wait(15) == 0
        finally:
            served.close()
    until(lambda: living(children) == [], "what it had started to end")


@pytest.mark.proof
@pytest.mark.parametrize("place", ["in a folder", "abstract"])
def test_systemd_is_told(place: str) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="prorl-t-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line,
    ):
        name = f"{folder}/notify" if place == "in a folder" else f"@prorl-{os.getpid()}"
        line.bind(name.replace("@", "\0"))
        line.settimeout(START_S)
        served = Service(Path(folder), TOPOLOGY, NOTIFY_SOCKET=name, WATCHDOG_USEC="200000")
        try:
            told = [line.recv(4096).decode()]
            while "READY=1\nSTATUS=serving" not in told:
                told.append(line.recv(4096).decode())
            assert any(state.startswith("STATUS=waiting for ") for state in told)
            while line.recv(4096) != b"WATCHDOG=1":
                pass
            served.process.send_signal(signal.SIGTERM)
            while not (state := line.recv(4096)).startswith(b"STOPPING=1"):
                assert state == b"WATCHDOG=1"
        finally:
            served.close()
        assert served.wait() == 0


@pytest.mark.parametrize(
    ("python", "said"), [("/nonexistent/python", "cannot be started"), ("/bin/false", "has no prorl")]
)
def test_an_interpreter_without_an_engine_is_named_at_once(tmp_path: Path, python: str, said: str) -> None:
    """`prorl serve` waited for ever for an engine that could not be started."""
    config = tmp_path / "topology.toml"
    config.write_text(f'{TOPOLOGY}\n[backends]\npython = "{python}"\n')
    done = prorl("serve", "--config", config, "--run-dir", tmp_path / "run")
    assert done.returncode == 2
    assert f"{python} {said}" in done.stderr


@pytest.mark.proof
def test_journals_that_were_never_begun_stop_nobody() -> None:
    """A service that was killed at its very first start, or met a full disk there, leaves empty files."""
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        run_dir = own_run_dir(Path(folder) / "run")
        for name in ("rollout.journal", "backends.journal"):
            (run_dir / name).touch()
        served = Service(Path(folder), TOPOLOGY)
        try:
            served.wait_ready()
        finally:
            served.close()


REACHABLE = """
[rollout_broker]
front_door = "tcp://10.0.0.1:5555"
[sandbox]
kind = "process"
"""


def serve(folder: Path, topology: str, *flags: str, **environment: str) -> CompletedProcess[str]:
    """Run a `prorl serve` that cannot work with what it is given."""
    config = folder / "topology.toml"
    config.write_text(topology)
    clean = {name: value for name, value in os.environ.items() if name != "PRORL_KEYS"}
    place = ("--config", config, "--run-dir", folder / "run")
    return prorl("serve", *place, *flags, environment={**clean, **environment})


def complaint(done: CompletedProcess[str]) -> str:
    """The last line of a `prorl serve` that has started nothing: no child has logged."""
    assert done.returncode == 2, done.stderr
    *before, last = done.stderr.splitlines()
    assert before == ["prorl serve: sandboxes are plain processes: what the model runs is not isolated"]
    return last


def test_endpoints_without_keys_are_refused_once_before_anything_starts(tmp_path: Path) -> None:
    """Every child said it, and `prorl serve` at last that one of them had."""
    said = complaint(serve(tmp_path, REACHABLE))
    assert said.startswith("prorl: tcp://10.0.0.1:5555 is reachable from other machines and has no keys")
    assert "`prorl keys new service --role service`" in said


@pytest.mark.parametrize("by", ["flag", "environment"])
def test_keys_of_another_role_are_refused_once_before_anything_starts(tmp_path: Path, by: str) -> None:
    keys = KeyFolder(tmp_path / "keys")
    keys.new("alice", KeyRole.TRAINER)
    flags = ("--keys", str(keys.path)) if by == "flag" else ()
    environment = {} if by == "flag" else {"PRORL_KEYS": str(keys.path)}
    said = complaint(serve(tmp_path, REACHABLE, *flags, **environment))
    assert "has no key of role service; make one with `prorl keys new NAME --role service`" in said


def test_an_endpoint_that_its_own_stages_cannot_reach_is_refused_before_anything_starts(tmp_path: Path) -> None:
    topology = REACHABLE.replace("front_door", "stage_events").replace("10.0.0.1", "0.0.0.0")
    done = serve(tmp_path, topology, "--insecure")
    assert done.returncode == 2
    warning, said = done.stderr.splitlines()[1:]
    assert warning.endswith("tcp://0.0.0.0:5555 has no keys; any machine that reaches it may do and read everything")
    assert said.startswith("prorl: tcp://0.0.0.0:5555 is not an address of this machine to which")
