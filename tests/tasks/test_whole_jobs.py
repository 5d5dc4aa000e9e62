"""Rows of a data file that are whole jobs, as `prorl submit` takes them."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - pytest's fixture
from typing import Any

import pytest

from prorl_zmq.errors import InvalidRecord
from prorl_zmq.tasks.loading import load_jobs

JOB = {"task": "math", "instance": {"problem": "1 + 1?", "ground_truth": "2", "tools": ["finish"]}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.jsonl"
    path.write_text(json.dumps(JOB) + "\n")
    return path


def test_options_are_in_the_place_of_what_the_job_says(file: Path) -> None:
    [job] = load_jobs(file, task="math", options={"tools": ["ipython"]})
    assert job.instance == {**JOB["instance"], "tools": ["ipython"]}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("asked", "problem", "field"),
    [
        ({"task": "code"}, "a job of task math, not of code", "task"),
        ({"row_format": "apps"}, "a whole job, not of the row format apps", "instance"),
    ],
)
def test_job_of_another_task_than_was_asked_for_is_wrong(
    file: Path, asked: dict[str, Any], problem: str, field: str
) -> None:
    with pytest.raises(InvalidRecord, match=problem) as caught:
        list(load_jobs(file, **asked))
    assert (caught.value.fields["line"], caught.value.fields["field"]) == (1, field)
