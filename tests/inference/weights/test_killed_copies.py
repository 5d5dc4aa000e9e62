"""Processes that are killed while they write a copy: the next one ends with the right bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from support.weight_versions import KINDS, model

HERE = Path(__file__).parent


def test_killed_at_each_write(tmp_path: Path) -> None:
    program = [sys.executable, "-W", "error", str(HERE / "killed_copies.py"), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    deaths = [json.loads(line) for line in ended.stdout.splitlines()]
    points = Counter(one["point"] for one in deaths)
    inside, between = points["inside a tensor"], points["between tensors"]
    assert inside > between > 3 * (len(KINDS) - 1)
    assert {"between files", "after state.json", "inside state.json"} <= points.keys()
    full_bytes = sum(len(one) for one in model().values())
    for one in deaths:
        on_the_way = one["way"] == [2, 3] and one["wanted"] == 3
        if on_the_way and one["point"] == "between tensors":
            assert one["read"] < full_bytes / 4, one  # the rest of the delta
        if on_the_way and one["point"] == "inside a tensor":
            assert one["read"] > full_bytes / 4, one  # the full version
