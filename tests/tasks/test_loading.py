"""Jobs from data files: forms told apart row by row, and what is wrong said by line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from code_rows import EXAMPLES
from pyarrow import parquet

from prorl_zmq.errors import ConfigError, InvalidRecord
from prorl_zmq.tasks.loading import Row, load_jobs, load_rows
from prorl_zmq.tasks.row_format import RowFormat

sys.path.append(str(Path(__file__).parent))
import test_math_formats
import test_stem_formats
from swe_rows import GENERIC, MYPY, R2E, SWE_BENCH, SWE_GYM, SWE_SMITH

if TYPE_CHECKING:
    from collections.abc import Sequence

ROWS: list[tuple[str, str, dict[str, Any]]] = [
    ("swe", "swe-bench", SWE_BENCH),
    ("swe", "swe-gym", SWE_GYM),
    ("swe", "mypy", MYPY),
    ("swe", "swe-smith", SWE_SMITH),
    ("swe", "r2e-gym", R2E),
    ("swe", "generic", GENERIC),
    *(("code", each.name, each.row) for each in EXAMPLES),
    *(("math", name, row) for name, row, _ in test_math_formats.ROWS),
    *(("stem", name, row) for name, row, _ in test_stem_formats.ROWS),
    ("stem", "gpqa", test_stem_formats.GPQA),
]
"""Rows of all forms: task, name and row."""
JOB = {"task": "echo", "instance": {"word": "hello"}, "group_id": "g"}


def written(folder: Path, *rows: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def as_parquet(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path = folder / "data.parquet"
    parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def test_rows_of_several_forms_may_be_in_one_file(tmp_path: Path) -> None:
    path = written(tmp_path, SWE_BENCH, "", SWE_SMITH, R2E, JOB)
    rows = [row for row in load_rows(path) if isinstance(row, Row)]
    assert [(row.number, row.row_format, row.job.task) for row in rows] == [
        (1, "swe-bench", "swe"),
        (3, "swe-smith", "swe"),
        (4, "r2e-gym", "swe"),
        (5, "job", "echo"),
    ]
    assert rows[0].name == SWE_BENCH["instance_id"]
    assert rows[3].job.group_id == "g"


@pytest.mark.parametrize(("task", "row"), [pytest.param(task, row, id=f"{task}-{name}") for task, name, row in ROWS])
def test_parquet_gives_what_json_lines_give(task: str, row: dict[str, Any], tmp_path: Path) -> None:
    rows = [row, row]
    from_lines = facts(written(tmp_path, *rows), task)
    assert [number for number, *_ in from_lines] == [1, 2]
    assert facts(as_parquet(tmp_path, rows), task) == from_lines


def facts(path: Path, task: str) -> list[tuple[int, str, str, dict[str, Any]]]:
    rows = [row for row in load_rows(path, task=task) if isinstance(row, Row)]
    return [(row.number, row.row_format, row.name, row.job.instance) for row in rows]


def test_lists_of_several_lengths_in_one_parquet_column_stay_apart(tmp_path: Path) -> None:
    rows = [SWE_SMITH, {**SWE_SMITH, "instance_id": "another", "FAIL_TO_PASS": ["a.py::b", "c.py::d"]}]
    instances = [job.instance for job in load_jobs(as_parquet(tmp_path, rows))]
    assert instances == [job.instance for job in load_jobs(written(tmp_path, *rows))]


def test_options_take_the_place_of_what_rows_say(tmp_path: Path) -> None:
    (job,) = load_jobs(written(tmp_path, SWE_BENCH), options={"tools": ["bash"], "image": "mine"})
    assert (job.instance["tools"], job.instance["image"]) == (["bash"], "mine")


def test_what_is_wrong_is_said_by_line_and_the_rest_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, SWE_BENCH, "{not json", "[1]", {"a": 1}, {**SWE_BENCH, "FAIL_TO_PASS": "["}, JOB)
    errors = [row for row in load_rows(path) if isinstance(row, InvalidRecord)]
    assert [error.line for error in errors] == [2, 3, 4, 5]
    assert all(error.message.startswith(f"data.jsonl, line {error.line}: ") for error in errors)
    assert errors[3].field == "FAIL_TO_PASS"
    with pytest.raises(InvalidRecord, match="line 2"):
        list(load_jobs(path))


def test_job_with_a_wrong_field_is_wrong(tmp_path: Path) -> None:
    (error,) = load_rows(written(tmp_path, {**JOB, "sampling": {"heat": 1}}))
    assert isinstance(error, InvalidRecord)
    assert "heat" in error.message


def test_row_that_no_message_could_carry_is_wrong(tmp_path: Path) -> None:
    (error,) = load_rows(written(tmp_path, '{"question": "a", "choices": "[\\"\\\\ud800\\", \\"b\\"]", "answer": 0}'))
    assert isinstance(error, InvalidRecord)
    assert "sent" in error.message


def test_form_or_task_may_be_named(tmp_path: Path) -> None:
    path = written(tmp_path, SWE_BENCH)
    assert [job.task for job in load_jobs(path, row_format="swe-gym")] == ["swe"]
    for wrong in ({"row_format": "nonsense"}, {"task": "nonsense"}):
        with pytest.raises(ConfigError, match="nonsense; there are"):
            list(load_rows(path, **wrong))
    with pytest.raises(ConfigError, match="the row format swe-gym is of task swe, not of math"):
        list(load_rows(path, row_format="swe-gym", task="math"))


def test_rows_of_a_task_without_forms_are_its_instances(tmp_path: Path) -> None:
    row = {"instruction": "do it", "check": "true"}
    (job,) = load_jobs(str(written(tmp_path, row)), task="shell")
    assert (job.task, job.instance) == ("shell", row)


def test_form_that_raises_is_said_by_line(tmp_path: Path) -> None:
    def broken(record: Any) -> Any:
        raise TypeError(str(len(record)))

    (error,) = load_rows(
        written(tmp_path, JOB["instance"]), row_formats=[RowFormat("mine", "echo", "", frozenset(), broken)]
    )
    assert isinstance(error, InvalidRecord)
    assert error.message == "data.jsonl, line 1: row format mine raised TypeError: 1"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("data.txt", b"a,b", r"ends in \.jsonl, \.json, \.parquet or \.csv"),
        ("data.json", b'[{"a": 1}, ', "no JSON list"),
        ("data.csv", b'a,b\n"1', "no CSV"),
        ("data.jsonl", b"", "no rows"),
        ("data.jsonl", b"\xff\xfe", "codec"),
        ("data.parquet", b"PAR1 nonsense", "parquet"),
    ],
    ids=["kind", "cut list", "cut field", "empty", "no text", "damaged"],
)
def test_file_that_cannot_be_read_says_why(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        list(load_rows(path))
    with pytest.raises(ConfigError, match="No such file"):
        list(load_rows(tmp_path / "missing.jsonl"))


def test_a_list_is_read_as_lines_are(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    for indent in (None, 2):
        path.write_text("\ufeff " + json.dumps([SWE_BENCH, 5, JOB], indent=indent), encoding="utf-8")
        first, error, last = load_rows(path)
        assert isinstance(first, Row)
        assert isinstance(last, Row)
        assert isinstance(error, InvalidRecord)
        assert (first.row_format, error.line, last.number) == ("swe-bench", 2, 3)


def test_csv_has_rows_of_texts(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text('ID,Question,Answer\n1,"What is 1 + 1,\nplease?",2\n2,too few\n3,"Why?",5,6\n')
    first, few, many = load_rows(path)
    assert isinstance(first, Row)
    assert (first.job.instance["problem"], first.job.instance["ground_truth"]) == ("What is 1 + 1,\nplease?", "2")
    for error, line in ((few, 4), (many, 5)):
        assert isinstance(error, InvalidRecord)
        assert error.line == line
