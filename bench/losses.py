"""The fate of 1,000 jobs when one of four workers is killed: here, with plain PUSH/PULL, and with verifiers' pool.

All jobs are submitted at once, each sleeps in a worker that does one at a time, and a quarter of the way through one
worker gets a SIGKILL and is not restarted. Then the benchmark waits until nothing has ended for `SILENCE_S`, longer
than our lease. A job is completed; or lost: no process has it any more, and no caller waits for it; or hung: its caller
waits for a reply that will not come. The pool of `verifiers` (`EnvServerPool`, 4 fixed workers, one episode at a time
in each) runs where that package is installed, or in the environment whose interpreter `--verifiers-python` names: its
dependencies conflict with other peers'.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import zmq
from harness import Incomplete, Row, command, report
from service import BenchService

from prorl_zmq import Job, RolloutClient
from prorl_zmq.errors import RequestTimeout

PEERS = Path(__file__).with_name("peers")
sys.path.insert(0, str(PEERS))
from fan_out import JOB, RESULT  # noqa: E402

if TYPE_CHECKING:
    import argparse

WORKERS = 4
RUN_S = 0.02
SILENCE_S = 25.0
VERIFIERS = "verifiers==0.4.0"
STAGES = [("init", 64), ("eval", 64), *[("run", 1)] * WORKERS]


class Fate(NamedTuple):
    """What became of the jobs of one side."""

    completed: int
    lost: int
    hung: int
    seconds: float
    """From the first submission to the last result."""


def ours(jobs: int, silence_s: float) -> Fate:
    """Kill one of our RUN processes; the others and the default lease do the rest."""
    with BenchService(STAGES) as service, RolloutClient(service.front_door) as client:
        client.submit(Job(task="sleep", instance={"run_s": RUN_S}) for _ in range(8 * WORKERS))
        assert all(trajectory.reward == 1.0 for trajectory in client.stream(timeout_s=60))
        begun = last = time.monotonic()
        client.submit(Job(task="sleep", instance={"run_s": RUN_S}) for _ in range(jobs))
        rewards: list[float | None] = []
        try:
            for trajectory in client.stream(timeout_s=silence_s):
                rewards.append(trajectory.reward)
                last = time.monotonic()
                if len(rewards) == jobs // 4:
                    service.kill_stage("run")
        except RequestTimeout:
            return Fate(rewards.count(1.0), 0, jobs - len(rewards), last - begun)
        return Fate(rewards.count(1.0), jobs - len(rewards), 0, last - begun)


def push_pull(jobs: int, silence_s: float) -> Fate:
    """Kill one of the PULL workers; the pusher gets no error, so the worker's messages are lost."""
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder, zmq.Context() as context:
        push, results = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        endpoints = [f"ipc://{folder}/jobs", f"ipc://{folder}/results"]
        push.bind(endpoints[0])
        results.bind(endpoints[1])
        workers = [subprocess.Popen([sys.executable, str(PEERS / "fan_out.py"), *endpoints]) for _ in range(WORKERS)]
        try:
            for _ in workers:
                if not results.poll(60_000):
                    raise RuntimeError("the workers of the fan-out did not start")
                results.recv()
            for number in range(8 * WORKERS):  # until each worker has its connection
                push.send(JOB.pack(number, RUN_S))
                results.recv()
            begun = last = time.monotonic()
            for number in range(jobs):
                push.send(JOB.pack(number, RUN_S))
            done = set()
            while len(done) < jobs and results.poll(int(1000 * silence_s)):
                done.add(RESULT.unpack(results.recv())[0])
                last = time.monotonic()
                if len(done) == jobs // 4:
                    workers[0].kill()
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.wait(20)
            push.close(linger=0)
            results.close(linger=0)
        return Fate(len(done), jobs - len(done), 0, last - begun)


def verifiers_pool(python: str, jobs: int, silence_s: float) -> Fate:
    """Kill one of the pool's workers; what it had, its callers wait for."""
    arguments = [str(jobs), str(RUN_S), str(WORKERS), str(silence_s)]
    limit_s = 300 + jobs * RUN_S + 2 * silence_s
    done = subprocess.run(
        [python, str(PEERS / "verifiers_pool.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s,
    )
    if done.returncode:
        raise RuntimeError(f"the pool of verifiers failed:\n{done.stderr[-2000:]}")
    said = json.loads(done.stdout)
    return Fate(said["completed"], 0, jobs - said["completed"] - said["failed"], said["seconds"])


def measure(arguments: argparse.Namespace) -> list[Row]:
    jobs, silence_s = (200, 12.0) if arguments.quick else (1000, SILENCE_S)
    fates = {"prorl_zmq": ours(jobs, silence_s), "PUSH/PULL": push_pull(jobs, 3.0)}
    problem = ""
    python = arguments.verifiers_python or (sys.executable if importlib.util.find_spec("verifiers") else "")
    if python:
        fates["verifiers' pool"] = verifiers_pool(python, jobs, silence_s)
    else:
        problem = f"verifiers is not installed: pip install {VERIFIERS} elsewhere, and name --verifiers-python"
    rows = []
    for name, fate in fates.items():
        own = name == "prorl_zmq"
        rows += [
            Row(f"{name}: completed", fate.completed, f"of {jobs} jobs"),
            Row(f"{name}: lost", fate.lost, "jobs", target="0" if own else "", holds=fate.lost == 0 if own else None),
            Row(f"{name}: hung", fate.hung, "jobs", target="0" if own else "", holds=fate.hung == 0 if own else None),
            Row(f"{name}: submission to last result", fate.seconds, "s"),
        ]
    if problem and not arguments.quick:
        raise Incomplete(problem, rows)
    return rows


def main() -> None:
    about = f"one of {WORKERS} workers is killed among 1,000 jobs of {1000 * RUN_S:g} ms"
    parser = command("losses", about)
    parser.add_argument("--verifiers-python", default="", metavar="PATH", help=f"an interpreter that has {VERIFIERS}")
    arguments = parser.parse_args()
    report("losses", about, arguments, partial(measure, arguments))


if __name__ == "__main__":
    main()
