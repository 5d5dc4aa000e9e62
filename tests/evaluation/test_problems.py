"""What is said of a data file's problems before anything is started."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from support.harbor_tasks import make_task

from prorl_zmq.errors import ConfigError
from prorl_zmq.evaluation.problems import check_instances, checksum, load_problems
from prorl_zmq.stages.handler import load_handlers
from prorl_zmq.stages.known_row_formats import known_row_formats
from prorl_zmq.tasks.row_formats import ROW_FORMATS

if TYPE_CHECKING:
    from pathlib import Path

WORDS = {"problem": "Where?", "ground_truth": "the nucleus", "kind": "text"}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PRORL_MODEL_JUDGE_URL", "PRORL_MODEL_JUDGE_MODEL"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (WORDS, WORDS | {"kind": "auto"}, WORDS)))
    return path


def test_what_the_environment_lacks_is_counted(file: Path) -> None:
    problems = load_problems(file, known_row_formats(), row_format="stem")
    (lack,) = check_instances(problems, load_handlers(), file).items()
    what, count = lack
    assert what.startswith("a judge model is needed for answers in words: set PRORL_MODEL_JUDGE_URL and PRORL_MODEL_")
    assert count == 2
    problems = load_problems(file, known_row_formats(), row_format="stem", options={"judge": "never"})
    assert not check_instances(problems, load_handlers(), file)


def test_more_rows_change_no_name(tmp_path: Path) -> None:
    path = tmp_path / "named.jsonl"
    path.write_text("".join(json.dumps({"id": name, "problem": "1?", "answer": 1}) + "\n" for name in "aba"))
    names = [[each.name for each in load_problems(path, known_row_formats(), task="math", limit=n)] for n in (2, 3)]
    assert names == [["a", "b"], ["a", "b", "a (line 3)"]]


def test_an_option_that_no_instance_takes_is_refused(file: Path) -> None:
    problems = load_problems(file, known_row_formats(), row_format="stem", options={"judge": "sometimes"})
    with pytest.raises(ConfigError, match=r"line 1: .*judge"):
        check_instances(problems, load_handlers(), file)


def test_a_folder_of_tasks_is_a_data_file(tmp_path: Path) -> None:
    for name in ("b", "a"):
        make_task(tmp_path / "set" / name)
    problems = load_problems(tmp_path / "set", ROW_FORMATS)
    assert [(each.name, each.line, each.row_format, each.job.task) for each in problems] == [
        ("a", 1, "harbor", "harbor"),
        ("b", 2, "harbor", "harbor"),
    ]
    before = checksum(tmp_path / "set")
    assert checksum(tmp_path / "set") == before
    (tmp_path / "set" / "a" / "tests" / "test.sh").write_text("exit 1")
    assert checksum(tmp_path / "set") != before
    (tmp_path / "set" / "a" / "instruction.md").unlink()
    with pytest.raises(ConfigError, match=r"a: it has no instruction\.md"):
        load_problems(tmp_path / "set", ROW_FORMATS)
