"""Compares the ratios of the cheap benchmarks with those of the last landing: `python bench/guard.py [--record]`.

Each benchmark runs quickly, in its own process. A ratio is to a peer of the same run, so that it depends little on the
machine; the last ones are in results/guard.json, which `--record` writes. If one is more than 15 % worse, its benchmark
runs once more. If it is as much worse again, the exit code is 1. Rates and latencies of several processes depend on the
number of free cores, so they are shown and not judged; CPU times are. The whole run takes at most two minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from harness import RESULTS, machine
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Ratios = Mapping[str, float]
    """By the key of what is guarded."""

TOLERANCE = 0.15
RUN_S = 60.0
RECORD = RESULTS / "guard.json"


class Guarded(NamedTuple):
    """A row of a benchmark, the first of this name, whose ratio is not to become worse."""

    bench: str
    row: str
    better: Literal["higher", "lower"]
    is_judged: bool = True

    @property
    def key(self) -> str:
        return f"{self.bench}: {self.row}"

    def worse(self, before: float, now: float) -> float:
        """Return by which share a ratio has become worse; below 0: it is better."""
        return (before / now if self.better == "higher" else now / before) - 1


GUARDED = (
    Guarded("frontdoor", "CPU of an empty job, all processes", "lower"),
    Guarded("frontdoor", "throughput", "higher", is_judged=False),
    Guarded("frontdoor", "latency p50", "lower", is_judged=False),
    Guarded("assign", "assign+release", "higher", is_judged=False),
    Guarded("startup", "import prorl_zmq on top", "lower"),
)


class Verdict(NamedTuple):
    """What came of one ratio."""

    guarded: Guarded
    before: float | None
    """None: the last landing did not have it."""
    now: float
    """Measured again, if it was too much worse at first."""

    @property
    def worse(self) -> float:
        return self.guarded.worse(self.before, self.now) if self.before is not None else 0.0

    @property
    def fails(self) -> bool:
        return self.guarded.is_judged and self.worse > TOLERANCE


def ratios_of(bench: str) -> dict[str, float]:
    """Run a benchmark; return the ratios that are guarded.

    Raises:
        LookupError: it does not report one of them.
    """
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        report = Path(folder) / "report.json"
        script = str(Path(__file__).with_name(f"{bench}.py"))
        command = [sys.executable, script, "--quick", "--json", str(report)]
        subprocess.run(command, check=True, timeout=RUN_S, stdout=subprocess.DEVNULL)
        rows = json.loads(report.read_text())["rows"]
    found: dict[str, float] = {}
    for guarded in GUARDED:
        if guarded.bench == bench:
            ratio = next((row["ratio"] for row in rows if row["name"] == guarded.row), None)
            if ratio is None:
                raise LookupError(f"{bench} reports no ratio of {guarded.row!r}")
            found[guarded.key] = ratio
    return found


def verdicts(before: Ratios, measure: Callable[[str], Ratios]) -> list[Verdict]:
    """Measure all that is guarded, and once more what is too much worse."""
    found: list[Verdict] = []
    for bench in dict.fromkeys(guarded.bench for guarded in GUARDED):
        mine = [guarded for guarded in GUARDED if guarded.bench == bench]
        first = _judge(mine, before, measure(bench))
        if any(verdict.fails for verdict in first):
            second = _judge(mine, before, measure(bench))
            first = [again if one.fails else one for one, again in zip(first, second, strict=True)]
        found += first
    return found


def _judge(mine: Iterable[Guarded], before: Ratios, now: Ratios) -> list[Verdict]:
    return [Verdict(one, before.get(one.key), now[one.key]) for one in mine]


def table(found: Iterable[Verdict]) -> Table:
    made = Table(title="ratios to peers, of the last landing and of this one", title_justify="left")
    for name in ("what", "better", "last landing", "now", "change"):
        made.add_column(name, justify="left" if name in ("what", "better") else "right")
    for one in found:
        change = "new" if one.before is None else f"{abs(one.worse):.0%} {'worse' if one.worse > 0 else 'better'}"
        before = "" if one.before is None else f"{one.before:.3g}×"
        made.add_row(one.guarded.key, one.guarded.better, before, f"{one.now:.3g}×", change)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/guard.py", description="compare ratios with the last landing's")
    parser.add_argument("--record", action="store_true", help="write the ratios of this landing, and compare nothing")
    arguments = parser.parse_args()
    if not arguments.record and not RECORD.exists():
        parser.error(f"{RECORD} is missing: write it with --record")
    before = {} if arguments.record else json.loads(RECORD.read_text())["ratios"]
    found = verdicts(before, ratios_of)
    Console().print(table(found))
    if arguments.record:
        content = {"machine": machine(), "ratios": {one.guarded.key: one.now for one in found}}
        RECORD.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    failed = [one for one in found if one.fails]
    for one in failed:
        print(f"{one.guarded.key} is {one.worse:.0%} worse than at the last landing, twice in a row", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
