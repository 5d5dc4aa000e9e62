"""Parts of bench/nodes.py with emulated nodes and a real rollout broker: a node's cost, a stall, many held, a job.

The emulated nodes (node_fleet.py) cost less than real ones, so that the broker is measured. Its CPU time and rate are
compared with those of a bare ZeroMQ pipeline (bare_pipeline.py) in the same run.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

import harness
from bare_pipeline import BarePipeline
from journal import appended
from node_fleet import TASK, Fleet, Settings
from node_service import BROKERS, NodeService, Usage, usage
from service import BenchService

from prorl_zmq import Job, RolloutClient
from prorl_zmq.client.block_fetcher import BlockFetcher
from prorl_zmq.data.trajectory import block_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

HELD = 64
"""Jobs that each node holds."""
SLOTS = 66
"""So that there are free ones."""
FLEET = 500
"""Most nodes of one process: each takes ten of its descriptors."""
NODE_SHARE, NODE_FILES, START_S, JOB_SHARE = 8.0, 3.0, 1.0, 18.0
"""Of the CPU time that the bare pipeline's broker takes for a job: a node's second, and a job."""
LONG_TOKENS, RATE_SHARE, DISK_SHARE, WRITTEN = 30_000, 0.04, 0.08, 1.2
"""Of the bare pipeline's rate; and of the rate at which the same bytes are appended to a file."""
BARE, APPENDED = "bare ZeroMQ pipeline", "their bytes appended to a file"
SETTLE_S = 200.0
"""Longest that nodes take to join and to begin what they hold."""
STAY_S = 3_000.0
"""And those that stay."""
TOPOLOGY = "[rollout_broker]\nmax_jobs = 1_000_000\nmax_session_share = 1.0\n"


class Size(NamedTuple):
    few: int
    many: int
    """Nodes."""
    look_s: float
    """How long the broker's CPU is looked at."""
    stall_s: float
    hold_s: float
    mean_s: float
    """How long the jobs last that come and go then."""


