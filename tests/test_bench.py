"""The benchmarks run and say what they promise to say. Whether a timed target holds is not for a test to tell."""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from needed import lacking

BENCH = Path(__file__).parent.parent / "bench"
ENVIRONMENTS = Path(__file__).parent.parent / ".environments"
"""What `make environments` installs."""
NAMES = (
    "frontdoor",
    "startup",
    "fetch",
    "records",
    "models",
    "weights",
    "overlap",
    "dispatch",
    "assign",
    "journal",
    "routing",
    "scheduling",
    "inference",
    "turns",
    "gateway",
    "watching",
    "dapo",
    "scale_simulation",
    "nodes",
    "async_grpo",
    "tasks",
    "harbor",
    "tools",
    "sandbox",
    "losses",
    "soak",
    "explain",
    "rewards",
    "mcp",
    "environments",
)
PROVED = ("chaos", "chaos_cluster", "hostile", "fuzz", "slurm")
"""Run by tests/chaos and tests/cluster, which look at what came out."""


def quick(name: str, json_path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / f"{name}.py"), "--quick", "--json", str(json_path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


PEERS = {
    "async_grpo": ("trl", ("torch", "trl", "requests")),
    "fetch": ("bench", ("fastapi", "httpx", "uvicorn")),
    "tools": ("bench", ("swerex", "libtmux", "bashlex", "ipykernel")),
}
"""The extra of a bench's peers, and the modules that it imports of them."""
PROGRAMS = {"tools": ("tmux",), "watching": ("chromium",)}


@pytest.mark.proof
@pytest.mark.parametrize("name", NAMES)
def test_a_quick_run_reports_positive_finite_figures(name, tmp_path, monkeypatch):
    if name == "environments":
        if not (ENVIRONMENTS / "gem").is_dir():
            lacking("environments", "GEM is not installed: make environments")
        monkeypatch.setenv("PRORL_ENVIRONMENTS", str(ENVIRONMENTS))
    extra, modules = PEERS.get(name, ("", ()))
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"bench/{name}.py compares with {module}: install the extra [{extra}]")
    if name == "mcp" and not Path(os.environ.get("PRORL_MCP_PYTHON", BENCH.parent / ".mcp/bin/python")).exists():
        pytest.skip("bench/mcp.py compares with the SDK's client: make mcp")
    for program in PROGRAMS.get(name, ()):
        if shutil.which(program) is None:
            pytest.skip(f"bench/{name}.py runs {program}: install its Debian package")

    done = quick(name, tmp_path / "report.json")

    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["bench"] == name
    assert report["about"]
    assert report["machine"]["cores"] >= 1
    assert report["rows"]
    for row in report["rows"]:
        assert row.keys() == {"name", "value", "unit", "against", "ratio", "target", "holds"}
        assert row["name"]
        assert row["unit"]
        assert math.isfinite(row["value"])
        assert row["value"] >= 0
        assert bool(row["against"]) == (row["ratio"] is not None)
        assert bool(row["target"]) == (row["holds"] is not None)
        if row["ratio"] is not None:
            assert math.isfinite(row["ratio"])
            assert row["ratio"] > 0 or row["value"] == 0
    assert any(row["holds"] is not None for row in report["rows"])


def test_every_benchmark_is_among_those_that_make_bench_runs():
    run_all = (BENCH / "run_all.py").read_text()
    modules = {path.stem for path in BENCH.glob("*.py") if "from harness import" in path.read_text()}
    parts = {"record_losses", "scheduling_cost", "weights_real", "weights_relay"}
    assert modules - {"run_all", "guard", *parts} == {*NAMES, *PROVED}
    assert all(f'"{name}"' in run_all for name in (*NAMES, *PROVED))


def test_a_report_of_a_part_does_not_replace_a_whole_one(tmp_path):
    script = (
        "from harness import Incomplete, Row, main\n"
        "def measure(quick):\n"
        "    raise Incomplete('no engine: install one', [Row('a part', 1.0, 'ms')])\n"
        "main('none', 'nothing', measure)"
    )
    report = tmp_path / "report.json"
    command = [sys.executable, "-c", script, "--json", str(report)]

    first = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, check=True)
    assert "no engine: install one" in first.stderr
    assert [row["name"] for row in json.loads(report.read_text())["rows"]] == ["a part"]

    report.write_text("the whole one")
    subprocess.run(command, cwd=BENCH, capture_output=True, check=True)
    assert report.read_text() == "the whole one"


def test_the_page_is_written_from_the_reports():
    row = {
        "name": "rate",
        "value": 1234.5,
        "unit": "1/s",
        "against": "peer",
        "ratio": 0.5,
        "target": "1×",
        "holds": False,
    }
    machine = {"cpu": "cpu", "cores": 2, "memory_gib": 4.0, "kernel": "6.1", "python": "3.11"}
    report = {"bench": "none", "about": "nothing", "machine": machine, "rows": [row]}
    script = f"import json, run_all; print(run_all.page([json.loads({json.dumps(report)!r})]))"
    done = subprocess.run([sys.executable, "-c", script], cwd=BENCH, capture_output=True, text=True, check=True)
    assert "## none: nothing" in done.stdout
    assert "| rate | 1,234 1/s | peer | 0.5× | MISSED: 1× |" in done.stdout
    assert "Machine: cpu, 2 cores" in done.stdout


def test_no_figure_of_the_pages_was_typed_by_hand():
    script = (
        "import json, run_all\n"
        "files = [run_all.RESULTS / f'{name}.json' for name in run_all.BENCHES]\n"
        "reports = [json.loads(file.read_text()) for file in files if file.exists()]\n"
        "pages = run_all.project_pages(reports)\n"
        "texts = {str(path): run_all.with_figures(path.read_text('utf-8'), rows) for path, rows in pages.items()}\n"
        "assert [(bench, row.name) for bench, row in list(pages.values())[0]] == list(run_all.HEADLINES)\n"
        "print(json.dumps([run_all.page(reports), texts]))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=BENCH, capture_output=True, text=True, check=True)
    page, texts = json.loads(done.stdout)
    assert page == (BENCH / "README.md").read_text(encoding="utf-8")
    assert {path: Path(path).read_text(encoding="utf-8") for path in texts} == texts
    assert len(texts) == 2
