"""The pure job table at 10,000 nodes: a tick, a batch's room, an errand, a heartbeat; and slots that are lent.

No socket and no clock: the tables of k rollout brokers in one process, in virtual time. A node has 64 RUN slots and
tells each broker its share of them every `LEND_S`, by the rule of `brokers.node.slot_shares`. One trainer has 70 % of
the work. The limit is every slot at work all the time.
"""

from __future__ import annotations

import gc
import heapq
import random
import statistics
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from harness import Row, main

from prorl_zmq.brokers.node.slot_shares import divide
from prorl_zmq.brokers.rollout.actions import End, Start
from prorl_zmq.brokers.rollout.job_table import JobTable
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.jobs import Job, Phase, SandboxHandle
from prorl_zmq.wire.messages.stages import MemberAlive, PhaseDone, StageEvent, StageReport, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SLOTS = 64
TASKS = (Task("sleep"),)
BROKERS = 4
MEAN_S = 300.0
LEND_S = 5.0
SKEW = 0.7
TICK_MS, ROOM_MS, ERRAND_MS = 5.0, 0.1, 0.01
USE = 0.98


def report(role: Phase, node: int, slots: int, running: dict[str, int] | None = None) -> StageReport:
    return StageReport(
        stage_id=f"{role}-{node}",
        member=f"node-{node}",
        role=role,
        node=f"n{node}",
        slots=slots,
        endpoint="tcp://10.0.0.1:5",
        tasks=TASKS,
        welcomed=True,
        running=running or {},
    )


class FullTable:
    """A table whose nodes hold as many jobs in RUN as they have slots, each in a sandbox of its node."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.table = JobTable(10.0, ready_limit=10**9, quiet_s=2.5)
        self.held: dict[int, dict[str, int]] = {node: {} for node in range(nodes)}
        for node in range(nodes):
            for role, slots in ((Phase.INIT, 16), (Phase.RUN, SLOTS), (Phase.EVAL, 16)):
                self.table.stage_reported(report(role, node, slots), 0.0)
        for number in range(nodes * SLOTS):
            self.act(self.table.submit("s", job(f"{number:032x}"), b"x" * 200, 0.0))
            self.table.take_changes()

    def act(self, actions: Iterable[Any]) -> None:
        waiting = [action.command for action in actions if isinstance(action, Start)]
        stages = {a.command.job_id: a.stage_id for a in actions if isinstance(a, Start)}
        for command in waiting:
            stage_id = stages[command.job_id]
            node = int(stage_id.rpartition("-")[2])
            if command.phase == Phase.RUN:
                self.held[node][command.job_id] = command.attempt
                continue
            sandbox = SandboxHandle("bubblewrap", f"/tmp/x/{command.job_id}", f"n{node}")
            reward = 1.0 if command.phase == Phase.EVAL else None
            done = PhaseDone(
                stage_id=stage_id,
                job_id=command.job_id,
                attempt=command.attempt,
                phase=command.phase,
                sandbox=sandbox if command.phase == Phase.INIT else None,
                reward=reward,
            )
            self.act(self.table.phase_done(done, None, 0.0))

    def end_one(self, number: int) -> None:
        """One job's RUN and EVAL end, and another job comes."""
        node = random.randrange(self.nodes)
        job_id, attempt = next(iter(self.held[node].items()))
        del self.held[node][job_id]
        done = PhaseDone(stage_id=f"run-{node}", job_id=job_id, attempt=attempt, phase=Phase.RUN)
        self.act(self.table.phase_done(done, None, 0.0))
        self.act(self.table.submit("s", job(f"{number:032x}"), b"x" * 200, 0.0))
        self.table.take_changes()


def job(job_id: str) -> Job:
    return Job(task="sleep", instance={}, job_id=job_id)


def median_ms(call: Callable[[], Any], times: int) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - began))
    return statistics.median(taken)