class Bare(NamedTuple):
    """What the bare pipeline does on this machine."""

    rate: float
    """Jobs a second."""
    broker_us: float
    """CPU time of its broker for a job."""

    @classmethod
    def measured(cls) -> Bare:
        rates, spent_us = [], []
        with BarePipeline() as pipeline:
            pid, jobs = pipeline.pids()["broker"], 3_000
            pipeline.pass_jobs(jobs // 10)
            for _ in range(3):
                before = usage(pid)
                rates.append(jobs / pipeline.pass_jobs(jobs))
                after = usage(pid)
                spent_us.append(1e6 * (after.main_s + after.other_s - before.main_s - before.other_s) / jobs)
        return cls(statistics.median(rates), statistics.median(spent_us))


class Crowd:
    """Fleets of one service, and a client that keeps their nodes busy."""

    def __init__(self, service: NodeService, client: RolloutClient, stack: ExitStack) -> None:
        self.service, self.client, self._stack = service, client, stack
        self._fleets: list[Fleet] = []
        self.nodes = 0

    def grow(self, nodes: int, last_s: Callable[[], float]) -> None:
        """Have so many nodes, and let each hold `HELD` jobs, which last as long as `last_s` says."""
        settings = {"stage_events": self.service.stage_events(), "keys": self.service.node_keys(), "slots": SLOTS}
        more = nodes - self.nodes
        while self.nodes < nodes:
            count = min(FLEET, nodes - self.nodes)
            self._fleets.append(self._stack.enter_context(Fleet(Settings(nodes=count, **settings))))
            self.nodes += count
        for fleet in self._fleets:
            fleet.wait_joined()
        self.submit(more * HELD, last_s)
        until = time.monotonic() + 600
        while (held := self.held()) < nodes * HELD:
            if time.monotonic() > until:
                raise TimeoutError(f"{held} of {nodes * HELD} jobs are held")
            time.sleep(0.5)

    def submit(self, count: int, last_s: Callable[[], float]) -> None:
        self.client.submit(
            (Job(task=TASK, instance={"at": time.monotonic(), "run_s": last_s()}) for _ in range(count)), timeout_s=120
        )

    def turn_over(self, seconds: float, mean_s: float) -> tuple[int, list[float]]:
        """Have jobs come and go; return how many ended, and the seconds from submission to RUN of those that began."""
        ended, end = 0, time.monotonic() + seconds
        self.waits_s()
        while time.monotonic() < end:
            came = self.client.collect(1000, wait_s=1.0)
            ended += len(came)
            self.submit(len(came), lambda: random.uniform(0.5, 1.5) * mean_s)
        return ended, self.waits_s()

    def held(self) -> int:
        return sum(fleet.ask().held for fleet in self._fleets)

    def stops(self) -> int:
        return sum(fleet.ask().stops for fleet in self._fleets)

    def waits_s(self) -> list[float]:
        return [wait for fleet in self._fleets for wait in fleet.ask().waits_s]

    def redelivered(self) -> int:
        return self.client.status().redelivered

    def silent(self) -> int:
        """Return how often the broker found a node silent."""
        return self.service.log(BROKERS).count(" is silent")

    def look(self, seconds: float) -> tuple[Usage, float, float]:
        """Return what the broker has used, and the seconds of CPU of its two sides for each second."""
        before, began = self.service.broker(), time.monotonic()
        time.sleep(seconds)
        after, took = self.service.broker(), time.monotonic() - began
        return after, (after.main_s - before.main_s) / took, (after.other_s - before.other_s) / took


def crowd_rows(quick: bool) -> list[harness.Row]:
    """A node's share of the broker; the broker stopped for a while; many held for long."""
    size = Size(20, 60, 3.0, 12.0, 5.0, 3.0) if quick else Size(200, 1_000, 40.0, 30.0, 600.0, 300.0)
    bare = Bare.measured()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prorl-bench-")))
        service = stack.enter_context(NodeService(folder, TOPOLOGY))
        crowd = Crowd(service, stack.enter_context(service.client()), stack)
        crowd.grow(size.few, lambda: STAY_S)
        few, few_main, few_other = crowd.look(size.look_s)
        stall = stall_rows(crowd, size)
        # Those that come now end evenly over the time from when all are there; the first ones stay.
        first_s = size.look_s + SETTLE_S / (20 if quick else 1)
        crowd.grow(size.many, lambda: first_s + random.uniform(0, 2) * size.mean_s)
        many, many_main, many_other = crowd.look(size.look_s)
        more = size.many - size.few
        main_us, other_us = 1e6 * (many_main - few_main) / more, 1e6 * (many_other - few_other) / more
        share = (main_us + other_us) / bare.broker_us
        files = (many.files - few.files) / more
        where = f"of a node with {HELD} held jobs, {size.few:,} to {size.many:,} nodes"
        return [
            harness.Row(
                f"broker's CPU for a second {where}", main_us + other_us, "µs", f"{BARE}'s broker, a job", share,
                f"≤ {NODE_SHARE:g}×", share <= NODE_SHARE,
            ),
            harness.Row("of it its main thread", main_us, "µs"),
            harness.Row(
                "broker's descriptors for a node", files, "files", target=f"≤ {NODE_FILES:g}",
                holds=files <= NODE_FILES,
            ),
            *stall,
            *hold_rows(crowd, size),
        ]  # fmt: skip


def stall_rows(crowd: Crowd, size: Size) -> list[harness.Row]:
    before, pid = crowd.redelivered(), crowd.service.broker().pid
    os.kill(pid, signal.SIGSTOP)
    time.sleep(size.stall_s)
    os.kill(pid, signal.SIGCONT)
    time.sleep(size.stall_s / 2)  # longer than a lease
    again, stops = crowd.redelivered() - before, crowd.stops()
    held = size.few * HELD
    return [
        harness.Row(
            f"started again of {held:,} held, the broker stopped for {size.stall_s:g} s", again, "jobs", target="0",
            holds=not again,
        ),
        harness.Row("stop messages then", stops, "messages", target="0", holds=not stops),
    ]  # fmt: skip


def hold_rows(crowd: Crowd, size: Size) -> list[harness.Row]:
    silent, before, began = crowd.silent(), crowd.redelivered(), crowd.service.broker()
    ended, waits_s = crowd.turn_over(size.hold_s, size.mean_s)
    after, again, silent = crowd.service.broker(), crowd.redelivered() - before, crowd.silent() - silent
    busy = (after.main_s - began.main_s) / size.hold_s
    p50, _, p99 = harness.quantiles(waits_s or [0.0])
    where = f"{size.many * HELD:,} held for {size.hold_s / 60:g} min"
    return [
        harness.Row(f"nodes wrongly silent, {where}", silent, "nodes", target="0", holds=not silent),
        harness.Row("jobs started again then", again, "jobs", target="0", holds=not again),
        harness.Row("from submission to a node, slots being free, p50", p50, "s"),
        harness.Row("the same, p99", p99, "s", target=f"< {START_S:g} s", holds=p99 < START_S),
        harness.Row("jobs that began and ended then", ended / size.hold_s, "jobs/s"),
        harness.Row("broker's main thread then", busy, "of a core"),
    ]


def job_rows(quick: bool) -> list[harness.Row]:
    """What a job costs the broker, with no tokens and with many, which its node keeps or the journal on disk."""
    rows: list[harness.Row] = []
    bare = Bare.measured()
    here = bytes(block_bytes(LONG_TOKENS, LONG_TOKENS // 500))
    for tokens, keeps, count, flight in (
        (0, False, 20_000, 2_000), (LONG_TOKENS, True, 20_000, 2_000), (LONG_TOKENS, False, 3_000, 256),
    ):  # fmt: skip
        with BenchService([], loopback=True) as service:
            settings = Settings(stage_events=service.stage_events, nodes=8, slots=HELD, tokens=tokens, keeps=keeps)
            with (
                # The nodes have no blocks to fetch: the broker is what is measured.
                mock.patch.object(BlockFetcher, "fetch", lambda _, handles: dict.fromkeys(handles, here)),
                Fleet(settings) as fleet,
                RolloutClient(service.front_door, timeout_s=60) as client,
            ):
                fleet.wait_joined()
                pass_jobs(client, flight, flight)
                before = usage(service.pids()["rollout broker"])
                seconds = pass_jobs(client, count // 10 if quick else count, flight)
                after = usage(before.pid)
            append_rate = appended(service.folder, 300, len(here))
        jobs = count // 10 if quick else count
        main_ms = 1e3 * (after.main_s - before.main_s) / jobs
        all_ms = main_ms + 1e3 * (after.other_s - before.other_s) / jobs
        what = f"a job with {tokens:,} tokens"
        what += f", kept by {'its node' if keeps else 'the broker on disk'}" if tokens else ""
        light, share = keeps or not tokens, 1e3 * all_ms / bare.broker_us
        against, theirs, least = (BARE, bare.rate, RATE_SHARE) if light else (APPENDED, append_rate, DISK_SHARE)
        rows += [
            harness.Row(
                f"broker's CPU for {what}", all_ms, "ms", f"{BARE}'s broker", share,
                *((f"≤ {JOB_SHARE:g}×", share <= JOB_SHARE) if light else ()),
            ),
            harness.Row("of it its main thread", main_ms, "ms"),
            harness.Row(
                f"{what}: through one broker", jobs / seconds, "jobs/s", against, jobs / seconds / theirs,
                f"≥ {least:g} of it", jobs / seconds / theirs >= least,
            ),
        ]  # fmt: skip
    written = (after.written_bytes - before.written_bytes) / jobs / block_bytes(LONG_TOKENS, LONG_TOKENS // 500)
    written_row = harness.Row(
        "bytes that the broker writes for each of its bytes", written, "bytes", APPENDED, written, f"≤ {WRITTEN:g}",
        written <= WRITTEN,
    )  # fmt: skip
    return [*rows, written_row]


def pass_jobs(client: RolloutClient, count: int, flight: int) -> float:
    """Have jobs that last no time pass the service, so many at once; return the seconds that it took."""
    sent = got = 0
    began = time.perf_counter()
    while got < count:
        more = min(flight - (sent - got), count - sent)
        if more >= flight // 4 or more == count - sent > 0:
            new = (Job(task=TASK, instance={"at": time.monotonic(), "run_s": 0.0}) for _ in range(more))
            client.submit(new, timeout_s=60)
            sent += more
        got += len(client.collect(min(flight, 1_000), wait_s=10))
    return time.perf_counter() - began
