"""How many rollouts an engine should take: a fixed number, or the number that its host finds (`Room`).

Simulated in a virtual clock (`scheduling_simulation.py`, `scheduling_engine.py`) with the service's own cores: an
engine whose KV cache holds about 23 contexts (1×), groups of 8 rollouts with heavy-tailed turns, and tool calls of
about 6 seconds on average, or a quarter or four times that. Figures are means over the seeds, without the first quarter
of the time; they are the same on every machine. No setting differs between the rows. Real (`scheduling_real.py`): 64
rollouts offered to one vLLM whose KV cache holds eight of them at their ends, for `REAL_S` CPU seconds each.

With more RUN slots than the best fixed number, our row shows what finding the number costs; the best fixed number of
one duration of tools is wrong by a factor of two for another one. Rollouts of groups are timed from the group's first
admission to its last end. `scheduling_cost.py` measures what it costs the brokers.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import scheduling_real
from engines import WITHOUT, Engines, vllm_python
from harness import Incomplete, Row, command, report
from scheduling_cost import COST, cost_rows
from scheduling_real import FITTING as REAL_FITTING
from scheduling_real import FIXED, NO_LIMIT, OURS
from scheduling_simulation import HEARTBEAT_S, STARVED_S, Outcome, Plan, simulate

from prorl_zmq.inference.hosting.parking import PARK_S

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

ABOUT = "rollouts on a simulated engine whose KV cache holds 23 contexts"
FITTING = 23
LOADS = {0.5: 12, 1: 23, 2: 46, 4: 92}
"""RUN slots for each engine, by multiples of what fits."""
TOOLS = {0.25: 2.0, 1.0: 2.0, 4.0: 1.4}
"""Factors of the duration of tool calls, and what ours must reach against 4× as a fixed number."""
CAPS = (12, 17, 19, 21, 23, 25, 28, 36, 46, 52, 92)
QUICK_CAPS = (12, 19, 23, 25, 46, 92)
RATE, GROUPS = 0.95, 1.15
WEIGHTS_S = 60.0
REAL = "a real vLLM"
REAL_S = 60.0
REAL_RATE, REAL_HITS = 2.0, 0.9
PARTS = ("simulated", "cost", "real")
COST_TURNS, QUICK_TURNS = 160, 2

PARKED = f"at most {PARK_S:g} s and a heartbeat"

Results = dict[Plan, list[Outcome]]


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Measure all parts, or one; a report that is there keeps the rows of the others."""
    quick, turns = arguments.quick, QUICK_TURNS if arguments.quick else COST_TURNS
    if arguments.part is None:
        rows = simulated_rows(quick) + cost_rows(turns)
        return rows if quick else rows + real_rows(rows)
    kept: list[Row] = []
    if arguments.json is not None and arguments.json.exists():
        before = [Row(**row) for row in json.loads(arguments.json.read_text())["rows"]]
        kept = [row for row in before if part_of(row) != arguments.part]
    if arguments.part == "real":
        rows = real_rows(kept)
    else:
        rows = simulated_rows(quick) if arguments.part == "simulated" else cost_rows(turns)
    return sorted(kept + rows, key=lambda row: PARTS.index(part_of(row)))


def part_of(row: Row) -> str:
    """Return which of `PARTS` a row belongs to."""
    return "real" if row.name.startswith(REAL) else "cost" if row.name.startswith(COST) else "simulated"


def simulated_rows(quick: bool) -> list[Row]:
    hours, seeds, caps = (1.5, 1, QUICK_CAPS) if quick else (4.0, 3, CAPS)
    fixed = [Plan(hours, cap, tools, cap) for tools in TOOLS for cap in caps]
    ours = [Plan(hours, slots, tools) for tools in TOOLS for slots in LOADS.values()]
    updated = [Plan(hours, LOADS[4], tools, weights_s=WEIGHTS_S) for tools in TOOLS]
    crowded = [Plan(hours, 10 * FITTING, tools) for tools in TOOLS]
    halved = [Plan(hours, LOADS[4], tools, halved=hours / 4, parks=parks) for tools in TOOLS for parks in (True, False)]
    long = long_day(3.0 if quick else 24.0)
    results = run([*fixed, *ours, *updated, *crowded, *halved], seeds) | run([long], 1)
    rows = [row for tools in TOOLS for row in tools_rows(tools, caps, hours, results)]
    rows += [updated_row(plan, results) for plan in updated]
    rows += [crowded_row(plan, results) for plan in crowded]
    rows += [halved_row(plan, results) for plan in halved if plan.parks]
    return rows + day_rows(long, results)


def real_rows(others: list[Row]) -> list[Row]:
    """Measure one real engine.

    Raises:
        Incomplete: there is no vLLM; it has the other rows.
    """
    python = vllm_python()
    if python is None:
        raise Incomplete(WITHOUT, others)
    with Engines(python) as engines:
        command = (scheduling_real.__file__, str(engines.folder / "llama"), f"{REAL_S:g}")
        found = json.loads(engines.output(*command, timeout_s=60.0 * REAL_S).splitlines()[-1])
    rate, hits = (
        {way: one[above] / one[below] for way, one in found.items()}
        for above, below in (("turns", "seconds"), ("cached_tokens", "prompt_tokens"))
    )
    name, same = f"{REAL} that holds {REAL_FITTING}", found[OURS]["same"]
    ratio, hit_ratio = rate[OURS] / rate[NO_LIMIT], hits[OURS] / hits[FIXED]
    at_least, most = f"at least {REAL_RATE:g}×", f"at least {REAL_HITS:g}×"
    return [
        Row(name, rate[OURS], "turns/CPU s", NO_LIMIT, ratio, at_least, ratio >= REAL_RATE),
        Row(f"{name}, {FIXED}", rate[FIXED], "turns/CPU s", NO_LIMIT, rate[FIXED] / rate[NO_LIMIT]),
        Row(f"{name}: prefix hits", 100 * hits[OURS], "%", FIXED, hit_ratio, most, hit_ratio >= REAL_HITS),
        Row(f"{name}: turns whose tokens are those of an idle one", 100 * same, "%", target="100 %", holds=same == 1),
    ]


