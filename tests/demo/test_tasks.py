from __future__ import annotations

import subprocess
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import pytest

from prorl_zmq.demo.tasks import QUESTIONS, make_instance, make_prompts
from prorl_zmq.inference.embedded.base_policy import COMMANDS

if TYPE_CHECKING:
    from pathlib import Path

SOLUTIONS = dict(
    zip(
        QUESTIONS,
        [
            "wc -l < data.txt",
            "awk '{s+=$1} END {print s}' data.txt",
            "sort -n data.txt | tail -n 1",
            "head -n 1 data.txt",
            "tail -n 1 data.txt",
        ],
        strict=True,
    )
)


def check(instance: dict[str, object], folder: Path, command: str) -> bool:
    """Run a command on an instance's files, and then its check."""
    files = instance["files"]
    assert isinstance(files, dict)
    for path, content in files.items():
        (folder / path).write_text(content, encoding="utf-8")
    subprocess.run(["bash", "-c", command], cwd=folder, check=False)
    return subprocess.run(["bash", "-c", str(instance["check"])], cwd=folder, check=False).returncode == 0


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_right_command_solves_it_and_no_other(question: str, tmp_path: Path) -> None:
    assert SOLUTIONS[question] in COMMANDS, "the base policy can write it"
    for command in COMMANDS:
        instance = make_instance(question, np.random.default_rng(3))
        assert check(instance, tmp_path, f"{command} > answer.txt") == (command == SOLUTIONS[question])
        (tmp_path / "answer.txt").unlink()


@pytest.mark.parametrize("command", ["true", "echo > answer.txt", "echo wrong > answer.txt", "mkdir answer.txt"])
def test_no_answer_is_wrong(command: str, tmp_path: Path) -> None:
    instance = make_instance(next(iter(QUESTIONS)), np.random.default_rng(0))
    assert not check(instance, tmp_path, command)


def test_changing_the_data_does_not_move_the_answer(tmp_path: Path) -> None:
    instance = make_instance(next(iter(QUESTIONS)), np.random.default_rng(0))
    assert not check(instance, tmp_path, "echo 1 > data.txt; wc -l < data.txt > answer.txt")


def test_the_questions_take_turns_and_a_prompt_depends_on_its_seed_and_number_alone() -> None:
    prompts = list(islice(make_prompts(1), 10))
    assert prompts[3:] == list(islice(make_prompts(1, 3), 7))
    assert len({job.job_id for job in prompts}) == len({job.sampling.seed for job in prompts}) == 10
    assert len({str(job.instance) for job in prompts}) == 10
    assert len({str(job.instance["instruction"]) for job in prompts[:5]}) == len(QUESTIONS)
    others = list(islice(make_prompts(2), 10))
    assert not {str(job.instance) for job in prompts} & {str(job.instance) for job in others}
