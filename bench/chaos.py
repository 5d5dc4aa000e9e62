"""A whole pipeline under load while its processes are killed, stopped and starved, its link cut and its disk filled.

Brokers, two stage processes per role, two engines and real sandboxes on two nodes (chaos_nodes.py), run by `prorl
serve` and by this process (chaos_pipeline.py), with default settings; a trainer that keeps publishing weights, and may
die too (chaos_client.py); real jobs with known rewards (chaos_jobs.py), some of agents that sabotage (chaos_engine.py);
one strike at a time (chaos_strikes.py), all from one seed (chaos_plan.py). chaos_account.py defines lost, hung,
duplicate, fabricated, escape, outdated and recovery; orphans are counted after a clean end (chaos_remains.py). `--only`
runs a part, `--keep` keeps logs, ledger and strikes.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from chaos_account import Account, delays, read_account, recoveries, usual_count
from chaos_pipeline import Pipeline
from chaos_plan import LAST_S, Strike, plan_strikes
from chaos_remains import remains
from chaos_strikes import strike_once
from harness import Row, command, picture_path, report

from prorl_zmq.tools.containers.kinds import problem_with

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from chaos_pipeline import Keeper

IN_FLIGHT = 48
HANG_S = 150.0
"""Longer than any limit of a job: the longest of its waits is a minute, its attempts are three."""
QUICK_MINUTES = 0.8
LASTING_NAMES = {
    "stop": "SIGSTOPs",
    "cut": "link cuts",
    "starve": "processes without descriptors",
    "crowd": "crowds of idle connections",
    "fill": "full disks",
}
GOAL_RECOVERY_S = 10.0
GOAL_KILLS, GOAL_JOBS = 60, 2000


class Chaos:
    """One run.

    Args:
        pipeline: the service, started.
        strikes: what to do to it.
    """

    def __init__(self, pipeline: Pipeline, strikes: Sequence[Strike]) -> None:
        self._pipeline = pipeline
        self._strikes = strikes
        self._started = time.monotonic()

    async def run(self, seed: int, seconds: float) -> bool:
        """Strike while jobs run; give whether each last trainer got all that it waited for."""
        until = self._started + seconds
        trainers = self._pipeline.keep_trainers(seed, IN_FLIGHT, until, HANG_S)
        for strike in self._strikes:
            await asyncio.sleep(self._started + strike.at_s - time.monotonic())
            await strike_once(self._pipeline, strike)
        return all([await self._ended(trainer, until) for trainer in trainers])

    async def _ended(self, trainer: Keeper, until: float) -> bool:
        limit_s = max(0.0, until - time.monotonic()) + 3 * HANG_S
        return await trainer.wait(limit_s) and trainer.codes[-1] == 0


async def run(
    pipeline: Pipeline, planned: Sequence[Strike], arguments: argparse.Namespace
) -> tuple[Account, list[Strike], tuple[float, float], list[str]]:
    """Run all of it; give the account, the strikes that hit, when it began and ended, and what was left behind."""
    if arguments.only:
        planned = [strike for strike in planned if strike.name in arguments.only or strike.victim in arguments.only]
    try:
        try:
            await pipeline.start()
            began = time.monotonic()
            complete = await Chaos(pipeline, planned).run(arguments.seed, 60 * arguments.minutes)
        finally:
            stuck = await pipeline.close()
        left = [f"process {name} did not end" for name in stuck] + await asyncio.to_thread(remains, pipeline)
        (pipeline.folder / "strikes.json").write_text(json.dumps([asdict(strike) for strike in planned], indent=2))
        account = read_account(pipeline.ledger, service_still_has=not complete)
        return account, [strike for strike in planned if strike.began], (began, began + 60 * arguments.minutes), left
    finally:
        if arguments.keep is not None:
            shutil.copytree(pipeline.folder, arguments.keep, ignore=_sockets, dirs_exist_ok=True)
        pipeline.remove()


def measure_alone(arguments: argparse.Namespace) -> list[Row]:
    pipeline = Pipeline(arguments.sandbox, image_of(arguments.sandbox), arguments.link)
    return measure("chaos", pipeline, plan_strikes(arguments.seed, arguments.minutes), arguments)


def measure(name: str, pipeline: Pipeline, planned: Sequence[Strike], arguments: argparse.Namespace) -> list[Row]:
    """Run it; give the rows, and draw the picture."""
    account, strikes, (began, ended), left = asyncio.run(run(pipeline, planned, arguments))
    usual = usual_count(account.ended_at, began, ended, strikes)
    recovered = recoveries(account.ended_at, strikes, usual, ended)
    again = delays(account.restarted, strikes)
    if not arguments.quick:
        draw(name, account, strikes, began, ended)
    for line in _details(account, strikes, recovered, left):
        print(line)
    kinds = Counter(strike.kind for strike in strikes)
    outcomes = account.outcomes
    other = outcomes.total() - outcomes["completed"] - outcomes["infrastructure_error"]
    reborn = sum(strike.kind == "kill" and "engine" in strike.victim for strike in strikes)
    must_be_none = {"jobs lost": account.lost, "jobs hung": account.hung, "duplicates": account.duplicates}
    must_be_none |= {"fabricated rewards": account.fabricated, "unearned escapes from 0": account.escapes}
    must_be_none |= {"weights older than announced": account.outdated, "orphans": left}
    p50, p99 = np.percentile(recovered or [0.0], [50, 99])
    goals = not arguments.quick
    rows = [
        _at_least("SIGKILLs", kinds["kill"], "strikes", GOAL_KILLS if goals else 0),
        Row("engines reborn with their first weights", reborn, "of these"),
        *[Row(f"{what}, {LAST_S:g} s each", kinds[kind], "strikes") for kind, what in LASTING_NAMES.items()],
        _at_least("jobs accepted", len(account.accepted), "jobs", GOAL_JOBS if goals else 0),
        Row("jobs completed", outcomes["completed"], "jobs"),
        Row("infrastructure errors", outcomes["infrastructure_error"], "jobs"),
        Row("other outcomes", other, "jobs"),
        Row("saboteurs' jobs", account.sabotages.total(), "jobs"),
        Row("weight updates", account.updates, "versions"),
        Row("jobs started again", len(account.restarted), "jobs"),
        *[Row(name, len(what), "found", target="0", holds=not what) for name, what in must_be_none.items()],
        Row("recovery p50", float(p50), "s"),
        Row("recovery p99", float(p99), "s", target=f"under {GOAL_RECOVERY_S:g} s", holds=bool(p99 < GOAL_RECOVERY_S)),
    ]
    if again:
        p50, p99 = np.percentile(again, [50, 99])
        rows += [Row("started again: strike to end, p50", float(p50), "s"), Row("the same, p99", float(p99), "s")]
    return rows


def _at_least(name: str, value: int, unit: str, goal: int) -> Row:
    return Row(name, value, unit, target=f"at least {goal}", holds=value >= goal) if goal else Row(name, value, unit)


def _details(account: Account, strikes: Sequence[Strike], recovered: Sequence[float], left: Sequence[str]) -> list[str]:
    """Say what a table has no room for."""
    by_name: dict[str, list[float]] = {}
    for strike, seconds in zip(strikes, recovered, strict=True):
        by_name.setdefault(strike.name, []).append(seconds)
    lines = [
        f"{name}: {len(all_s)} times, recovery {max(all_s):.1f} s at most" for name, all_s in sorted(by_name.items())
    ]
    lines += [f"infrastructure error {code}: {count}" for code, count in account.infrastructure.items()]
    lines += [f"the trainer got the error {code} {count} times" for code, count in account.errors.items()]
    lines += [f"given again to a trainer's successor: {account.given_again}"] if account.given_again else []
    lines += [f"saboteurs' jobs {outcome}: {count}" for outcome, count in account.sabotages.items()]
    lines += [f"updates that not all engines took, {code}: {count}" for code, count in account.refused_updates.items()]
    odd = (account.fabricated, account.escapes, account.outdated)
    lines += [f"job {number}: {why}" for each in odd for number, why in each.items()]
    lines += [f"lost: {sorted(account.lost)}"] if account.lost else []
    lines += [f"hung: {sorted(account.hung)}"] if account.hung else []
    return lines + [f"left behind: {what}" for what in left]


def draw(name: str, account: Account, strikes: Sequence[Strike], began: float, ended: float) -> None:
    """Draw how many jobs ended per second, with the strikes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
    times = np.array(account.ended_at) - began
    bins = np.arange(0, max(ended - began, times.max(initial=0.0)) + 2, 2.0)
    axes.stairs(np.histogram(times, bins)[0] / 2, bins, fill=True, color="0.75", label="jobs ended per second")
    colours = {"kill": "tab:red", "stop": "tab:blue", "cut": "tab:green"}
    colours |= {"starve": "tab:orange", "crowd": "tab:purple", "fill": "tab:brown"}
    for kind, colour in colours.items():
        those = [strike for strike in strikes if strike.kind == kind]
        for index, strike in enumerate(those):
            label = f"{kind} ({len(those)})" if index == 0 else None
            if kind == "kill":
                axes.axvline(strike.began - began, color=colour, linewidth=0.8, label=label)
            else:
                axes.axvspan(strike.began - began, strike.lifted - began, color=colour, alpha=0.2, label=label)
    axes.set_xlabel("seconds")
    axes.set_ylabel("jobs per second")
    axes.set_xlim(0, bins[-1])
    figure.legend(loc="outside upper center", ncols=len(colours) + 1)
    figure.savefig(picture_path(name), dpi=120)
    plt.close(figure)


