"""Batches of informative groups: time, waste, time to free cancelled slots, and scale.

- Collecting (dapo_collect.py): through `open_batch`, and batch by batch, on real services whose RUN sleeps. The figures
  are of ten batches in a row, as in a training: jobs under way at the end of one batch continue in the next. Rows for
  the first batch alone exclude from the bound the jobs under way at its end (dapo_account.py).
- Cancelling (dapo_cancel.py): a batch that ends frees slots with real Apptainer sandboxes.
- Size (dapo_simulation.py): the pure cores on 10,000 simulated slots.
- Training (dapo_training.py): whether rollouts and learning overlap in `prorl demo --overlap`, a real training.

Left out: several trainers at once; and, except in the training, engines (the sleeps stand for them) and new weights.
The full run takes about ten minutes on two otherwise idle cores.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from dapo_account import informative_length
from dapo_cancel import GROUP as CANCEL_GROUP
from dapo_cancel import cancel_s
from dapo_collect import Size, ours, theirs
from dapo_picture import draw
from dapo_prompts import GROUP, NOT_INFORMATIVE
from dapo_simulation import PARTS, Simulation
from dapo_training import train
from harness import Incomplete, Row, main, picture_path, quantiles
from sandbox_sides import root_filesystem

from prorl_zmq.tools.containers.kinds import problem_with

if TYPE_CHECKING:
    from dapo_collect import Collected

FULL = Size()
QUICK = Size(slots=16, groups=8, batches=3, mean_s=0.1)
CARRIED, DROPPED = "open_batch, carried over", "open_batch, dropped at each end"
PLAIN, TRIPLE = "batch by batch", "batch by batch, 3× the prompts"
SIMULATED = {False: (10_000, 512, 1_000_000), True: (500, 32, 10_000)}
"""By `quick`: slots, groups of a batch, jobs."""
CANCELS = {False: (32, 12), True: (6, 2)}
"""Slots, batches."""
TARGET_BOUND = 1.15
TARGET_FASTER = 2.0
TARGET_WASTED = 0.05
TARGET_CANCEL_S = 1.0
TARGET_WALL_S = 300.0
TARGET_USE = 0.97
TARGET_GROWTH = 1.2
TARGET_STEP = 1.15


def collect(size: Size) -> dict[str, Collected]:
    """Collect in all ways."""
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        ways = {CARRIED: ours(size, Path(folder), "running"), DROPPED: ours(size, Path(folder), "nothing")}
        ways[PLAIN], ways[TRIPLE] = theirs(size, Path(folder), (1, 3))
    return ways


def collect_rows(size: Size, ways: dict[str, Collected]) -> list[Row]:
    carried, dropped, plain, triple = ways.values()
    over_bound = carried.over_bound(size.batches)
    faster, faster_than_triple = (way.seconds / carried.seconds for way in (plain, triple))
    what = f"{size.groups} informative groups of {GROUP}"
    first = {name: way.complete[0] - way.started for name, way in ways.items()}
    return [
        Row(
            f"{what} on {size.slots} slots, each of {size.batches} batches in a row",
            carried.seconds,
            "s",
            "bound: work of the jobs that had to run / slots",
            over_bound,
            f"at most {TARGET_BOUND:g}× the bound",
            over_bound <= TARGET_BOUND,
        ),
        Row(
            f"{PLAIN}, as many prompts as groups are wanted",
            plain.seconds,
            "s",
            "open_batch",
            faster,
            f"open_batch is at least {TARGET_FASTER:g}× as fast",
            faster >= TARGET_FASTER,
        ),
        Row(
            TRIPLE,
            triple.seconds,
            "s",
            "open_batch",
            faster_than_triple,
            f"open_batch is at least {TARGET_FASTER:g}× as fast",
            faster_than_triple >= TARGET_FASTER,
        ),
        Row(DROPPED, dropped.seconds, "s", "open_batch", dropped.seconds / carried.seconds),
        Row("the first batch alone", first[CARRIED], "s", "its bound", carried.over_bound(1)),
        Row(f"the first batch alone, {PLAIN}", first[PLAIN], "s", "open_batch", first[PLAIN] / first[CARRIED]),
        Row(f"the first batch alone, {TRIPLE}", first[TRIPLE], "s", "open_batch", first[TRIPLE] / first[CARRIED]),
    ]


def waste_rows(size: Size, ways: dict[str, Collected]) -> list[Row]:
    accounts = {name: way.account() for name, way in ways.items()}
    carried, dropped = accounts[CARRIED], accounts[DROPPED]
    rows = [
        Row(
            f"rollouts wasted in {size.batches} batches, carried over",
            100 * carried.wasted_rollouts,
            "%",
            "dropped at each end",
            carried.wasted_rollouts / dropped.wasted_rollouts,
            f"under {100 * TARGET_WASTED:g} %",
            carried.wasted_rollouts < TARGET_WASTED,
        ),
    ]
    rows += [
        Row(f"rollouts wasted, {name}", 100 * accounts[name].wasted_rollouts, "%") for name in (DROPPED, PLAIN, TRIPLE)
    ]
    rows += [Row(f"slots' busy time wasted, {name}", 100 * each.wasted_time, "%") for name, each in accounts.items()]
    for name in (CARRIED, DROPPED):
        kept = set().union(*ways[name].kept)
        length, in_order = informative_length(kept), informative_length(None, len(kept))
        against = f"the first {len(kept)} informative prompts"
        rows.append(Row(f"mean length of kept rollouts, {name}", size.mean_s * length, "s", against, length / in_order))
    return rows


def cancel_rows(slots: int, seconds: list[float]) -> list[Row]:
    p50, _, p99 = quantiles(seconds)
    at_once = slots - CANCEL_GROUP
    return [
        Row(
            f"Apptainer sandboxes, {at_once} cancelled at once: cancel to the slot's next job, p99 of {len(seconds)}",
            1e3 * p99,
            "ms",
            target=f"under {TARGET_CANCEL_S:g} s",
            holds=p99 < TARGET_CANCEL_S,
        ),
        Row("cancel to the slot's next job, p50", 1e3 * p50, "ms"),
    ]


def simulation_rows(slots: int, target_groups: int, jobs: int) -> list[Row]:
    result = Simulation(slots, target_groups).run(jobs)
    early, late = result.sampler_s[1], result.sampler_s[-1]  # the first part also fills the slots
    part = f"{jobs // PARTS:,} jobs"
    return [
        Row(
            f"simulation: {jobs:,} jobs on {slots:,} slots, {result.batches} batches of {target_groups} groups",
            result.wall_s,
            "s",
            target=f"under {TARGET_WALL_S:g} s",
            holds=result.wall_s < TARGET_WALL_S,
        ),
        Row(
            "simulation: slot use",
            100 * result.use,
            "%",
            target=f"at least {100 * TARGET_USE:g} %",
            holds=result.use >= TARGET_USE,
        ),
        Row(
            f"simulation: the sampler's CPU time for each of the last {part}",
            1e6 * late,
            "µs",
            f"each of the second {part}",
            late / early,
            f"at most {TARGET_GROWTH:g}×",
            late / early <= TARGET_GROWTH,
        ),
    ]


def training_rows() -> list[Row]:
    found = train()
    return [
        Row(
            f"training: wall time of a step, mean of {found.steps}",
            found.step_s,
            "s",
            "the longer of rollouts and learning, each alone",
            found.ratio,
            f"at most {TARGET_STEP:g}×",
            found.ratio <= TARGET_STEP,
        ),
        Row("training: a step's rollouts alone", found.rollout_alone_s, "s"),
        Row("training: a step's learning alone", found.learn_alone_s, "s"),
    ]


def measure(quick: bool) -> list[Row]:
    size = QUICK if quick else FULL
    ways = collect(size)
    rows = collect_rows(size, ways) + waste_rows(size, ways)
    missing, cancels = [], []
    image, no_image = root_filesystem(build=not quick)
    if problem := problem_with("apptainer") or no_image:
        missing.append(f"no Apptainer sandboxes to cancel: {problem}")
    else:
        slots, batches = CANCELS[quick]
        cancels = cancel_s(image, slots, batches)
        rows += cancel_rows(slots, cancels)
    rows += simulation_rows(*SIMULATED[quick])
    if not quick:
        draw(picture_path("dapo"), ways, (CARRIED, TRIPLE, PLAIN), cancels)
        if len(os.sched_getaffinity(0)) > 1:
            rows += training_rows()
        else:
            missing.append("rollouts and learning need a core each")
    if missing:
        raise Incomplete("; ".join(missing), rows)
    return rows


if __name__ == "__main__":
    about = (
        f"batches of informative groups, {100 * NOT_INFORMATIVE:g} % of the prompts not informative, long-tailed jobs"
    )
    main("dapo", about, measure)