def table_rows(nodes: int) -> list[Row]:
    full = FullTable(nodes)
    table = full.table
    where = f"{nodes:,} nodes, {len(table):,} held"
    frames = [codec.encode(MemberAlive(member=f"node-{node}", number=1)) for node in range(nodes)]
    for node in range(nodes):  # each process has said what it holds
        began = {f"run-{node}": full.held[node]}
        table.member_alive(MemberAlive(member=f"node-{node}", number=1, began=began), 1.0)

    def heartbeats() -> None:
        for frame in frames:
            alive = codec.decode(frame, StageEvent)  # type: ignore[arg-type]
            table.member_alive(alive, 1.0)  # type: ignore[arg-type]

    heartbeat_us = 1e3 * median_ms(heartbeats, 1) / nodes
    now = iter(range(2, 10_000))

    def tick() -> None:
        at = float(next(now))
        for node in range(nodes):
            lease = table.stages.lease(f"node-{node}")
            assert lease is not None
            lease.heard_at = at
        began = time.perf_counter()
        table.tick(at)
        ticks.append(1e3 * (time.perf_counter() - began))

    ticks: list[float] = []
    for _ in range(9):
        tick()
    tick_ms = statistics.median(ticks)
    room_ms = median_ms(lambda: table.room("sleep"), 99)
    errand_ms = median_ms(lambda: table.stages.on_node(f"n{random.randrange(nodes)}"), 999)
    lives = 2_000
    began = time.perf_counter()
    for number in range(lives):
        full.end_one(10**9 + number)
    life_us = 1e6 * (time.perf_counter() - began) / lives
    return [
        Row(f"tick, {where}", tick_ms, "ms", target=f"≤ {TICK_MS:g} ms", holds=tick_ms <= TICK_MS),
        Row(f"longest tick, {where}", max(ticks), "ms"),
        Row(f"room for a batch, {where}", room_ms, "ms", target=f"≤ {ROOM_MS:g} ms", holds=room_ms <= ROOM_MS),
        Row(
            f"a process of a node, {where}", errand_ms, "ms", target=f"≤ {ERRAND_MS:g} ms", holds=errand_ms <= ERRAND_MS
        ),
        Row(f"heartbeat of a node, decoded, {where}", heartbeat_us, "µs"),
        Row(f"life of a job from RUN to RUN, {where}", life_us, "µs"),
    ]