def image_of(sandbox: str) -> str:
    """Give the root filesystem that a kind of sandbox needs."""
    if sandbox != "apptainer":
        return ""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from rootfs import root_filesystem

    return str(root_filesystem())


def _sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not (Path(folder) / name).is_file() and not (Path(folder) / name).is_dir()]


def flags(name: str, about: str) -> argparse.ArgumentParser:
    """Give the command line that all such runs have."""
    parser = command(name, about)
    parser.add_argument("--seed", type=int, default=1, help="of the jobs and of what happens to whom and when")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--sandbox", choices=("bubblewrap", "apptainer", "process"), help="[default: bubblewrap if it works]"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="only such strikes, as 'run' or 'kill run'"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="copy logs and ledger there")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.minutes = QUICK_MINUTES
    if arguments.sandbox is None:
        arguments.sandbox = "process" if problem_with("bubblewrap") else "bubblewrap"
    return arguments


def main() -> None:
    about = (
        "a pipeline under load while its processes are killed, stopped and starved, its link cut and its disk filled"
    )
    parser = flags("chaos", about)
    ways = ("namespaces", "proxy")
    parser.add_argument("--link", choices=ways, default="", help="what is cut [default: namespaces if allowed]")
    arguments = parsed(parser)
    report("chaos", about, arguments, partial(measure_alone, arguments))


if __name__ == "__main__":
    main()
