"""`prorl tasks`: what it lists, and what it says of wrong data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from support.commands import prorl

from prorl_zmq.errors import ConfigError, ProrlError, SandboxFailed, SandboxUnavailable
from prorl_zmq.tools.images.image_store import ImageStore

sys.path.append(str(Path(__file__).parents[1] / "tasks"))
from swe_rows import GENERIC, R2E, SWE_BENCH

if TYPE_CHECKING:
    from collections.abc import Callable

BENCH_IMAGE = "sweb.eval.x86_64.psf_1776_requests-2317"
R2E_IMAGE = "aiohttp_final-f0d74880deec8fcd982bce639c93c5e130d41654"
SOURCES = {BENCH_IMAGE: f"docker://swebench/{BENCH_IMAGE}", R2E_IMAGE: f"docker://{R2E['docker_image']}", "mine": ""}


def tasks(*arguments: object) -> tuple[int, str, str]:
    done = prorl("tasks", *arguments)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def data(tmp_path: Path) -> Callable[..., Path]:
    def write(*rows: Any) -> Path:
        path = tmp_path / "data.jsonl"
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return path

    return write


def test_forms_of_all_tasks_are_listed() -> None:
    code, out, _ = tasks("list")
    assert code == 0
    for name in ("swe-bench", "swe-smith", "r2e-gym", "deepcoder", "livecodebench", "deepscaler", "scp-116k", "shell"):
        assert name in out


def test_right_file_is_counted_by_form(data: Callable[..., Path]) -> None:
    code, out, err = tasks("validate", data(SWE_BENCH, {"problem": "1 + 1", "answer": "2"}, GENERIC))
    assert (code, err) == (0, "")
    assert all(form in out for form in ("swe-bench", "aime", "generic"))
    assert "no error: the rows are of several tasks" in out
    assert "have a name" not in out


def test_names_that_are_there_already_are_counted(data: Callable[..., Path]) -> None:
    rows = [{"id": f"a{number % 2}", "problem": "1 + 1", "answer": "2"} for number in range(5)]
    code, out, _ = tasks("validate", data(*rows))
    assert code == 0
    assert "no error: 3 rows have a name that is there already, such as a0 in lines 1 and 3" in out


def test_what_is_wrong_is_said_by_line(data: Callable[..., Path]) -> None:
    wrong_job = {"task": "math", "instance": {"problem": "1"}}
    unknown = {"task": "nonsense", "instance": {}}
    path = data(SWE_BENCH, "{", {**SWE_BENCH, "FAIL_TO_PASS": "[]"}, wrong_job, unknown, {"\x1b[31mred": 1})
    code, out, _ = tasks("validate", path)
    assert code == 1
    lines = [line for line in out.splitlines() if line.startswith("line ")]
    assert [line.partition(":")[0] for line in lines] == ["line 2", "line 3", "line 4", "line 5", "line 6"]
    assert "FAIL_TO_PASS" in lines[1]
    assert "ground_truth" in lines[2]
    assert "nonsense" in lines[3]
    assert "\x1b" not in out


def test_what_is_wrong_in_parquet_is_said_by_row(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    rows = [SWE_BENCH, {**SWE_BENCH, "instance_id": "psf__requests-1", "FAIL_TO_PASS": "[]"}]
    parquet.write_table(pa.Table.from_pylist(rows), path)
    code, out, _ = tasks("validate", path)
    assert code == 1
    (line,) = [line for line in out.splitlines() if line.startswith("line ")]
    assert line.startswith("line 2: ")
    assert "FAIL_TO_PASS" in line


def test_many_wrong_rows_are_cut(data: Callable[..., Path]) -> None:
    path = data(*({"a": 1} for _ in range(50)))
    assert tasks("validate", path)[1].count("\nline ") + 1 == 20
    assert tasks("validate", path, "--all")[1].count("\nline ") + 1 == 50


@pytest.mark.parametrize("arguments", [("data.txt",), ("missing.jsonl",)])
def test_file_that_cannot_be_read_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    code, _, err = tasks("validate", *arguments)
    assert code == 2
    assert arguments[0] in err


def test_images_that_are_missing_are_listed_with_their_source(data: Callable[..., Path], tmp_path: Path) -> None:
    code, out, _ = tasks("images", data(SWE_BENCH, GENERIC), "--images", tmp_path / "images")
    assert code == 1
    assert "docker://swebench/sweb.eval.x86_64.psf_1776_requests-2317" in out
    assert out.count("│ missing") == 2
    assert tasks("images", data({"problem": "1", "answer": "1"}))[0] == 2


def test_rows_that_are_wrong_do_not_vanish_from_the_list_of_images(data: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "images" / "mine").mkdir(parents=True)
    wrong = {**SWE_BENCH, "base_commit": "no commit"}
    code, out, _ = tasks("images", data(GENERIC, wrong, wrong), "--images", tmp_path / "images")
    assert (code, "2 rows are wrong" in out) == (1, True)


def states(out: str) -> dict[str, tuple[str, str]]:
    """Give state and source of each image in the table."""
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]
    return {name: (state, source) for name, state, source in rows}


def test_missing_images_are_built_from_their_sources_if_that_is_asked(
    data: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, str, str]] = []
    monkeypatch.setattr(ImageStore, "build", lambda store, source, name: asked.append((store.root, source, name)))
    store = tmp_path / "images"
    arguments = ("images", data(SWE_BENCH, R2E, SWE_BENCH), "--images", store)
    assert tasks(*arguments)[0] == 1
    assert asked == []
    code, out, _ = tasks(*arguments, "--build")
    assert code == 0
    assert asked == [(store, SOURCES[name], name) for name in (R2E_IMAGE, BENCH_IMAGE)]
    assert states(out) == {name: ("built", SOURCES[name]) for name in (R2E_IMAGE, BENCH_IMAGE)}


@pytest.mark.parametrize(
    "error",
    [
        SandboxFailed("the disk is full"),
        SandboxUnavailable("the disk is full", kind="apptainer"),
        ConfigError("the disk is full", key="source"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_image_that_cannot_be_built_is_missing_for_a_reason_and_the_others_are_built(
    error: ProrlError, data: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(store: ImageStore, source: str, name: str) -> None:
        del store, source
        if name == R2E_IMAGE:
            raise error

    monkeypatch.setattr(ImageStore, "build", build)
    code, out, _ = tasks("images", data(SWE_BENCH, R2E, GENERIC), "--images", tmp_path / "images", "--build")
    assert code == 1
    assert states(out) == {
        R2E_IMAGE: ("missing: the disk is full", SOURCES[R2E_IMAGE]),
        "mine": ("missing", SOURCES["mine"]),
        BENCH_IMAGE: ("built", SOURCES[BENCH_IMAGE]),
    }
