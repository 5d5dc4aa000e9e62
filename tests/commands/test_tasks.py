"""`prorl tasks`: what it lists, and what it says of wrong data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "tasks"))
from swe_rows import GENERIC, SWE_BENCH

if TYPE_CHECKING:
    from collections.abc import Callable


def prorl(*arguments: object) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "prorl_zmq.cli", "prorl", "tasks", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def data(tmp_path: Path) -> Callable[..., Path]:
    def write(*rows: Any) -> Path:
        path = tmp_path / "data.jsonl"
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return path

    return write


def test_forms_of_all_tasks_are_listed() -> None:
    code, out, _ = prorl("list")
    assert code == 0
    for name in ("swe-bench", "swe-smith", "r2e-gym", "deepcoder", "livecodebench", "deepscaler", "scp-116k", "shell"):
        assert name in out


def test_right_file_is_counted_by_form(data: Callable[..., Path]) -> None:
    code, out, err = prorl("validate", data(SWE_BENCH, {"problem": "1 + 1", "answer": "2"}, GENERIC))
    assert (code, err) == (0, "")
    assert all(form in out for form in ("swe-bench", "aime", "generic"))
    assert "no error: the rows are of several tasks" in out
    assert "have a name" not in out


def test_names_that_are_there_already_are_counted(data: Callable[..., Path]) -> None:
    rows = [{"id": f"a{number % 2}", "problem": "1 + 1", "answer": "2"} for number in range(5)]
    code, out, _ = prorl("validate", data(*rows))
    assert code == 0
    assert "no error: 3 rows have a name that is there already, such as a0 in lines 1 and 3" in out


def test_what_is_wrong_is_said_by_line(data: Callable[..., Path]) -> None:
    wrong_job = {"task": "math", "instance": {"problem": "1"}}
    unknown = {"task": "nonsense", "instance": {}}
    path = data(SWE_BENCH, "{", {**SWE_BENCH, "FAIL_TO_PASS": "[]"}, wrong_job, unknown, {"\x1b[31mred": 1})
    code, out, _ = prorl("validate", path)
    assert code == 1
    lines = [line for line in out.splitlines() if line.startswith("line ")]
    assert [line.partition(":")[0] for line in lines] == ["line 2", "line 3", "line 4", "line 5", "line 6"]
    assert "FAIL_TO_PASS" in lines[1]
    assert "ground_truth" in lines[2]
    assert "nonsense" in lines[3]
    assert "\x1b" not in out


def test_many_wrong_rows_are_cut(data: Callable[..., Path]) -> None:
    path = data(*({"a": 1} for _ in range(50)))
    assert prorl("validate", path)[1].count("\nline ") + 1 == 20
    assert prorl("validate", path, "--all")[1].count("\nline ") + 1 == 50


@pytest.mark.parametrize("arguments", [("data.txt",), ("missing.jsonl",)])
def test_file_that_cannot_be_read_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    code, _, err = prorl("validate", *arguments)
    assert code == 2
    assert arguments[0] in err


def test_images_that_are_missing_are_listed_with_their_source(data: Callable[..., Path], tmp_path: Path) -> None:
    code, out, _ = prorl("images", data(SWE_BENCH, GENERIC), "--images", tmp_path / "images")
    assert code == 1
    assert "docker://swebench/sweb.eval.x86_64.psf_1776_requests-2317" in out
    assert out.count("│ missing") == 2
    assert prorl("images", data({"problem": "1", "answer": "1"}))[0] == 2
