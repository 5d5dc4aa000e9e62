"""Where the rows of a data file are, and what is no row."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - pytest's fixture

import pytest

from prorl_zmq.errors import InvalidRecord
from prorl_zmq.tasks.loading import load_jobs
from prorl_zmq.tasks.records import read_records


def test_line_of_a_csv_row_is_the_one_that_it_begins_in(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_bytes(b'problem,answer\n"1\r\n+\n1",2\n\nbad,\nlast,3,"4\n"\n')
    found = [(number, isinstance(row, InvalidRecord)) for number, row in read_records(path)]
    assert found == [(2, False), (6, False), (7, True)]


@pytest.mark.parametrize(
    "row",
    [
        '{"instance_id": "a", "repo": ["x"], "base_commit": "abcdefg", "test_patch": "", "FAIL_TO_PASS": []}',
        '{"instance_id": "", "repo": {}, "base_commit": "abcdefg", "test_patch": "", "FAIL_TO_PASS": [], "version": 1}',
        '{"problem": 3, "answer": []}',
        '{"prompt": [{"role": []}], "reward_model": {"ground_truth": {}}, "ability": ["x"]}',
    ],
)
def test_column_of_another_type_is_the_rows_error(tmp_path: Path, row: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(row)
    with pytest.raises(InvalidRecord, match="line 1"):
        list(load_jobs(path))