class SharedNodes:
    """Nodes that divide their slots among several brokers, in virtual time."""

    def __init__(self, nodes: int, end_s: float, fixed: bool) -> None:
        self.tables = [JobTable(30.0, ready_limit=10**9, quiet_s=10**9) for _ in range(BROKERS)]
        self.nodes, self.end_s, self.fixed = nodes, end_s, fixed
        self.names = [f"rollout-{index}" for index in range(BROKERS)]
        self.used = [Counter[str]() for _ in range(nodes)]
        self.running: defaultdict[tuple[int, int], dict[str, int]] = defaultdict(dict)
        self.oversubscribed = 0
        self.ends: list[tuple[float, int, int, int, str, int]] = []
        self.done = [0] * BROKERS
        self.made = [0] * BROKERS
        self.busy, self.area, self.last = 0, 0.0, 0.0
        self.twice = 0
        self._ended: set[str] = set()
        for table in self.tables:
            for role in (Phase.INIT, Phase.EVAL):
                table.stage_reported(report(role, -1, 10**6), 0.0)
        self.lend(0.0)

    def lend(self, now: float) -> None:
        demand = {name: table.counts.demand()[Phase.RUN] for name, table in zip(self.names, self.tables, strict=True)}
        for node in range(self.nodes):
            even = dict.fromkeys(self.names, SLOTS // BROKERS)
            shares = even if self.fixed else divide(SLOTS, demand, self.used[node], f"n{node}")
            for index, table in enumerate(self.tables):
                told = report(Phase.RUN, node, shares[self.names[index]], self.running[node, index])
                self.act(index, table.stage_reported(told, now), now)

    def act(self, index: int, actions: Iterable[Any], now: float) -> None:
        work = list(actions)
        while work:
            action = work.pop()
            if isinstance(action, End):
                self.done[index] += 1
                job_id = action.finished.result.job_id
                self.twice += job_id in self._ended
                self._ended.add(job_id)
            elif isinstance(action, Start) and action.command.phase != Phase.RUN:
                command = action.command
                reward = 1.0 if command.phase == Phase.EVAL else None
                done = PhaseDone(
                    stage_id=action.stage_id,
                    job_id=command.job_id,
                    attempt=command.attempt,
                    phase=command.phase,
                    reward=reward,
                )
                work += self.tables[index].phase_done(done, None, now)
            elif isinstance(action, Start):
                node = int(action.stage_id.partition("-")[2])
                self._count(now, 1)
                self.used[node][self.names[index]] += 1
                self.oversubscribed = max(self.oversubscribed, self.used[node].total() - SLOTS)
                self.running[node, index][action.command.job_id] = action.command.attempt
                length = random.lognormvariate(-0.125, 0.5) * MEAN_S
                entry = (now + length, len(self._ended), index, node, action.command.job_id, action.command.attempt)
                heapq.heappush(self.ends, entry)
        self.tables[index].take_changes()

    def feed(self, index: int, now: float) -> None:
        share = SKEW if index == 0 else (1 - SKEW) / (BROKERS - 1)
        want = int(1.05 * self.nodes * SLOTS * share)
        while self.made[index] - self.done[index] < want:
            self.made[index] += 1
            new = job(f"{index}-{self.made[index]:024x}")
            self.act(index, self.tables[index].submit("s", new, b"", now), now)

    def run(self) -> float:
        """Return which part of the slots was at work in the second half."""
        for index in range(BROKERS):
            self.feed(index, 0.0)
        next_lend, half = 0.0, None
        while self.ends:
            now = self.ends[0][0]
            if next_lend <= now:
                self.lend(next_lend)
                next_lend += LEND_S
                continue
            if now >= self.end_s:
                break
            if half is None and now >= self.end_s / 2:
                self._count(now, 0)
                half = (now, self.area)
            _, _, index, node, job_id, attempt = heapq.heappop(self.ends)
            self._count(now, -1)
            self.used[node][self.names[index]] -= 1
            del self.running[node, index][job_id]
            done = PhaseDone(stage_id=f"run-{node}", job_id=job_id, attempt=attempt, phase=Phase.RUN)
            self.act(index, self.tables[index].phase_done(done, None, now), now)
            self.feed(index, now)
        assert half is not None
        return (self.area - half[1]) / ((self.last - half[0]) * self.nodes * SLOTS)

    def _count(self, now: float, change: int) -> None:
        self.area += self.busy * (now - self.last)
        self.last = now
        self.busy += change


def lending_rows(nodes: int, end_s: float) -> list[Row]:
    random.seed(0)
    fixed = SharedNodes(nodes, end_s, fixed=True).run()
    random.seed(0)
    lent = SharedNodes(nodes, end_s, fixed=False)
    use = lent.run()
    where = f"{nodes:,} nodes, {BROKERS} brokers, one with {SKEW:.0%} of the work"
    return [
        Row(f"slots at work, {where}", use, "", "slots divided once", use / fixed, f"≥ {USE:g}", use >= USE),
        Row("slots given twice", max(0, lent.oversubscribed), "", target="0", holds=lent.oversubscribed <= 0),
        Row("jobs that ended twice", lent.twice, "", target="0", holds=not lent.twice),
    ]


def measure(quick: bool) -> list[Row]:
    gc.disable()
    return [*table_rows(200 if quick else 10_000), *lending_rows(20 if quick else 1_000, 600.0 if quick else 1_500.0)]


if __name__ == "__main__":
    main("scale_simulation", "the pure job table at 10,000 nodes, and slots lent among brokers", measure)
