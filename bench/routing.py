"""The gain from the choice of a backend, in two parts.

Simulated (`routing_simulation.py`): one step of rollouts of very different lengths on 8 engines, with our weights of
jobs in flight, with a counter of assignments that never falls, and at random. The same jobs and the same times of
choice; medians over several seeds, in virtual seconds, so the figures are the same on every machine. A step's rate is
its jobs over its makespan, of which the longest rollout alone is 20 minutes; that of its first 90 % excludes such jobs.

Real (`routing_real.py`): 64 jobs of 8 turns on two vLLM engines with a tiny model, 16 in flight. The hit rate is the
share of all prompts' tokens that the engines found in their prefix caches. One engine alone, the reference, has both
cores and the memory of both caches. Medians over the runs, the policies in turns; the reference runs after the two have
ended. A quick run is the simulation only: engines take most of a minute to start.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import routing_real
import uvloop
from engines import WITHOUT, Engines, vllm_python
from harness import Incomplete, Row, main, picture_path
from routing_real import BY_GROUP, BY_JOB
from routing_simulation import CASES, COUNTER, ENGINES, OURS, POLICIES, RANDOM, SLOW_AND_TOLD, make_lengths, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from routing_real import Tally
    from routing_simulation import Server

    Ended = dict[str, dict[str, NDArray[np.float64]]]
    """By case and policy: when each job ended, in virtual seconds."""
    Tallies = dict[str, list[Tally]]
    """By way: its runs."""

JOBS = 8192
SEEDS = 9
TARGET = 1.2
PROMISED = ("one joins late", "one is 4× slower")
REAL_JOBS = 64
RUNS = 3
REAL_TARGET = 0.95
STICKY = (BY_JOB, BY_GROUP)
ALONE = "one engine alone"


def simulated(quick: bool) -> tuple[list[Row], Ended]:
    """Measure the simulated step in each case; give the times at which jobs ended as well, of one seed."""
    rows: list[Row] = []
    pictured: Ended = {}
    for case, servers in CASES.items():
        runs = runs_of(servers, 1 if quick else SEEDS)
        pictured[case] = {policy: ended[0] for policy, ended in runs.items()}
        promise = f"at least {TARGET:g}× the counter's" if case in PROMISED else ""
        rows += [
            rate_row(f"{case}: rate of the step", runs, COUNTER, promise=promise),
            rate_row(f"{case}: rate of the step", runs, RANDOM),
            rate_row(f"{case}: rate of its first 90 %", runs, COUNTER, share=0.9),
        ]
    told = runs_of(SLOW_AND_TOLD, 1 if quick else SEEDS)
    rows.append(rate_row("one is 4× slower, and its weight says so: rate of the step", told, COUNTER))
    return rows, pictured


def runs_of(servers: Sequence[Server], seeds: int) -> dict[str, list[NDArray[np.float64]]]:
    """Give, for each policy and seed, the times at which the jobs ended."""
    lengths = [make_lengths(JOBS, seed) for seed in range(seeds)]
    return {
        name: [run(policy(seed), servers, lengths[seed]) for seed in range(seeds)] for name, policy in POLICIES.items()
    }


def rate_row(
    name: str, runs: dict[str, list[NDArray[np.float64]]], peer: str, *, share: float = 1.0, promise: str = ""
) -> Row:
    """Return our jobs per second until that share of them had ended, and a peer's: medians over the seeds."""
    last = int(share * JOBS) - 1
    ours, theirs = (np.array([(last + 1) / ended[last] for ended in runs[policy]]) for policy in (OURS, peer))
    ratio = float(np.median(ours / theirs))
    return Row(name, float(np.median(ours)), "jobs/s", peer, ratio, promise, ratio >= TARGET if promise else None)


