"""The README's commands as they stand there, and what they make, through a whole service with agents that know."""

from __future__ import annotations

import json
import shlex
import sys
import tomllib
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from documents import MAKE_SWE_COMMANDS
from needed import lacking
from support.commands import prorl

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_zmq.tools.images.image_store import ImageStore

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
pytestmark = [pytest.mark.proof, pytest.mark.timeout(600)]
PROJECT = "h11==0.16.0"


def run(line: str, folder: Path, *more: str) -> None:
    program, *words = shlex.split(line)
    assert program == "prorl"
    done = prorl(*words, *more, cwd=folder)
    if "no network" in done.stderr:
        lacking("network", done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_made_is_resolved_by_the_gold_patch_and_by_nothing_else(
    store: ImageStore, tmp_path: Path, write_project: Callable[..., Path]
) -> None:
    from tasks_swe import PatchService

    write_project(tmp_path / "my-project")
    run(MAKE_SWE_COMMANDS[0], tmp_path, "--images", str(store.root))
    data = tmp_path / "mine.jsonl"
    run("prorl tasks validate mine.jsonl", tmp_path)
    run(f"prorl tasks images mine.jsonl --images {store.root}", tmp_path)
    count = len(data.read_text().splitlines())
    assert count >= 2
    for policy, reward in (("gold", 1.0), ("empty", 0.0), ("wrong", 0.0)):
        with PatchService(data, policy, 0.0, store.root) as service:
            done = service.run(data, count).trajectories
        assert [(each.outcome, each.reward) for each in done] == [("completed", reward)] * count, [
            (each.error, each.result.notes) for each in done
        ]


def test_project_of_the_recipe_is_made(store: ImageStore, tmp_path: Path) -> None:
    """The set takes minutes; one project of it takes the same way."""
    text = resources.files("prorl_zmq.make_swe").joinpath("swe_mini.toml").read_text(encoding="utf-8")
    whole = tomllib.loads(text)
    assert sum(project["instances"] for project in whole["project"]) >= 24
    assert len(whole["project"]) >= 6
    (table,) = [each for each in text.split("[[project]]") if PROJECT in each]
    recipe = tmp_path / "swe-mini.toml"
    recipe.write_text(f'name = "swe-mini"\nseed = {whole["seed"]}\n\n[[project]]{table}')
    run(MAKE_SWE_COMMANDS[1].replace("--recipe swe-mini", f"--recipe {recipe}"), tmp_path, "--images", str(store.root))
    rows = [json.loads(line) for line in (tmp_path / "swe-mini.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert all(row["version"] == "0.16.0" and row["FAIL_TO_PASS"] and row["PASS_TO_PASS"] for row in rows)
