"""The cost of the journal on disk, compared with the one in memory; and a broker's start on a full journal.

Two whole services, one with each journal, get the same no-op jobs in turns, so that variations of the machine affect
both equally; every phase of such a job is only a message each way, so the journal's share is as large as it can be.
Jobs with long trajectories follow, from an emulated stage process, compared with a plain append of the same bytes to a
file. Then a broker is started on a journal with many queued jobs and finished trajectories, timed from its process's
start to its first answer. The time beyond that on an empty journal is compared with SQLite's time to read the rows.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
from fetch import Feeder
from harness import Row, main
from service import START_S, BenchService

from prorl_zmq import Job, RolloutClient
from prorl_zmq.brokers.journal.journal import Journal
from prorl_zmq.brokers.journal.journal_summary import size_of
from prorl_zmq.brokers.journal.records import Finished, JobState, job_digest
from prorl_zmq.data.trajectory import block_bytes
from prorl_zmq.system.processes import die_with_parent
from prorl_zmq.system.run_folder import own_run_dir
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.jobs import Outcome, Result

STAGES = [("init", 64), ("run", 64), ("eval", 64)]
TOKENS = 2000
"""Of each finished trajectory."""
LONG_TOKENS = 30_000
LONG_AT_ONCE = 256
"""Jobs with so many tokens that are in the service at a time."""
LONG_COUNT = 600
"""In a round."""
LONG_SHARE_TARGET = 0.2
WRITTEN_TARGET = 1.2
SHARE_TARGET = 0.6
RESTART_TARGET = 15.0
PROBLEM = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many in May. How many in all? " * 3
)


def jobs_per_second(client: RolloutClient, count: int) -> float:
    """Give the rate at which jobs that do nothing pass all stages, from submission to the last result."""
    started = time.perf_counter()
    client.submit(Job(task="nothing", instance={}) for _ in range(count))
    got = sum(trajectory.reward == 1.0 for trajectory in client.stream(timeout_s=120))
    if got != count:
        raise RuntimeError(f"{got} of {count} jobs were completed")
    return count / (time.perf_counter() - started)


def rates(rounds: int, count: int) -> tuple[list[float], list[float]]:
    """Give the rates of a service with a journal on disk, and of one with a journal in memory."""
    on_disk: list[float] = []
    in_memory: list[float] = []
    with (
        BenchService(STAGES) as disk,
        BenchService(STAGES, in_memory=True) as memory,
        RolloutClient(disk.front_door) as disk_client,
        RolloutClient(memory.front_door) as memory_client,
    ):
        for client in (disk_client, memory_client):
            jobs_per_second(client, count // 4)
        for number in range(rounds):
            turns = [(disk_client, on_disk), (memory_client, in_memory)]
            for client, found in turns if number % 2 else reversed(turns):
                found.append(jobs_per_second(client, count))
    return on_disk, in_memory


def long_jobs(service: BenchService, count: int) -> tuple[float, float, float]:
    """Give the rate of jobs with long trajectories, what the broker writes per byte of these, and their mean size."""
    feeder = Feeder(service.folder, LONG_TOKENS)
    io = Path(f"/proc/{service.pids()['rollout broker']}/io")
    sent = got = size = 0
    try:
        with RolloutClient(service.front_door, timeout_s=60) as client:
            before, started = _written(io), time.perf_counter()
            while got < count:
                more = min(LONG_AT_ONCE - (sent - got), count - sent)
                if more >= LONG_AT_ONCE // 4 or more == count - sent > 0:
                    client.submit((Job(task="fetch", instance={}) for _ in range(more)), timeout_s=60)
                    sent += more
                for trajectory in client.collect(LONG_AT_ONCE, wait_s=10):
                    got += 1
                    size += block_bytes(len(trajectory.token_ids), len(trajectory.turns))
            seconds = time.perf_counter() - started
        return count / seconds, (_written(io) - before) / size, size / count
    finally:
        feeder.close()


def appended(folder: Path, count: int, size: int) -> float:
    """Give the rate at which blocks of a size are appended to a file, and nothing else is done."""
    block = os.urandom(size)
    path = folder / "appended"
    with path.open("wb", buffering=0) as file:
        started = time.perf_counter()
        for _ in range(count):
            file.write(block)
        seconds = time.perf_counter() - started
    path.unlink()
    return count / seconds


def _written(io: Path) -> int:
    return next(int(line.split()[1]) for line in io.read_text().splitlines() if line.startswith("wchar"))


def fill(path: Path, queued: int, finished: int) -> None:
    """Write a journal as a broker leaves it that was killed."""
    block = np.arange(block_bytes(TOKENS, 3), dtype=np.uint8).tobytes()
    with Journal(path) as journal:
        for first in range(1, queued + 1, 1000):
            states = []
            for sequence in range(first, min(first + 1000, queued + 1)):
                job = Job(task="nothing", instance={"problem": PROBLEM, "answer": sequence})
                packed = codec.encode(job)
                states.append(JobState(sequence, "s", job.job_id, job.task, job.stage_wait_s, packed))
            journal.accept(states)
            journal.write(states, [], [])
        for first in range(1, finished + 1, 100):
            ended = []
            for sequence in range(first, min(first + 100, finished + 1)):
                result = Result(
                    job_id=f"done-{sequence}", task="nothing", outcome=Outcome.COMPLETED, reward=1.0, tokens=TOKENS,
                    turns=3, metrics={"turns": 3.0}, timings={"run": 1.0},
                )  # fmt: skip
                ended.append(Finished("s", result, block, job_digest(block), queued + sequence))
            journal.write([], ended, [])


def read_s(path: Path) -> float:
    """Give the seconds in which SQLite alone reads all rows of a journal."""
    started = time.perf_counter()
    connection = sqlite3.connect(path)
    for table in ("jobs", "states", "results", "blocks"):
        connection.execute(f"SELECT * FROM {table} ORDER BY sequence").fetchall()
    connection.close()
    return time.perf_counter() - started


def restart_s(queued: int, finished: int) -> tuple[float, float, float]:
    """Give the seconds from a broker's start to its first answer, those of `read_s`, and the journal's bytes."""
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as name:
        folder = own_run_dir(Path(name))
        path = folder / "rollout.journal"
        fill(path, queued, finished)
        size, alone_s = size_of(path), read_s(path)
        command = [sys.executable, "-P", "-m", "prorl_zmq.cli", "prorl", "broker", "rollout", "--run-dir", name]
        started = time.perf_counter()
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - no threads of ours
            )
        try:
            with RolloutClient(f"ipc://{name}/front_door", timeout_s=START_S) as client:
                status = client.status()
                seconds = time.perf_counter() - started
        finally:
            process.terminate()
            process.wait(20)
        if status.uncollected != finished or sum(status.queued.values()) != queued:
            raise RuntimeError(f"the broker took up something else: {status}")
        return seconds, alone_s, size


def measure(quick: bool) -> list[Row]:
    rounds, count = (3, 400) if quick else (8, 4000)
    on_disk, in_memory = rates(rounds, count)
    share = float(np.median(np.divide(on_disk, in_memory)))
    with BenchService([]) as service:
        long_jobs(service, LONG_AT_ONCE)
        long_rates, written, append_rates = [], [], []
        for _ in range(rounds):
            rate, per_byte, size = long_jobs(service, LONG_COUNT)
            long_rates.append(rate)
            written.append(per_byte)
            append_rates.append(appended(service.folder, LONG_COUNT, round(size)))
    long_rate, long_share = float(np.median(long_rates)), float(np.median(np.divide(long_rates, append_rates)))
    queued, finished = (5000, 500) if quick else (100_000, 10_000)
    seconds, alone_s, size = min(restart_s(queued, finished) for _ in range(1 if quick else 3))
    empty_s, *_ = min(restart_s(0, 0) for _ in range(1 if quick else 3))
    taking_up = max(0.0, seconds - empty_s) / alone_s
    target = f"at least {SHARE_TARGET:g} of it"
    held = f"{queued:,} queued jobs and {finished:,} trajectories"
    return [
        Row(
            "no-op jobs through the whole service, journal on disk",
            float(np.median(on_disk)), "jobs/s", "journal in memory", share, target, share >= SHARE_TARGET,
        ),
        Row("no-op jobs, journal in memory", float(np.median(in_memory)), "jobs/s"),
        Row(
            f"jobs with {LONG_TOKENS:,} tokens through one broker, journal on disk",
            long_rate, "jobs/s", "their bytes appended to a file", long_share,
            f"at least {LONG_SHARE_TARGET:g} of that", long_share >= LONG_SHARE_TARGET,
        ),
        Row(
            "bytes that the broker writes for each byte of their trajectories",
            max(written), "bytes", "their bytes appended to a file", max(written), f"at most {WRITTEN_TARGET:g}",
            max(written) <= WRITTEN_TARGET,
        ),
        Row(
            f"from the broker's start to its first answer, {held}",
            seconds, "s", "an empty journal", seconds / empty_s,
        ),
        Row(
            "what that takes longer than an empty journal",
            max(0.0, seconds - empty_s), "s", "SQLite alone, reading the rows", taking_up,
            f"at most {RESTART_TARGET:g}×", taking_up <= RESTART_TARGET,
        ),
        Row("size of that journal", size / 2**20, "MiB"),
    ]  # fmt: skip


if __name__ == "__main__":
    main("journal", "what jobs and results on disk cost, and how soon a broker takes them up again", measure)