def real(python: str) -> tuple[list[Row], Tallies]:
    """Measure two real engines and one alone.

    Args:
        python: the interpreter that has vLLM.
    """
    with Engines(python) as engines:

        def run(cores: Sequence[Sequence[int]], memory: int, routers: Sequence[str]) -> Tallies:
            endpoints = [
                engines.host(f"engine-{memory}-{number}", *routing_real.flags(memory), cores=those)
                for number, those in enumerate(cores)
            ]
            engines.wait()
            try:
                return uvloop.run(routing_real.run_in_turns(endpoints, routers, REAL_JOBS, RUNS))
            finally:
                engines.stop()

        cores = sorted(os.sched_getaffinity(0))
        several = run([cores[:1], cores[1:2] or cores[:1]], 1, list(routing_real.ROUTERS))
        alone = run([cores[:2]], 2, [BY_JOB])[BY_JOB]
    tallies = {**several, ALONE: alone}
    rate, speed = (
        {name: middle(kind, runs) for name, runs in tallies.items()} for kind in ("hit_rate", "tokens_per_s")
    )
    rows: list[Row] = []
    for name in several:
        ratio = rate[name] / rate[ALONE]
        sticky = name in STICKY
        target = f"at least {REAL_TARGET:g}× that of one engine alone" if sticky else ""
        holds = ratio >= REAL_TARGET if sticky else None
        rows.append(Row(f"two real engines, {name}: hit rate", 100 * rate[name], "%", ALONE, ratio, target, holds))
    rows.append(Row(f"{ALONE}: hit rate", 100 * rate[ALONE], "%"))
    for name in several:
        against = routing_real.RANDOM
        rows.append(Row(f"two real engines, {name}", speed[name], "tokens/s", against, speed[name] / speed[against]))
    return rows, tallies


def middle(kind: str, runs: Sequence[Tally]) -> float:
    """Give the median of a property of runs."""
    return float(np.median([getattr(run, kind) for run in runs]))


def measure(quick: bool) -> list[Row]:
    rows, ended = simulated(quick)
    if quick:
        return rows
    python = vllm_python()
    if python is None:
        raise Incomplete(WITHOUT, rows)
    more, tallies = real(python)
    draw(ended, tallies)
    return rows + more


def draw(cases: Ended, tallies: Tallies) -> None:
    """Draw how many simulated jobs had ended at any time, for one seed, and what the real engines found."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(
        1, len(cases) + 1, figsize=(15, 4), layout="constrained", width_ratios=[1] * len(cases) + [1.3]
    )
    for axes, (case, runs) in zip(panels[:-1], cases.items(), strict=True):
        for (policy, ended), style in zip(runs.items(), ("-", "--", ":"), strict=True):
            axes.plot(ended / 60, np.arange(1, len(ended) + 1), style, label=policy, linewidth=2)
            axes.plot(ended[-1] / 60, len(ended), "|", color=axes.lines[-1].get_color(), markersize=12)
        axes.set_title(f"simulated: {case}")
        axes.set_xlabel("minutes")
    for axes in panels[1:-1]:
        axes.sharey(panels[0])
        axes.tick_params(labelleft=False)
    panels[0].set_ylabel("jobs ended")
    panels[0].legend(title="chosen by", loc="lower right")
    axes, names = panels[-1], list(tallies)[::-1]
    rates = np.array([100 * middle("hit_rate", tallies[name]) for name in names])
    bars = axes.barh(names, rates, color=["gray" if name == ALONE else "C0" for name in names])
    speeds = [middle("tokens_per_s", tallies[name]) for name in names]
    labels = [f"{rate:.1f} %, {speed:,.0f} tokens/s" for rate, speed in zip(rates, speeds, strict=True)]
    axes.bar_label(bars, labels, label_type="center", color="white", fontsize=8)
    axes.set(title="two real engines", xlabel="% of the prompts' tokens found in the prefix cache", xlim=(0, 100))
    figure.savefig(picture_path("routing"), dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main("routing", f"jobs on {ENGINES} simulated engines, and what two real ones find in their prefix caches", measure)
