"""A training of many batches on simulated slots, in a virtual clock: for bench/dapo.py.

The decisions are the service's own: the batch sampler chooses the jobs, and the job table admits them and passes them
through INIT, RUN and EVAL of stage processes. Simulated are the processes, which only take their time, and a trainer
that fetches a batch and opens the next one `PAUSE_S` later. Left out: sockets, the journal's disk, and the machine's
cost of a sandbox.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dapo_prompts import GROUP, rollouts_of

from prorl_zmq.brokers.batches.batch_records import Deliver, Discard, Ended, Launch
from prorl_zmq.brokers.batches.batch_sampler import BatchSampler
from prorl_zmq.brokers.batches.batch_stats import DiscardReason
from prorl_zmq.brokers.batches.group_filters import KeepInformative
from prorl_zmq.brokers.batches.rollout_group import Rollout
from prorl_zmq.brokers.rollout.actions import End, Start
from prorl_zmq.brokers.rollout.job_table import JobTable
from prorl_zmq.wire.messages.batches import BatchOptions
from prorl_zmq.wire.messages.jobs import Job, Phase
from prorl_zmq.wire.messages.stages import PhaseDone, StageReport, Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_zmq.brokers.batches.batch_records import SamplerAction
    from prorl_zmq.brokers.rollout.actions import Action

MEAN_S = 60.0
"""Of RUN, in virtual seconds."""
FIXED_S = {Phase.INIT: 2.0, Phase.EVAL: 1.0}
BESIDE = 0.1
"""Slots of INIT, and of EVAL, for each of RUN."""
PROCESS_SLOTS = 100
"""Of RUN in one process."""
PAUSE_S = 2.0
TURN_S = 0.1
"""The broker takes what has arrived for so long, then looks for what to start: so it does when it has much to do."""
HEARTBEAT_S = 50.0
LEASE_S = 150.0
PARTS = 10
"""Into how many parts the jobs are divided, to see whether their cost grows."""
SESSION, TASK = "trainer", "simulated"


@dataclass
class Simulated:
    """What came out."""

    batches: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0
    use: float = 0.0
    """Share of the time that RUN's slots were busy."""
    sampler_s: list[float] = field(default_factory=list)
    """CPU seconds of the sampler for each job, by part."""
    jobs: Counter[str] = field(default_factory=Counter)
    """`launched`, `under_way` at the end, and `ended`; of these, `kept` and `not_kept` are in groups that are whole."""


class _PhaseEnd(NamedTuple):
    at: float
    number: int
    stage_id: str
    job_id: str
    phase: Phase


class _Rollout(NamedTuple):
    """A job under way."""

    length_s: float
    reward: float
    launched_at: float


