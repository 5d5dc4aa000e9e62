"""The shared parts of all benchmarks: command line, rows with their targets, table, JSON file, picture folder.

A row is a measured value; most have a ratio to a peer or a limit that was measured in the same run on the same machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One measured figure."""

    name: str
    value: float
    unit: str
    against: str = ""
    """What `ratio` compares with; empty: nothing."""
    ratio: float | None = None
    target: str = ""
    """What was promised, in words; empty: nothing."""
    holds: bool | None = None
    """Whether the target was met."""

    def cells(self) -> tuple[str, str, str, str, str]:
        """Give what a table says: name, value, against, ratio, target."""
        verdict = {True: "HOLDS: ", False: "MISSED: ", None: ""}[self.holds]
        whole = self.value == round(self.value)
        digits = 0 if whole else max(0, 3 - math.floor(math.log10(abs(self.value))))
        ratio = "" if self.ratio is None else f"{self.ratio:.3g}×"
        return self.name, f"{self.value:,.{digits}f} {self.unit}", self.against, ratio, verdict + self.target


class Incomplete(Exception):
    """Part of a benchmark cannot be measured on this machine.

    Args:
        why: and what to do about it, in one line.
        rows: what was measured all the same.
    """

    def __init__(self, why: str, rows: list[Row]) -> None:
        super().__init__(why)
        self.rows = rows


def machine() -> dict[str, str | int | float]:
    """Describe the machine, for later readers of the figures."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "python": platform.python_version(),
        "kernel": platform.release().split("-")[0],
    }


def quantiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Give p50, p95 and p99."""
    p50, p95, p99 = np.percentile(seconds, [50, 95, 99])
    return float(p50), float(p95), float(p99)


def main(name: str, about: str, measure: Callable[[bool], list[Row]]) -> None:
    """Run a benchmark from the command line: `python bench/NAME.py [--quick] [--json FILE]`.

    Args:
        name: of the module, the JSON's `bench` and the picture.
        about: what it measures, for `--help` and above the table.
        measure: given whether to be quick (under 60 s); gives the rows. Where it raises `Incomplete` there is a report
            of the rest, but none in the place of a report that is there.
    """
    arguments = command(name, about).parse_args()
    report(name, about, arguments, partial(measure, arguments.quick))


def command(name: str, about: str) -> argparse.ArgumentParser:
    """Give the parser of a benchmark's command line, for one that has flags of its own."""
    parser = argparse.ArgumentParser(prog=f"bench/{name}.py", description=about)
    parser.add_argument("--quick", action="store_true", help="a smaller run, under 60 s: checks that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    return parser


def report(name: str, about: str, arguments: argparse.Namespace, measure: Callable[[], list[Row]]) -> None:
    """Measure as the command line says, and print and write what came of it (see `main`)."""
    incomplete = ""
    try:
        rows = measure()
    except Incomplete as error:
        incomplete, rows = str(error), error.rows
    if rows:
        _print(name, about, rows)
    if incomplete:
        print(f"{name} is incomplete: {incomplete}", file=sys.stderr)
    if arguments.json is not None and rows and not (incomplete and arguments.json.exists()):
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"bench": name, "about": about, "machine": machine(), "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    missed = [row.name for row in rows if row.holds is False]
    if missed:
        print(f"missed: {'; '.join(missed)}", file=sys.stderr)


def picture_path(name: str) -> Path:
    """Give the place of a benchmark's picture."""
    RESULTS.mkdir(exist_ok=True)
    return RESULTS / f"{name}.png"


def _print(name: str, about: str, rows: list[Row]) -> None:
    table = Table(title=f"{name}: {about}", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("against")
    table.add_column("ratio", justify="right")
    table.add_column("target")
    for row in rows:
        table.add_row(*row.cells())
    Console().print(table)
