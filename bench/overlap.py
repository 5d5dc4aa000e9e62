"""The overlap of the three stages: the makespan of 200 jobs divided by the least that their slots allow.

All phases sleep. RUN is heavy-tailed (log-normal, p99 about 10 times the median) and is the stage with the most work
per slot; its longest phases are cut to a tenth of the bound, so that the slots decide the bound and no single job.

The comparison is one worker per job, which does all three phases and holds its slot throughout, on the same jobs at the
same time (all phases sleep, so they do not disturb each other). With as many workers as RUN has slots it also holds
RUN's resource (an inference slot) during INIT and EVAL. With as many workers as all stages have slots, every slot may
do anything: the best possible division into stages, which no service can have, since a RUN slot is not an INIT slot.
"""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from harness import Row, main, picture_path
from service import BenchService

from prorl_zmq import Job, RolloutClient, Trajectory

if TYPE_CHECKING:
    from numpy.typing import NDArray

JOBS = 200
SLOTS = {"init": 2, "run": 4, "eval": 2}
TARGET = 1.10
LONGEST = 0.1
"""Longest RUN over the bound."""


class Work(NamedTuple):
    """Seconds of each phase of each job, float64 [JOBS] each."""

    init: NDArray[np.float64]
    run: NDArray[np.float64]
    eval: NDArray[np.float64]

    def bound_s(self) -> float:
        """Give the least time in which the slots can do the work: that of the stage with the most work per slot."""
        return max(float(np.sum(work)) / slots for work, slots in zip(self, SLOTS.values(), strict=True))


def make_work(mean_run_s: float) -> Work:
    """Draw the same jobs at any scale."""
    draw = np.random.default_rng(0)
    run = draw.lognormal(sigma=1.0, size=JOBS)
    run = np.minimum(run, LONGEST * run.sum() / SLOTS["run"])
    init, eval_ = (draw.uniform(0.5, 1.5, JOBS) * 0.375 for _ in range(2))
    scale = mean_run_s / run.mean()
    return Work(init * mean_run_s, run * scale, eval_ * mean_run_s)


def through_service(front_door: str, work: Work) -> tuple[float, list[Trajectory]]:
    """Give the makespan of the jobs through the service, and what it says of them."""
    with RolloutClient(front_door, timeout_s=60) as client:
        started = time.monotonic()
        client.submit(
            Job(task="sleep", instance={"init_s": float(init), "run_s": float(run), "eval_s": float(eval_)})
            for init, run, eval_ in zip(*work, strict=True)
        )
        trajectories = list(client.stream(timeout_s=60))
        makespan = time.monotonic() - started
    assert sum(trajectory.reward == 1.0 for trajectory in trajectories) == JOBS
    return makespan, trajectories


async def one_worker_per_job(work: Work, workers: int) -> float:
    """Give the makespan if each worker takes one job after the other through all of its phases."""
    started = time.monotonic()
    jobs = iter(list(zip(*work, strict=True)))

    async def worker() -> None:
        for phases in jobs:
            for seconds in phases:
                await asyncio.sleep(float(seconds))

    await asyncio.gather(*(worker() for _ in range(workers)))
    return time.monotonic() - started


class _Coupled(threading.Thread):
    """Runs the comparison next to the service."""

    def __init__(self, work: Work, workers: int) -> None:
        super().__init__()
        self.makespan = 0.0
        self._work = work
        self._workers = workers

    def run(self) -> None:
        self.makespan = asyncio.run(one_worker_per_job(self._work, self._workers))


def draw(trajectories: list[Trajectory], bound_s: float) -> None:
    """Draw the busy slots of each stage over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    spans: dict[str, list[tuple[float, float]]] = {stage: [] for stage in SLOTS}
    for trajectory in trajectories:
        timings, run_start = trajectory.result.timings, trajectory.result.metrics["started"]
        init_end = run_start - timings["run_queue"]
        run_end = run_start + timings["run"]
        eval_start = run_end + timings["eval_queue"]
        spans["init"].append((init_end - timings["init"], init_end))
        spans["run"].append((run_start, run_end))
        spans["eval"].append((eval_start, eval_start + timings["eval"]))
    origin = min(start for start, _ in spans["init"])
    figure, rows = plt.subplots(3, figsize=(9, 4.5), sharex=True, layout="constrained")
    for axes, (stage, slots), color in zip(rows, SLOTS.items(), ("tab:green", "tab:blue", "tab:orange"), strict=True):
        changes = sorted(
            [(start - origin, 1) for start, _ in spans[stage]] + [(end - origin, -1) for _, end in spans[stage]]
        )
        times = [0.0, *(at for at, _ in changes)]
        busy = np.minimum(np.cumsum([0, *(change for _, change in changes)]), slots)
        axes.fill_between(times, busy, step="post", color=color, alpha=0.8, linewidth=0)
        axes.axvline(bound_s, color="black", linestyle="--", linewidth=1)
        axes.set_ylim(0, slots * 1.05)
        axes.set_yticks([0, slots])
        axes.set_ylabel(f"{stage.upper()}\nbusy slots")
        assert all(earlier <= later for earlier, later in pairwise(times))
    rows[-1].set_xlabel(f"seconds; dashed: the bound, {bound_s:.1f} s of RUN's {SLOTS['run']} slots without a gap")
    figure.savefig(picture_path("overlap"), dpi=120)


def measure(quick: bool) -> list[Row]:
    work = make_work(mean_run_s=0.08 if quick else 0.4)
    bound = work.bound_s()
    makespans, coupled, universal = [], [], []
    trajectories: list[Trajectory] = []
    with BenchService(list(SLOTS.items())) as service:
        for _ in range(1 if quick else 3):
            peers = [_Coupled(work, SLOTS["run"]), _Coupled(work, sum(SLOTS.values()))]
            for peer in peers:
                peer.start()
            makespan, trajectories = through_service(service.front_door, work)
            for peer in peers:
                peer.join()
            makespans.append(makespan)
            coupled.append(peers[0].makespan)
            universal.append(peers[1].makespan)
    if not quick:
        draw(trajectories, bound)
    ours, held, any_slot = (float(np.median(values)) for values in (makespans, coupled, universal))
    slots = " + ".join(f"{count} {stage.upper()}" for stage, count in SLOTS.items())
    return [
        Row(
            f"makespan, slots {slots}",
            ours,
            "s",
            "bound: max over stages of work / slots",
            ours / bound,
            f"at most {TARGET:g}× the bound",
            ours / bound <= TARGET,
        ),
        Row("the bound", bound, "s"),
        Row(f"one worker per job, {SLOTS['run']} workers (RUN's slots)", held, "s", "the service", held / ours),
        Row(
            f"one worker per job, {sum(SLOTS.values())} workers that can be any stage's slot",
            any_slot,
            "s",
            "the service",
            any_slot / ours,
        ),
    ]


if __name__ == "__main__":
    main("overlap", f"{JOBS} jobs with sleeps for phases: how well the stages overlap", measure)
