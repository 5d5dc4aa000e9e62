"""Runs benchmarks in full and rewrites the pages with figures: `python bench/run_all.py [NAME …]` (none: all).

All figures are generated: bench/README.md gets all rows, docs/benchmarks.md those with a target, and README.md the most
important ones. Benchmarks run one after the other, since they share the machine's cores. One that fails ends the run
with its exit code, and leaves the pages unchanged. One that cannot measure all of its parts here (no vLLM) keeps its
last report, which the pages then show.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import RESULTS, Row

BENCHES = (
    "frontdoor",
    "startup",
    "fetch",
    "records",
    "models",
    "weights",
    "overlap",
    "dispatch",
    "assign",
    "scale_simulation",
    "nodes",
    "journal",
    "routing",
    "scheduling",
    "inference",
    "turns",
    "gateway",
    "watching",
    "dapo",
    "async_grpo",
    "tasks",
    "harbor",
    "tools",
    "sandbox",
    "losses",
    "chaos",
    "chaos_cluster",
    "hostile",
    "fuzz",
    "slurm",
    "soak",
    "explain",
    "rewards",
    "mcp",
    "environments",
)
"""In the order of the pages."""
FOLDER = Path(__file__).parent
HEADLINES = (
    ("fetch", "fetch over ipc"),
    ("dispatch", "waiting p99"),
    ("dapo", "32 informative groups of 8 on 64 slots, each of 10 batches in a row"),
    ("sandbox", "Apptainer, directory image: sandbox to first command, p50 of 200"),
    ("tools", "SWE-ReX LocalRuntime, p50 of 208"),
    ("gateway", "prorl_zmq, 256 under way: calls per second and core"),
    ("chaos", "jobs lost"),
)
"""The rows of README.md: a bench, and the first of its rows of this name."""
FIGURES_BEGIN, FIGURES_END = "<!-- figures: written by bench/run_all.py -->", "<!-- end of figures -->"
INTRODUCTION = """\
# Benchmarks

Each benchmark compares one part of the service with a peer or a limit, in one run on one machine, in turns or at the
same time. Compare the ratios: absolute figures of a shared machine drift by a factor of two. `make bench` runs all of
them in full and writes this page; `python bench/NAME.py --quick` runs one in under a minute. The top of each file
describes its benchmark.
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/run_all.py", description="run benchmarks in full, rewrite README.md")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(BENCHES)} (default: all)")
    names = parser.parse_args().names or BENCHES
    unknown = sorted(set(names) - set(BENCHES))
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}")
    for name in names:
        command = [sys.executable, str(FOLDER / f"{name}.py"), "--json", str(RESULTS / f"{name}.json")]
        exit_code = subprocess.run(command, check=False).returncode
        if exit_code:
            sys.exit(exit_code)
    reports = [json.loads(path.read_text()) for name in BENCHES if (path := RESULTS / f"{name}.json").exists()]
    (FOLDER / "README.md").write_text(page(reports), encoding="utf-8")
    for path, figures in project_pages(reports).items():
        path.write_text(with_figures(path.read_text(encoding="utf-8"), figures), encoding="utf-8")


def page(reports: list[dict[str, Any]]) -> str:
    """Return bench/README.md."""
    machines = list(dict.fromkeys(_machine(report) for report in reports))
    parts = [INTRODUCTION]
    if len(machines) == 1:
        parts.append(f"Machine: {machines[0]}.\n")
    for report in reports:
        parts.append(f"## {report['bench']}: {report['about']}\n")
        if len(machines) > 1:
            parts.append(f"Machine: {_machine(report)}.\n")
        parts.append(_table([Row(**row) for row in report["rows"]]))
        others = {*BENCHES} - {report["bench"]}
        pictures = sorted(one for one in RESULTS.glob(f"{report['bench']}*.png") if one.stem not in others)
        parts += [f"![{report['about']}](results/{picture.name})\n" for picture in pictures]
    return "\n".join(parts)


def project_pages(reports: list[dict[str, Any]]) -> dict[Path, list[tuple[str, Row]]]:
    """Return the rows of the project's pages: a bench's name and a row of it, in order."""
    rows = [(report["bench"], Row(**row)) for report in reports for row in report["rows"] if row["target"]]
    headlines = [next(((b, row) for b, row in rows if (b, row.name) == headline), None) for headline in HEADLINES]
    return {
        FOLDER.parent / "README.md": [row for row in headlines if row is not None],
        FOLDER.parent / "docs" / "benchmarks.md": rows,
    }


def with_figures(text: str, rows: list[tuple[str, Row]]) -> str:
    """Return a page with a table of rows between its two marks."""
    before, _, rest = text.partition(FIGURES_BEGIN)
    _, _, after = rest.partition(FIGURES_END)
    lines = ["| bench | what | value | against | ratio | target |", "|---|---|--:|---|--:|---|"]
    lines += [f"| `{bench}` | {' | '.join(row.cells())} |" for bench, row in rows]
    return f"{before}{FIGURES_BEGIN}\n" + "\n".join(lines) + f"\n{FIGURES_END}{after}"


def _machine(report: dict[str, Any]) -> str:
    machine = report["machine"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Linux {machine['kernel']}, "
        f"Python {machine['python']}"
    )


def _table(rows: list[Row]) -> str:
    lines = ["| what | value | against | ratio | target |", "|---|--:|---|--:|---|"]
    lines += [f"| {' | '.join(row.cells())} |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
