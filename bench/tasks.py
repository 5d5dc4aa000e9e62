"""The tasks for training: swe-mini by agents with known answers, the overlap of its stages, and grader throughput.

- swe-mini: all instances through the whole service, in Apptainer sandboxes, by three policies: one applies the gold
  patch, one nothing, one a wrong patch; twice each. Agents answer at once, so sandboxes, git and tests on this
  machine's cores are measured. Ours is the processor time of the service's own processes: brokers, stage processes,
  execution servers, graders; the rest is git, the tests, and the machine's own work for them.
- overlap: the same, with turns as long as a language model's, compared with eight jobs at a time, one after the other
  in each of eight places, so that a job holds its place through INIT, RUN and EVAL. Concurrent stages cannot be faster
  than their processor time on all cores, nor than RUN in its slots; both are reported. Few cores bound both, so the
  length of turns makes these two equal: shorter ones leave the cores, and longer ones the slots, no time to gain.
- graders: through the handlers' EVAL in one process with the loop of a stage process.

The instances are those of `prorl tasks make-swe --recipe swe-mini`, which takes some minutes the first time.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from pathlib import Path

import uvloop
from harness import Incomplete, Row, main
from patch_engine import SPREAD
from tasks_graders import Rate, code_rate, math_rate
from tasks_swe import PatchService, Run, rows_of

from prorl_zmq.tools.containers.kinds import problem_with
from prorl_zmq.tools.images.image import default_root

POLICIES = {"gold": 1.0, "empty": 0.0, "wrong": 0.0}
"""And the share that each must resolve."""
SLOTS = 8
TURNS = 5
"""Of an episode of the patching agents."""
ROLLOUTS = 3
"""Of each instance in the comparison, so that filling and emptying the stages is a small part of it."""
STALL_S = 0.05
OVERLAP = 1.5


def measure(quick: bool) -> list[Row]:
    rows = graders(quick)
    data = default_root().parent / "swe-mini.jsonl"
    if not data.exists():
        raise Incomplete(f"there is no {data}: prorl tasks make-swe --recipe swe-mini --out {data}", rows)
    if problem := problem_with("apptainer"):
        raise Incomplete(problem, rows)
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        if quick:
            kept = Path(folder) / "quick.jsonl"
            kept.write_text("".join(data.read_text(encoding="utf-8").splitlines(keepends=True)[::12]), encoding="utf-8")
            data = kept
        known, gold = known_answers(data, quick)
        return rows + known + ([] if quick else overlap(data, balanced_turn_s(gold)))


def known_answers(data: Path, quick: bool) -> tuple[list[Row], Run]:
    """All instances by three policies; with a run under the gold one."""
    rows: list[Row] = []
    golds: list[Run] = []
    count = len(rows_of(data))
    for policy, share in list(POLICIES.items())[: 1 if quick else None]:
        with PatchService(data, policy, 0.0) as service:
            runs = [service.run(data, count) for _ in range(1 if quick else 2)]
        for run in runs:
            report_problems(policy, run)
        resolved = [sum(reward == 1.0 for reward in run.resolved().values()) for run in runs]
        same = all(run.resolved() == runs[0].resolved() for run in runs)
        complete = all(each.outcome == "completed" for run in runs for each in run.trajectories)
        rows.append(
            Row(
                f"swe-mini, {count} instances, {policy} patch: resolved, {' and '.join(map(str, resolved))}",
                100 * min(resolved) / count,
                "%",
                target=f"{share:.0%}, the same each time",
                holds=complete and same and all(each == share * count for each in resolved),
            )
        )
        if policy == "gold":
            golds = runs
            rows += pace(golds[-1], count)
    return rows, golds[-1]


def pace(run: Run, count: int) -> list[Row]:
    """How fast, and what of it is ours."""
    share = 100 * run.ours_s / run.all_s
    return [
        Row("swe-mini, gold patch", count / run.wall_s * 60, "instances/minute"),
        Row("swe-mini, gold patch: processor time in our processes", share, "% of all that was used"),
        Row("swe-mini, gold patch: our processor time for each instance", 1000 * run.ours_s / count, "ms"),
    ]


def balanced_turn_s(run: Run) -> float:
    """Give the median turn with which RUN's slots take as long as the cores do, from a run whose turns took no time."""
    jobs = len(run.trajectories)
    each_s = SLOTS * run.all_s / jobs / len(os.sched_getaffinity(0))
    tools_s = sum(one.result.timings["run"] for one in run.trajectories) / jobs
    return round(max(0.1, (each_s - tools_s) / TURNS / math.exp(SPREAD**2 / 2)), 1)


def overlap(data: Path, turn_s: float) -> list[Row]:
    """The stages side by side, and one job after the other in each place."""
    count = len(rows_of(data))
    with PatchService(data, "gold", turn_s) as service:
        places = service.run(data, SLOTS, ROLLOUTS)
        staged = service.run(data, count * ROLLOUTS, ROLLOUTS)
    for run in (places, staged):
        report_problems("gold", run)
    ratio = places.wall_s / staged.wall_s
    run_s = sum(one.result.timings["run"] for one in staged.trajectories)
    bound_s = max(staged.all_s / len(os.sched_getaffinity(0)), run_s / SLOTS)
    what, against = f"swe-mini, a model's turns of {turn_s:g} s", f"{SLOTS} places, each phase after the other"
    return [
        Row(
            f"{what}: {SLOTS} slots per stage",
            staged.wall_s,
            "s",
            against=against,
            ratio=ratio,
            target=f"at least {OVERLAP}× as fast",
            holds=ratio >= OVERLAP,
        ),
        Row(
            f"{what}: least that the cores and RUN's {SLOTS} slots allow",
            bound_s,
            "s",
            against=against,
            ratio=places.wall_s / bound_s,
        ),
    ]


def graders(quick: bool) -> list[Row]:
    """Answers and tests per second."""
    answers = uvloop.run(math_rate(200 if quick else 4000))
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        tests = uvloop.run(code_rate(8 if quick else 64, "bubblewrap", Path(folder)))
    return [*_rate_rows("math answers", answers), *_rate_rows("code tests, bubblewrap", tests)]


def _rate_rows(what: str, rate: Rate) -> list[Row]:
    stall = Row(
        f"{what}: the loop's longest stall",
        1000 * rate.stall_s,
        "ms",
        target=f"under {1000 * STALL_S:g} ms",
        holds=rate.stall_s < STALL_S,
    )
    return [Row(what, rate.per_second, "/s"), stall]


def report_problems(policy: str, run: Run) -> None:
    """Say on stderr what did not go as it should."""
    for one in run.trajectories:
        if one.outcome != "completed" or one.reward != POLICIES[policy]:
            problem = one.result.notes.get("problem", "") or one.result.notes.get("failed_tests", "")
            print(f"{policy}: {one.job_id}: {one.outcome}, {one.reward}: {one.error or problem}", file=sys.stderr)


if __name__ == "__main__":
    main("tasks", "swe-mini by agents with known answers, its stages side by side, and graders under load", measure)
