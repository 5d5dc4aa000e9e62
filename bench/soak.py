"""The service at a steady rate of empty jobs for a long time: does any process grow?

Jobs are submitted by the clock, `--rate` a second, for `--minutes`; results are collected as they come. Every few
seconds the resident memory and the open files of each process are read, including this one (the trainer). A process has
settled after a sixth of the time, five minutes of the default half hour; its memory at the end, the median of the last
tenth of the samples, is compared with the median around that moment.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from harness import Row, command, picture_path, report
from service import BenchService

from prorl_zmq import Job, RolloutClient

if TYPE_CHECKING:
    import argparse

STAGES = [("init", 64), ("run", 64), ("eval", 64)]
SAMPLES = 240
"""In a run of any length."""
SETTLED = 1 / 6
"""Of the time."""
GROWTH = 0.05
QUICK_MINUTES = 0.2
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
COLLECT_S = 0.02


class Samples:
    """Memory and open files of each process over time.

    Args:
        pids: the processes by name.
        every_s: how often to look.
    """

    def __init__(self, pids: dict[str, int], every_s: float) -> None:
        self._pids = pids
        self._every_s = every_s
        self._next = self._began = time.monotonic()
        self.times: list[float] = []
        self.resident: dict[str, list[int]] = {name: [] for name in pids}
        self.files: dict[str, list[int]] = {name: [] for name in pids}

    def take(self, now: float) -> None:
        """Look, if it is time."""
        if now < self._next:
            return
        self._next = now + self._every_s
        self.times.append(now - self._began)
        for name, pid in self._pids.items():
            self.resident[name].append(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES)
            self.files[name].append(len(os.listdir(f"/proc/{pid}/fd")))  # noqa: PTH208 - often

    def settled_and_end(self, values: list[int]) -> tuple[float, float]:
        """Give the medians around the time when a process has settled, and at the end."""
        count = len(values)
        near = max(1, count // 20)
        settled = round(SETTLED * count)
        return float(np.median(values[settled - near : settled + near])), float(np.median(values[-2 * near :]))


def soak(minutes: float, rate: float) -> tuple[Samples, int, int, float]:
    """Give the samples, the jobs submitted, the jobs completed, and the seconds in which they were submitted."""
    with BenchService(STAGES) as service, RolloutClient(service.front_door) as client:
        samples = Samples({**service.pids(), "trainer": os.getpid()}, 60 * minutes / SAMPLES)
        began = time.monotonic()
        submitted = completed = 0
        while (now := time.monotonic()) - began < 60 * minutes:
            due = int((now - began) * rate) - submitted
            if due > 0:
                client.submit(Job(task="nothing", instance={}) for _ in range(due))
                submitted += due
            completed += sum(trajectory.reward == 1.0 for trajectory in client.collect(512, wait_s=COLLECT_S))
            samples.take(now)
        seconds = time.monotonic() - began
        completed += sum(trajectory.reward == 1.0 for trajectory in client.stream(timeout_s=60))
        return samples, submitted, completed, seconds


def draw(samples: Samples) -> None:
    """Draw each process's memory over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for name, values in samples.resident.items():
        axes.plot(np.array(samples.times) / 60, np.array(values) / 2**20, label=name)
    axes.axvline(SETTLED * samples.times[-1] / 60, color="0.8", zorder=0)
    axes.set_xlabel("minutes")
    axes.set_ylabel("resident memory, MiB")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(picture_path("soak"), dpi=120)
    plt.close(figure)


def measure(arguments: argparse.Namespace) -> list[Row]:
    samples, submitted, completed, seconds = soak(arguments.minutes, arguments.rate)
    if not arguments.quick:
        draw(samples)
    rows = [
        Row("jobs submitted", submitted / seconds, "1/s"),
        Row("jobs that did not complete", submitted - completed, "jobs", target="0", holds=submitted == completed),
    ]
    for name, values in samples.resident.items():
        settled, end = samples.settled_and_end(values)
        ratio = end / settled
        target = f"within {GROWTH:.0%} of what it was when settled"
        rows.append(
            Row(f"{name}: memory at the end", end / 2**20, "MiB", "settled", ratio, target, ratio <= 1 + GROWTH)
        )
    for name, counts in samples.files.items():
        settled, end = samples.settled_and_end(counts)
        rows.append(Row(f"{name}: open files", end, "files", target=f"{settled:g}, as settled", holds=end <= settled))
    return rows


def main() -> None:
    parser = command("soak", "jobs that do nothing, at a steady rate, for long")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=200.0, metavar="JOBS_PER_S")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.minutes = QUICK_MINUTES
    report("soak", "jobs that do nothing, at a steady rate, for long", arguments, partial(measure, arguments))


if __name__ == "__main__":
    main()
