"""`prorl view`, into a pipe and on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from support.commands import complaint, prorl

from ..evaluation.conftest import HOSTILE, write_run

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


def test_the_list_is_sorted_and_filtered(tmp_path: Path) -> None:
    write_run(tmp_path, problems=2, samples=2, rewards=(0.0, 1.0, 0.5, 1.0))

    def rewards(*arguments: str) -> list[float]:
        listed = prorl("view", tmp_path, *arguments)
        assert listed.returncode == 0, listed.stderr
        header, *lines = listed.stdout.splitlines()
        return [float(line[header.index("outcome") :].split()[1]) for line in lines if "problem-" in line]

    assert rewards("--sort", "reward") == [0.0, 0.5, 1.0, 1.0]
    assert rewards("--sort", "reward", "--reverse") == [1.0, 1.0, 0.5, 0.0]
    assert rewards("--sort", "reward", "--reverse", "--only", "solved") == [1.0, 1.0]
    assert rewards("--only", "not solved") == [0.0, 0.5]
    assert rewards("--only", "completed") == [0.0, 1.0, 0.5, 1.0]
    refused = complaint(prorl("view", tmp_path, "--only", "failed"))
    assert "--only failed: the rollouts of" in refused
    assert "are completed, not solved, solved" in refused


def test_a_rollout_is_shown_with_its_turns_tokens_and_result(tmp_path: Path) -> None:
    write_run(tmp_path, problems=2, samples=1, tool_says="files")
    shown = prorl("view", tmp_path, "--job", "problem-1", "--tokens", "--token-table")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    titles = [line.split()[1] for line in lines if " · tokens " in line]
    assert titles == ["system", "user", "assistant", "tool", "assistant"]
    assert '→ bash({"command": "ls"})' in lines
    assert "  turns: 1" in lines
    (header,) = (number for number, line in enumerate(lines) if line.split()[:3] == ["#", "token", "id"])
    assert lines[header + 1].split()[0] == "0"
    assert any("not generated   generated, by probability:" in line for line in lines)


def test_a_rollout_without_texts_says_how_to_read_its_tokens(tmp_path: Path) -> None:
    write_run(tmp_path, problems=1, samples=1)
    assert "--tokenizer" not in prorl("view", tmp_path, "--job", "problem-0").stdout
    (file,) = (tmp_path / "trajectories").glob("*.json")
    transcript = msgspec.json.decode(file.read_bytes())
    del transcript["tokens"]
    file.write_bytes(msgspec.json.encode(transcript))
    assert "--tokenizer DIR of the model" in prorl("view", tmp_path, "--job", "problem-0").stdout


def test_a_damaged_rollout_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, problems=2, samples=1)
    file = min((tmp_path / "trajectories").glob("*.json"))
    file.write_text("{")
    assert "is damaged" in complaint(prorl("view", tmp_path, "--job", file.stem))
    assert prorl("view", tmp_path, "--job", "problem-1").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "is not a folder of `prorl eval` or `prorl submit --out`"),
        (("{folder}", "--job", "job-3"), "has no such job"),
        (("{folder}", "--job", "job"), "2 jobs are called so: job-1, job-2"),
        (("{folder}", "--tokenizer", "nowhere"), "there is no such directory"),
        ((), "Missing argument 'RUN_FOLDER'"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    assert said in complaint(prorl("view", *(argument.format(folder=folder) for argument in arguments)))


def test_two_runs_are_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "before", problems=4, samples=1, rewards=(1, 0, 0, 0))
    write_run(tmp_path / "after", problems=4, samples=1, rewards=(0, 1, 1, 0))
    plan = tmp_path / "after" / "plan.json"
    plan.write_text(plan.read_text().replace('"temperature": null', '"temperature": 0.5'))
    compared = prorl("view", tmp_path / "before", tmp_path / "after")
    assert compared.returncode == 0, compared.stderr
    lines = [line.rstrip() for line in compared.stdout.splitlines()]
    assert lines.index("settings that differ  A          B") < lines.index("4 problems are shared")
    assert "--temperature         not given  0.5" in lines
    assert "only by B                             2  50.0%" in lines
    assert "p = 1, McNemar's exact test" in lines
    assert lines[-1].split() == ["problem-2", "0", "of", "1", "1", "of", "1", "+100"]


def test_a_hostile_run_is_compared_as_text(tmp_path: Path) -> None:
    for name, reward in (("one", 0.0), ("two", 1.0)):
        write_run(tmp_path / name, problems=1, samples=1, rewards=(reward,), name=HOSTILE)
        plan = tmp_path / name / "plan.json"
        plan.write_text(plan.read_text().replace('"model": ""', '"model": "\\u001b[2J[red]' + name + '"'))
    compared = prorl("view", tmp_path / "one", tmp_path / "two")
    assert compared.returncode == 0, compared.stderr
    assert "\\x1b[2J[red]two" in compared.stdout
    assert "[red]not red" in compared.stdout
    assert "\x1b" not in compared.stdout
    assert "\u202e" not in compared.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("{folder}", "{folder}"), "is not a folder of `prorl eval`: it has no plan.json"),
        (("{folder}", "nowhere"), "is not a folder of `prorl eval`"),
        (("{folder}", "{folder}", "--job", "x"), "two run folders are compared"),
    ],
)
def test_what_cannot_be_compared_is_said(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    assert said in complaint(prorl("view", *(argument.format(folder=folder) for argument in arguments)))
