"""Large records under kills, for bench/records.py: each rollout has 15 MB of experts that its seed determines.

RUN processes, the node's broker, the rollout broker and the client are killed in turns (SIGKILL). Their supervisors
restart them, and this module the client. A client compares every token and expert with what the seed gives before it
acknowledges a result.

    python record_losses.py SERVICE SESSION OUT TOKENS
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
from harness import Row
from node_service import NodeService
from recorded_tokens import context_of, experts_of

from prorl_zmq import Job, RolloutClient, Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_zmq import Trajectory

TOPOLOGY = """
[rollout_broker]
keep = "node"
max_session_share = 1.0
heartbeat_s = 0.5
lease_s = 5.0
[sandbox]
kind = "process"
[[stage]]
role = "init"
[[stage]]
role = "run"
slots = 8
[[stage]]
role = "eval"
"""
SESSION = "records-under-kills"
STRIKES = ("RUN process", "node's broker", "rollout broker", "client")
KINDS = {"RUN process": ".stage_run.", "node's broker": ".node_broker.", "rollout broker": ".rollout_broker."}
SILENCE_S = 120.0
"""Longer than a result of a killed client waits for the next one."""


def verdict(trajectory: Trajectory, tokens: int) -> str:
    """Return `right`, or what is wrong with a trajectory."""
    if trajectory.outcome != "completed" or trajectory.result.records_dropped:
        return f"{trajectory.outcome}, dropped {sorted(trajectory.result.records_dropped)}"
    seed = int(trajectory.job_id.partition("-")[2])
    rows = len(trajectory.token_ids) - 1
    right = (
        np.array_equal(trajectory.token_ids[-tokens:], context_of(seed, tokens))
        and np.array_equal(trajectory.records.rows("experts"), np.arange(rows))
        and np.array_equal(trajectory.records["experts"], experts_of(seed, rows))
    )
    return "right" if right else "wrong"


def collect(service: str, session: str, out: str, tokens: int) -> None:
    """Collect until killed or done, and write a line for each verified result."""
    with (
        RolloutClient(service=service, session=session, timeout_s=SILENCE_S) as client,
        Path(out).open("a") as verdicts,
    ):
        for trajectory in client.stream(timeout_s=SILENCE_S):
            print(trajectory.job_id, verdict(trajectory, tokens), file=verdicts, flush=True)


def loss_rows(jobs: int, tokens: int, strikes: Sequence[str]) -> list[Row]:
    """Return what became of so many rollouts while these of `STRIKES` happened, evenly spread over the results."""
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as name, NodeService(Path(name), TOPOLOGY) as service:
        service.start("one", (), "node", "--service", str(service.path), "--name", "one", "--address", "127.0.0.1")
        service.wait_nodes(1)
        out = Path(name, "verdicts")
        out.touch()
        with RolloutClient(service=service.path, session=SESSION, timeout_s=SILENCE_S) as client:
            client.submit(
                Job(
                    task="recorded",
                    job_id=f"recorded-{seed}",
                    instance={"seed": seed, "tokens": tokens},
                    sampling=Sampling(max_tokens=4),
                    record=("top_logprobs:1",),
                    max_attempts=100,
                )
                for seed in range(jobs)
            )
        begun = time.monotonic()
        collector = _collector(service, out, tokens)
        try:
            for number, what in enumerate(strikes, 1):
                _wait_for(out, number * jobs // (len(strikes) + 1), collector)
                if what == "client":
                    collector.kill()
                    collector.wait()
                    collector = _collector(service, out, tokens)
                else:
                    _process(service, KINDS[what]).kill()
            collector.wait(SILENCE_S * 4)
        finally:
            collector.kill()
            collector.wait()
        seconds = time.monotonic() - begun
        said = dict(line.split(" ", 1) for line in out.read_text().splitlines())
    right = sum(one == "right" for one in said.values())
    kills = ", ".join(f"{count} × {what}" for what, count in Counter(strikes).items())
    return [
        Row(f"rollouts with all their records, under {len(strikes)} kills ({kills})", right, f"of {jobs}"),
        Row("rollouts lost or without records", jobs - right, "rollouts", target="0", holds=right == jobs),
        Row(
            "records of another rollout or changed",
            sum(one == "wrong" for one in said.values()),
            "rollouts",
            target="0",
            holds="wrong" not in said.values(),
        ),
        Row("submission to last result, under these kills", seconds, "s"),
    ]


def _collector(service: NodeService, out: Path, tokens: int) -> subprocess.Popen[bytes]:
    command = (sys.executable, __file__, str(service.path), SESSION, str(out), str(tokens))
    return subprocess.Popen(command)


def _wait_for(out: Path, count: int, collector: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 2 * SILENCE_S
    while len(set(out.read_text().splitlines())) < count:
        if time.monotonic() > until or collector.poll() is not None:
            raise RuntimeError(f"the client has {len(out.read_text().splitlines())} results, not {count}")
        time.sleep(0.05)


def _process(service: NodeService, kind: str) -> psutil.Process:
    """Return the process of this kind, once it runs."""
    until = time.monotonic() + SILENCE_S
    while time.monotonic() < until:
        for command in service.commands.values():
            for process in psutil.Process(command.pid).children(recursive=True):
                try:
                    if any(kind in word for word in process.cmdline()):
                        return process
                except psutil.Error:
                    continue
        time.sleep(0.05)
    raise TimeoutError(f"no process {kind} runs")


if __name__ == "__main__":
    collect(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
