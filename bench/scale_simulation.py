"""The pure job table at 10,000 nodes: a tick, a batch's room, an errand, a heartbeat; and lent slots.

No socket and no clock: the tables of k rollout brokers in one process, in virtual time. A node has 64 RUN slots and
assigns each broker its share of them every `LEND_S`, by the rule of `brokers.node.slot_shares`. One trainer has 70 % of
the work, and one node of a hundred fails. The limit is every slot at work all the time.
"""

from __future__ import annotations

import gc
import heapq
import random
import statistics
import time
from collections import Counter, defaultdict, deque
from typing import TYPE_CHECKING, Any

from harness import Row, main
from msgspec import structs

from prorl_zmq.brokers.node.slot_shares import Demand, divide
from prorl_zmq.brokers.rollout.actions import End, Start, Stop
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
LEASE_S = 10 * LEND_S
FAILING = 0.01
"""The part of the nodes that fails, each once."""
AWAY_S = 120.0
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
    """Nodes that divide their slots among several brokers, in virtual time; some of them fail.

    Of those that fail every second one dies, with all that it runs, and is replaced by another life of it; the others
    are cut off, continue to work, and report it when they are back.
    """

    def __init__(self, nodes: int, end_s: float, *, failing: float, fixed: bool = False) -> None:
        self.tables = [JobTable(LEASE_S, ready_limit=10**9, quiet_s=2.5 * LEND_S) for _ in range(BROKERS)]
        self.nodes, self.end_s, self.fixed = nodes, end_s, fixed
        self.names = [f"rollout-{index}" for index in range(BROKERS)]
        self.used = [Counter[str]() for _ in range(nodes)]
        self.running: defaultdict[tuple[int, int], dict[str, int]] = defaultdict(dict)
        self.lives = [0] * nodes
        self.away: dict[int, list[tuple[int, PhaseDone]]] = {}
        """Nodes that no broker hears, and what those that are cut off have to say."""
        self.dead: set[int] = set()
        failed = random.sample(range(nodes), round(failing * nodes))
        times = [(random.uniform(0.3, 0.9) * end_s, node, number % 2 == 0) for number, node in enumerate(failed)]
        self.failures = sorted(times, reverse=True)
        self.returns: list[tuple[float, int]] = []
        self.oversubscribed = self.twice = self.failed = 0
        self.ends: list[tuple[float, int, int, int, int, str, int]] = []
        self.done, self.made = [0] * BROKERS, [0] * BROKERS
        self.busy, self.area, self.room, self.last = 0, 0.0, 0.0, 0.0
        self._started = 0
        self._ended: set[str] = set()
        self._numbers: Counter[tuple[int, int]] = Counter()
        self._told: dict[tuple[int, int], int] = {}
        """The share of a broker that a node told it."""
        self._began: defaultdict[tuple[int, int], dict[str, int]] = defaultdict(dict)

    def beat(self, now: float) -> None:
        """All nodes report to all brokers, and these look at the time."""
        while self.returns and self.returns[0][0] <= now:
            self._come_back(heapq.heappop(self.returns)[1], now)
        while self.failures and self.failures[-1][0] <= now:
            self._fail(*self.failures.pop()[1:], now)
        said = [table.counts.demand(self.nodes - len(self.away)) for table in self.tables]
        demand = {name: Demand(one.slots[Phase.RUN], one.weight) for name, one in zip(self.names, said, strict=True)}
        even = dict.fromkeys(self.names, SLOTS // BROKERS)
        for index, table in enumerate(self.tables):
            for role in (Phase.INIT, Phase.EVAL):
                self.act(index, table.stage_reported(report(role, -1, 10**6), now), now)
        for node in range(self.nodes):
            if node not in self.away:
                shares = even if self.fixed else divide(SLOTS, demand, self.used[node], f"n{node}")
                for index, name in enumerate(self.names):
                    self._report(node, index, shares[name], now)
        for index, table in enumerate(self.tables):
            self.act(index, table.tick(now), now)
            self.feed(index, now)

    def _report(self, node: int, index: int, share: int, now: float) -> None:
        """Say everything where the share is another one, else what has begun, as a node's broker does."""
        table, key = self.tables[index], (node, index)
        began = self._began.pop(key, {})
        if self._told.get(key) != share:
            self._told[key] = share
            told = self._full(node, index, share)
            self.act(index, table.stage_reported(told, now), now)
            return
        self._numbers[key] += 1
        alive = MemberAlive(
            member=self._name(node), number=self._numbers[key], began={self._stage(node): began} if began else {}
        )
        actions, follows = table.member_alive(alive, now)
        self.act(index, actions, now)
        if not follows:
            del self._told[key]

    def _full(self, node: int, index: int, share: int) -> StageReport:
        running, number = self.running[node, index], self._numbers[node, index]
        about = {"stage_id": self._stage(node), "member": self._name(node), "number": number}
        return structs.replace(report(Phase.RUN, node, share, running), **about)

    def _name(self, node: int) -> str:
        return f"node-{node}-{self.lives[node]}"

    def _stage(self, node: int) -> str:
        return f"run-{node}-{self.lives[node]}"

    def _fail(self, node: int, dies: bool, now: float) -> None:
        self.failed += 1
        self._count(now, 0)
        self.away[node] = []
        heapq.heappush(self.returns, (now + AWAY_S, node))
        if dies:
            self.dead.add(node)
            self._count(now, -self.used[node].total())
            self.used[node].clear()
            self.lives[node] += 1
            for index in range(BROKERS):
                self.running.pop((node, index), None)
                self._began.pop((node, index), None)

    def _come_back(self, node: int, now: float) -> None:
        self._count(now, 0)
        self.dead.discard(node)
        for index in range(BROKERS):
            self._told.pop((node, index), None)
        for index, done in self.away.pop(node):
            self.act(index, self.tables[index].phase_done(done, None, now), now)

    def act(self, index: int, actions: Iterable[Any], now: float) -> None:
        work = deque(actions)
        while work:
            action = work.popleft()
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
            elif isinstance(action, Start | Stop):
                node, life = map(int, action.stage_id.split("-")[1:])
                if node not in self.away and life == self.lives[node]:  # else the message gets lost
                    if isinstance(action, Start):
                        self._start(index, node, action.command.job_id, action.command.attempt, now)
                    else:
                        self._end(index, node, *action.claim, now)
        self.tables[index].take_changes()

    def _start(self, index: int, node: int, job_id: str, attempt: int, now: float) -> None:
        self._count(now, 1)
        self._started += 1
        self.used[node][self.names[index]] += 1
        self.oversubscribed = max(self.oversubscribed, self.used[node].total() - SLOTS)
        self.running[node, index][job_id] = self._began[node, index][job_id] = attempt
        length = random.lognormvariate(-0.125, 0.5) * MEAN_S
        heapq.heappush(self.ends, (now + length, self._started, index, node, self.lives[node], job_id, attempt))

    def _end(self, index: int, node: int, job_id: str, attempt: int, now: float) -> bool:
        """Free the slot of an attempt; whether the node had it."""
        if self.running[node, index].get(job_id) != attempt:
            return False
        del self.running[node, index][job_id]
        self._began[node, index].pop(job_id, None)
        self.used[node][self.names[index]] -= 1
        self._count(now, -1)
        return True

    def feed(self, index: int, now: float) -> None:
        share = SKEW if index == 0 else (1 - SKEW) / (BROKERS - 1)
        want = int(1.05 * self.nodes * SLOTS * share)
        while self.made[index] - self.done[index] < want:
            self.made[index] += 1
            new = job(f"{index}-{self.made[index]:024x}")
            self.act(index, self.tables[index].submit("s", new, b"", now), now)

    def run(self) -> float:
        """Return which part of the slots of the nodes that lived was at work in the second half."""
        self.beat(0.0)
        next_beat, half = LEND_S, None
        while True:
            now = min(self.ends[0][0], next_beat)
            if now >= self.end_s:
                break
            if half is None and now >= self.end_s / 2:
                self._count(now, 0)
                half = (self.area, self.room)
            if now == next_beat:
                self.beat(now)
                next_beat += LEND_S
                continue
            _, _, index, node, life, job_id, attempt = heapq.heappop(self.ends)
            if life != self.lives[node] or not self._end(index, node, job_id, attempt, now):
                continue
            done = PhaseDone(stage_id=self._stage(node), job_id=job_id, attempt=attempt, phase=Phase.RUN)
            if node in self.away:
                self.away[node].append((index, done))
            else:
                self.act(index, self.tables[index].phase_done(done, None, now), now)
                self.feed(index, now)
        assert half is not None
        return (self.area - half[0]) / (self.room - half[1])

    def lost(self) -> int:
        """Return how many jobs have neither ended nor are with a broker."""
        return sum(self.made) - len(self._ended) - sum(map(len, self.tables))

    def _count(self, now: float, change: int) -> None:
        self.area += self.busy * (now - self.last)
        self.room += (self.nodes - len(self.dead)) * SLOTS * (now - self.last)
        self.last = now
        self.busy += change


def lending_rows(nodes: int, end_s: float) -> list[Row]:
    random.seed(0)
    fixed = SharedNodes(nodes // 10, end_s, failing=0.0, fixed=True).run()
    random.seed(0)
    lent = SharedNodes(nodes, end_s, failing=FAILING)
    use = lent.run()
    where = f"{nodes:,} nodes, {BROKERS} brokers, one with {SKEW:.0%} of the work"
    again = sum(table.redelivered for table in lent.tables)
    return [
        Row(f"slots at work, {where}", use, "of 1", "slots divided once", use / fixed, f"≥ {USE:g}", use >= USE),
        Row("nodes that died or were cut off meanwhile", lent.failed, "nodes"),
        Row("jobs started again for that", again, "jobs"),
        Row("jobs that ended", sum(lent.done), "jobs"),
        Row("slots given twice", max(0, lent.oversubscribed), "slots", target="0", holds=lent.oversubscribed <= 0),
        Row("jobs that ended twice", lent.twice, "jobs", target="0", holds=not lent.twice),
        Row("jobs lost", abs(lent.lost()), "jobs", target="0", holds=not lent.lost()),
    ]


def measure(quick: bool) -> list[Row]:
    gc.disable()
    return [*table_rows(200 if quick else 10_000), *lending_rows(100 if quick else 10_000, 600.0)]


if __name__ == "__main__":
    main("scale_simulation", "the pure job table at 10,000 nodes, and slots lent among brokers", measure)