def long_day(hours: float) -> Plan:
    """Return the plan in which most happens."""
    lost, burst = (hours / 4, hours / 3), (hours / 2, 0.75 * hours, 10 * FITTING)
    return Plan(hours, LOADS[4], engines=3, clients=16, weights_s=300.0, lost=lost, burst=burst)


def run(plans: Iterable[Plan], seeds: int) -> Results:
    """Simulate each plan with several seeds, on all cores."""
    seeded = [(plan, replace(plan, seed=seed)) for plan in dict.fromkeys(plans) for seed in range(1, seeds + 1)]
    results: Results = {}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for (plan, _), outcome in zip(seeded, pool.map(simulate, [one for _, one in seeded]), strict=True):
            results.setdefault(plan, []).append(outcome)
    return results


def mean(outcomes: list[Outcome], name: str) -> float:
    return float(np.mean([getattr(one, name) for one in outcomes]))


def tools_rows(tools: float, caps: tuple[int, ...], hours: float, results: Results) -> list[Row]:
    """Compare ours with the best fixed number that the RUN slots allow, and with 4× as a fixed number."""
    rows: list[Row] = []
    for load, slots in LOADS.items():
        plans = [Plan(hours, cap, tools, cap) for cap in caps if cap <= slots]
        best = results[max(plans, key=lambda plan: mean(results[plan], "tokens_per_s"))]
        cap = round(mean(best, "live"))
        found = results[Plan(hours, slots, tools)]
        name, against = f"tools × {tools:g}, slots {load:g}×", f"the best fixed number, {cap}"
        rate, group_s = mean(found, "tokens_per_s"), mean(found, "group_s")
        ratio = rate / mean(best, "tokens_per_s")
        rows.append(Row(name, rate, "tokens/s", against, ratio, f"at least {RATE:g}×", ratio >= RATE))
        ratio = group_s / mean(best, "group_s")
        rows.append(Row(f"{name}: groups p95", group_s, "s", against, ratio, f"at most {GROUPS:g}×", ratio <= GROUPS))
    thrashing = mean(results[Plan(hours, LOADS[4], tools, LOADS[4])], "tokens_per_s")
    ratio = rate / thrashing
    target = f"at least {TOOLS[tools]:g}×"
    rows.append(Row(name, rate, "tokens/s", "all slots used", ratio, target, ratio >= TOOLS[tools]))
    again = 100 * mean(found, "again")
    rows.append(Row(f"{name}: prompt tokens computed again", again, "%"))
    return rows


def updated_row(plan: Plan, results: Results) -> Row:
    live = mean(results[plan], "live")
    ratio = live / mean(results[replace(plan, weights_s=float("inf"))], "live")
    name = f"tools × {plan.tools:g}, weights each {WEIGHTS_S:g} s: rollouts under way"
    return Row(name, live, "rollouts", "without new weights", ratio, "0.8 to 1.2×", 0.8 <= ratio <= 1.2)


def crowded_row(plan: Plan, results: Results) -> Row:
    most = float(np.max([one.most_live for one in results[plan]]))
    ratio = most / mean(results[plan], "live")
    name = f"tools × {plan.tools:g}, a start with 10× the jobs: most rollouts"
    return Row(name, most, "rollouts", "the mean afterwards", ratio, "at most 1.3×", ratio <= 1.3)


def halved_row(plan: Plan, results: Results) -> Row:
    rate = mean(results[plan], "tokens_per_s")
    ratio = rate / mean(results[replace(plan, parks=False)], "tokens_per_s")
    name = f"tools × {plan.tools:g}, half of the KV cache lost: with parking"
    return Row(name, rate, "tokens/s", "without parking", ratio)


def day_rows(plan: Plan, results: Results) -> list[Row]:
    (found,) = results[plan]
    parked_in_time = found.longest_parked_s < PARK_S + HEARTBEAT_S
    name = f"{plan.hours:g} h, 3 engines, 16 clients, one engine lost and back, a burst of 10×"
    starved = f"{name}: rollouts that those of later groups passed for more than {STARVED_S / 60:g} minutes"
    return [
        Row(starved, found.starved, "rollouts", target="0", holds=found.starved == 0),
        Row(f"{name}: longest time in which late rollouts of earlier groups passed one", found.longest_by_group_s, "s"),
        Row(f"{name}: longest wait of a turn in an engine", found.longest_turn_s, "s"),
        Row(f"{name}: longest time of a parked turn", found.longest_parked_s, "s", target=PARKED, holds=parked_in_time),
    ]


if __name__ == "__main__":
    parser = command("scheduling", ABOUT)
    parser.add_argument("--part", choices=PARTS, help="measure only this part, and keep the rows of the others")
    given = parser.parse_args()
    report("scheduling", ABOUT, given, partial(measure, given))
