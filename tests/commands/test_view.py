"""`prorl view` into a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.commands import complaint, prorl

if TYPE_CHECKING:
    from pathlib import Path

RESULT = (
    '{"job_id": "job-1", "task": "math", "outcome": "failed", "group_id": "g", "error": '
    '{"code": "handler_failed", "message": "\\u001b[2J[red]x", "fields": {}}}\n'
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "results.jsonl").write_text(RESULT + RESULT.replace("job-1", "job-2"))
    return tmp_path


def test_into_a_pipe_it_prints_the_list_and_one_of_them(folder: Path) -> None:
    listed = prorl("view", folder)
    assert listed.returncode == 0, listed.stderr
    assert "job-1" in listed.stdout
    assert "job-2" in listed.stdout
    shown = prorl("view", folder, "--job", "job-2")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("job job-2, task math, g\n")
    assert "handler_failed: \\x1b[2J[red]x" in shown.stdout
    assert "\x1b" not in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "is no folder of `prorl eval` or `prorl submit --out`"),
        (("{folder}", "--job", "job-3"), "has no such job"),
        (("{folder}", "--job", "job"), "2 jobs are called so: job-1, job-2"),
        (("{folder}", "--tokenizer", "nowhere"), "there is no such directory"),
        ((), "Missing argument 'RUN_FOLDER'"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    assert said in complaint(prorl("view", *(argument.format(folder=folder) for argument in arguments)))
