"""The proofs of bench/ in short: what must not happen does not, though not for long enough to prove much.

`bench/chaos.py`, `hostile.py` and `fuzz.py` in full are a release's business; here each runs with a fixed seed for as
long as a test may take. What depends on how fast the machine is (recovery times, growth of memory) is not asserted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
pytestmark = pytest.mark.proof


def prove(name: str, folder: Path, *flags: str, limit_s: float) -> dict[str, dict[str, Any]]:
    """Run one in short; give its rows by name."""
    command = [sys.executable, str(BENCH / f"{name}.py"), "--quick", "--json", str(folder / "rows.json"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stderr
    return {row["name"]: row | {"said": done.stdout} for row in json.loads((folder / "rows.json").read_text())["rows"]}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "seed"), [("chaos", 21), ("chaos_cluster", 38)])
def test_nothing_is_lost_while_processes_are_killed_and_stopped_and_links_are_cut(
    tmp_path: Path, name: str, seed: int
) -> None:
    if name == "chaos_cluster" and os.geteuid() != 0:
        pytest.skip("bench/chaos_cluster.py makes network namespaces, which only root may")
    rows = prove(name, tmp_path, "--seed", str(seed), limit_s=380)
    said = rows["jobs accepted"]["said"]
    none = ("jobs lost", "jobs hung", "duplicates", "fabricated rewards", "orphans")
    for name in (*none, "unearned escapes from 0", "weights older than announced"):
        assert rows[name]["value"] == 0, said
    assert rows["SIGKILLs"]["value"] >= 4, said
    assert rows["jobs completed"]["value"] >= 20, said
    other = sum(rows[name]["value"] for name in ("infrastructure errors", "other outcomes", "saboteurs' jobs"))
    assert rows["jobs completed"]["value"] + other == rows["jobs accepted"]["value"], said
    assert rows["other outcomes"]["value"] == 0, said


@pytest.mark.timeout(200)
def test_hostile_messages_disturb_no_job(tmp_path: Path) -> None:
    rows = prove("hostile", tmp_path, limit_s=180)
    assert rows["hostile messages"]["value"] == 1000
    assert rows["jobs meanwhile"]["value"] >= 10
    assert rows["processes that died"]["value"] == 0
    assert rows["jobs failed"]["value"] == 0, rows["jobs failed"]["said"]


@pytest.mark.timeout(120)
def test_fuzzing_finds_nothing(tmp_path: Path) -> None:
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("bench/fuzz.py needs atheris: install the extra [bench]")
    rows = prove("fuzz", tmp_path, limit_s=100)
    assert rows["inputs"]["value"] >= 100
    assert rows["crashes and hangs"]["value"] == 0, rows["inputs"]["said"]