class Simulation:
    """One trainer on one service.

    Args:
        slots: of RUN.
        target_groups: of each batch.
    """

    def __init__(self, slots: int, target_groups: int) -> None:
        self._slots = slots
        self._options = BatchOptions(target_groups=target_groups, group_size=GROUP)
        beside = max(GROUP, int(BESIDE * slots))
        self._table = JobTable(LEASE_S, ready_limit=beside, quiet_s=LEASE_S / 2)
        self._sampler = BatchSampler()
        self._now = self._noted_at = self._busy_s = self._sampler_s = 0.0
        self._next_turn, self._next_beat = 0.0, HEARTBEAT_S
        self._busy = self._phases = self._prompts = self._ended = 0
        self._batch_is_open = False
        self._ends: list[_PhaseEnd] = []
        self._rollouts: dict[str, _Rollout] = {}
        self._out: list[Rollout] = []
        """What came out of the table in this event."""
        self._kept: list[str] = []
        """Groups that the trainer has not fetched."""
        self._result = Simulated()
        run_processes = -(-slots // PROCESS_SLOTS)
        for role, processes, each in (
            (Phase.INIT, 1, beside),
            (Phase.RUN, run_processes, slots // run_processes),
            (Phase.EVAL, 1, beside),
        ):
            for number in range(processes):
                self._act(self._table.stage_reported(_report(f"{role}-{number}", role, each, {}), 0.0))

    def run(self, jobs: int) -> Simulated:
        """Collect batches one after the other until so many jobs have ended."""
        result, started = self._result, time.perf_counter()
        while self._ended < jobs:
            batch_id = f"b{result.batches}"
            result.batches += 1
            self._batch_is_open = True
            self._sample(self._sampler.open(SESSION, batch_id, self._options, KeepInformative(), self._now))
            self._launch(batch_id)
            while self._ended < jobs and self._batch_is_open:
                self._step(batch_id, jobs // PARTS)
            open_again_at = self._now + PAUSE_S
            while self._ended < jobs and self._ends[0].at < open_again_at:
                self._step(batch_id, jobs // PARTS)
            self._sampler.acknowledge(batch_id, self._kept)
            self._kept.clear()
            self._sample(self._sampler.close(batch_id, self._now))
        self._note_busy(0)
        result.virtual_s, result.wall_s = self._now, time.perf_counter() - started
        result.use = self._busy_s / (self._slots * self._now)
        result.jobs.update(ended=self._ended, under_way=len(self._rollouts))
        return result

    def _step(self, batch_id: str, part: int) -> None:
        """Let the next phase end."""
        self._now, _, stage_id, job_id, phase = heapq.heappop(self._ends)
        if phase == Phase.RUN:
            self._note_busy(-1)
        reward = self._rollouts[job_id].reward if phase == Phase.EVAL else None
        done = PhaseDone(stage_id=stage_id, job_id=job_id, attempt=1, phase=phase, reward=reward)
        self._act(self._table.phase_done(done, None, self._now))
        if self._now >= self._next_beat:
            self._beat()
        for rollout in self._out:
            began = time.process_time()
            actions = self._sampler.job_completed(rollout, self._now)
            self._sampler_s += time.process_time() - began
            self._sample(actions)
            self._ended += 1
            if self._ended % part == 0:
                self._result.sampler_s.append(self._sampler_s / part)
                self._sampler_s = 0.0
        self._out.clear()
        if self._now >= self._next_turn:
            self._launch(batch_id)

    def _launch(self, batch_id: str) -> None:
        """Let the sampler start what there is room for, as the rollout broker does."""
        room = self._table.room(TASK)
        began = time.process_time()
        wanted = self._sampler.registry.batch(batch_id).wanted_prompts(room)
        if wanted:
            prompts = range(self._prompts, self._prompts + wanted)
            self._prompts += wanted
            self._sampler.feed(batch_id, prompts, self._now)
        left = iter(range(room))
        actions = self._sampler.launch(lambda _: next(left, None) is not None, self._now)
        self._sampler.take_changes()
        self._sampler_s += time.process_time() - began
        self._sample(actions)
        self._table.take_changes()
        self._next_turn = self._now + TURN_S

    def _sample(self, actions: Sequence[SamplerAction]) -> None:
        jobs = self._result.jobs
        for action in actions:
            match action:
                case Launch():
                    jobs["launched"] += 1
                    rollouts, place = rollouts_of(action.prompt), int(action.job_id.rpartition(".")[2])
                    length_s, reward = MEAN_S * float(rollouts.lengths[place]), float(rollouts.rewards[place])
                    self._rollouts[action.job_id] = _Rollout(length_s, reward, self._now)
                    job = Job(task=TASK, instance={}, job_id=action.job_id, group_id=action.group_id)
                    self._act(self._table.submit(SESSION, job, b"", self._now, in_batch=True))
                case Deliver():
                    jobs["kept"] += GROUP
                    self._kept.append(action.group.group_id)
                case Discard(rollouts=dropped, why=DiscardReason.NOT_KEPT):
                    jobs["not_kept"] += len(dropped)
                case Ended():
                    self._batch_is_open = False
                case _:
                    raise AssertionError(f"nothing is cancelled, stale or lost here: {action}")

    def _act(self, actions: Sequence[Action]) -> None:
        """Do what the job table says, as far as there is something to do."""
        for action in actions:
            if isinstance(action, Start):
                command = action.command
                length_s = FIXED_S.get(command.phase) or self._rollouts[command.job_id].length_s
                if command.phase == Phase.RUN:
                    self._note_busy(1)
                self._phases += 1
                end = _PhaseEnd(self._now + length_s, self._phases, action.stage_id, command.job_id, command.phase)
                heapq.heappush(self._ends, end)
            elif isinstance(action, End):
                ended = action.finished.result
                began = self._rollouts.pop(ended.job_id)
                seconds = self._now - began.launched_at
                self._out.append(Rollout(ended.job_id, ended.reward or 0.0, 0, 0, seconds))

    def _beat(self) -> None:
        """Have all processes report, and the time pass."""
        for stage in tuple(self._table.stages):
            running = {claim.job_id: claim.attempt for claim in stage.claims}
            report = _report(stage.stage_id, stage.role, stage.slots, running)
            self._act(self._table.stage_reported(report, self._now))
        self._act(self._table.tick(self._now))
        self._next_beat = self._now + HEARTBEAT_S

    def _note_busy(self, change: int) -> None:
        self._busy_s += self._busy * (self._now - self._noted_at)
        self._noted_at = self._now
        self._busy += change


def _report(stage_id: str, role: Phase, slots: int, running: dict[str, int]) -> StageReport:
    return StageReport(
        stage_id=stage_id,
        role=role,
        node="local",
        slots=slots,
        endpoint="ipc:///nowhere",
        tasks=(Task(TASK),),
        welcomed=True,
        running=running,
    )
