"""`prorl journal`: what people see of it, and what it refuses."""

from __future__ import annotations

import os
import re
import sqlite3
from typing import TYPE_CHECKING

import pytest

from prorl_zmq import Job
from prorl_zmq.brokers.backends.backend_journal import BackendJournal
from prorl_zmq.brokers.journal.journal import SCHEMA_VERSION, Journal
from prorl_zmq.brokers.journal.records import Finished, JobState
from prorl_zmq.commands.app import run
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.jobs import Outcome, Phase, Result

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal with two jobs and two results."""
    path = tmp_path / "rollout.journal"
    with Journal(path) as journal:
        states = []
        for sequence in range(1, 5):
            job = Job(task="math", instance={}, job_id=f"job-{sequence}")
            packed = codec.encode(job)
            states.append(JobState(sequence, f"session-{sequence % 2}", job.job_id, "math", 60.0, packed))
        journal.accept(states)
        ended = []
        for state, outcome in zip(states[2:], (Outcome.COMPLETED, Outcome.FAILED), strict=True):
            result = Result(job_id=state.job_id, task="math", outcome=outcome, tokens=1)
            ended.append(Finished(state.session, result, b"x" * 2_000_000, b"digest", state.sequence))
        held = states[0]._replace(phase=Phase.RUN, stage_id="run-1")
        journal.write([held], ended, [])
    return path


def test_show_says_what_is_there_beside_a_living_broker(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Journal(path) as journal:
        assert run("prorl", ["journal", "show", str(path)]) == 0
        said = capsys.readouterr().out
        assert f"{path}, in use by a broker" in said
        assert f"schema   version {SCHEMA_VERSION}, journal {journal.journal_id}" in said
    assert re.search(r"2 that have not ended, the oldest \d+ s old", said)
    assert re.search(r"2 uncollected, the oldest \d+ s old, 3.8 MiB of trajectories", said)
    cells = [line.replace("│", " ").split() for line in said.splitlines() if "session-" in line]
    assert cells == [
        ["session-0", "1", "0", "0", "0", "0", "0", "1", "failed"],
        ["session-1", "0", "0", "0", "1", "0", "0", "1", "completed"],
    ]


def test_the_run_dirs_journal_is_the_default(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("prorl", ["journal", "show", "--run-dir", str(path.parent)]) == 0
    assert str(path) in capsys.readouterr().out


def test_compact_gives_room_back(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Journal(path) as journal:
        journal.write([], [], [3])
    assert run("prorl", ["journal", "compact", str(path)]) == 0
    assert sum(part.stat().st_size for part in path.parent.glob("rollout.journal*[!e]")) < 2_100_000
    assert re.search(r"3\.8 MiB before, 1\.9 MiB now", capsys.readouterr().out)
    with Journal(path) as journal:
        kept = journal.recover()
        assert [state.job_id for state in kept.unfinished] == ["job-1", "job-2"]
        assert bytes(journal.block(kept.uncollected[0].block)) == b"x" * 2_000_000


def test_clear_forgets_everything(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("prorl", ["journal", "clear", str(path)]) == 0
    assert "is removed" in capsys.readouterr().out
    assert list(path.parent.iterdir()) == []


def test_clear_forgets_a_journal_of_another_version(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    assert run("prorl", ["journal", "show", str(path)]) == 2
    assert run("prorl", ["journal", "clear", str(path)]) == 0
    assert not path.exists()


def test_show_counts_rows_that_cannot_be_read(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("prorl", ["journal", "show", str(path)]) == 0
    assert "damaged" not in capsys.readouterr().out
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE states SET phase = x'ff'")
        connection.execute("UPDATE jobs SET session = x'ff', accepted_at = 'then' WHERE sequence = 2")
    connection.close()
    assert run("prorl", ["journal", "show", str(path)]) == 0
    assert "damaged  2 of these; their clients hear that they are lost" in capsys.readouterr().out


@pytest.mark.parametrize(("role", "name"), [("rollout", "rollout.journal"), ("backend", "backends.journal")])
def test_what_to_do_about_a_truncated_journal(
    tmp_path: Path, role: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / name
    with Journal(other) if role == "rollout" else BackendJournal(other):
        pass
    os.truncate(other, 5000)
    assert run("prorl", ["broker", role, "--run-dir", str(tmp_path)]) == 2
    assert "is damaged (database disk image is malformed): keep a copy" in capsys.readouterr().err
    assert run("prorl", ["journal", "clear", str(other)]) == 0
    assert not other.exists()


@pytest.mark.parametrize("command", ["compact", "clear"])
def test_a_brokers_journal_is_left_alone(path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Journal(path):
        assert run("prorl", ["journal", command, str(path)]) == 1
    assert "is in use by another process" in capsys.readouterr().err
    with Journal(path) as journal:
        assert len(journal.recover().unfinished) == 2


@pytest.mark.parametrize("command", ["show", "compact", "clear"])
def test_what_is_no_journal(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    assert run("prorl", ["journal", command, str(other)]) == 2
    other.write_text("precious")
    assert run("prorl", ["journal", command, str(other)]) == 2
    assert "is not a journal of this broker" in capsys.readouterr().err
    assert other.read_text() == "precious"


def test_journal_in_memory_is_said_to_be_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "topology.toml"
    config.write_text('[rollout_broker]\njournal = ""\n')
    assert run("prorl", ["journal", "show", "--config", str(config)]) == 2
    assert "keeps its journal in memory" in capsys.readouterr().err
