"""The journal on disk: what comes back, what is refused, and what a full or broken disk does."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq

from prorl_zmq.brokers.journal.journal import APPLICATION_ID, SCHEMA_VERSION, Journal
from prorl_zmq.brokers.journal.journal_file import RESERVE_SUFFIX
from prorl_zmq.brokers.journal.journal_summary import count_damaged, read_summary
from prorl_zmq.brokers.journal.records import SUBMISSIONS, Finished, JobState, StoredBlock, Submission, job_digest
from prorl_zmq.brokers.rollout.job_record import JobRecord
from prorl_zmq.errors import ConfigError, ErrorInfo, JournalFailed
from prorl_zmq.system.processes import ISOLATED
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.jobs import Job, Outcome, Phase, Result, SandboxHandle
from prorl_zmq.wire.messages.stages import PhaseDone

PACKED = codec.encode(Job(task="math", instance={"n": 1}, job_id="a"))
if TYPE_CHECKING:
    from collections.abc import Iterator

KILLED_CHILD = Path(__file__).with_name("journal_writer.py")


def state(sequence: int = 1, job_id: str = "a", **more: Any) -> JobState:
    return JobState(sequence, "s", job_id, "math", 60.0, PACKED, **more)


def finished(sequence: int = 1, job_id: str = "a", block: Any = None) -> Finished:
    error = ErrorInfo("handler_failed", "it failed", {"line": 3})
    result = Result(
        job_id=job_id, task="math", outcome=Outcome.FAILED, error=error, tokens=1 if block else 0, metrics={"m": 1.5}
    )
    return Finished("s", result, block, job_digest(PACKED), sequence, b"history")


def ran(block: Any, **more: Any) -> JobState:
    """A job whose RUN has ended."""
    run = PhaseDone(stage_id="run-1", job_id="a", attempt=2, phase=Phase.RUN, tokens=1, stop_reason="done")
    sandbox = SandboxHandle("process", "/sandboxes/a.1", "left")
    progress = {"sandbox": sandbox, "phase_data": {"x": [1, b"2", None]}, "run": run, "timings": {"run": 2.5}}
    place = {"phase": Phase.EVAL, "stage_id": "eval-1", "attempt": 2, "attempts_given_back": 1}
    return state(**place, **progress, block=block, metrics={"turns": 3.0}, history=b"history", **more)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rollout.journal"


def test_everything_comes_back_as_it_was(path: Path) -> None:
    frame = zmq.Frame(b"trajectory")
    with Journal(path) as journal:
        journal_id = journal.journal_id
        journal.accept([state(), state(2, "b"), state(3, "c")])
        journal.write([ran(frame)], [finished(3, "c", b"other")], [])
    assert path.stat().st_mode & 0o777 == 0o600
    with Journal(path) as journal:
        assert journal.journal_id == journal_id
        kept = journal.recover()
        assert kept.last_sequence == 3
        assert kept.unfinished == [ran(StoredBlock(1, 10)), state(2, "b")]
        assert kept.uncollected == [finished(3, "c", StoredBlock(3, 5))]
        assert bytes(journal.block(kept.unfinished[0].block)) == b"trajectory"
        assert bytes(journal.block(kept.uncollected[0].block)) == b"other"


def test_without_a_file_the_next_broker_has_what_the_one_before_left() -> None:
    frame, block = zmq.Frame(b"trajectory"), b"other"
    journal = Journal()
    journal.accept([state(), state(2, "b"), state(3, "c")], Submission("s", "r", 3))
    journal.write([ran(frame)], [finished(3, "c", block)], [], notes={"note": b"n"})
    assert journal.unloaded(finished(3, "c", block)).block is block
    kept = journal.recover()
    assert kept.unfinished == [ran(StoredBlock(1, 10)), state(2, "b")]
    assert kept.uncollected == [finished(3, "c", StoredBlock(3, 5))]
    assert (kept.last_sequence, kept.notes, kept.submissions) == (3, {"note": b"n"}, [Submission("s", "r", 3)])
    assert journal.block(kept.unfinished[0].block) is frame  # not a copy
    assert journal.block(kept.uncollected[0].block) is block
    journal.write([], [], [3], [1, 2])
    assert journal.recover()[:2] == ([], [])
    with pytest.raises(KeyError):
        journal.block(StoredBlock(3, 5))


def test_that_a_job_is_a_batchs_comes_back(path: Path) -> None:
    """The job's state, its result, and what tells of a row that is damaged."""
    with Journal(path) as journal:
        journal.accept([state(number, name, in_batch=True) for number, name in enumerate("abc", 1)])
        journal.write([], [finished(2, "b")._replace(in_batch=True)], [])
    edit(path, "UPDATE jobs SET packed = 'text' WHERE sequence = 3")
    with Journal(path) as journal:
        kept = journal.recover()
    assert [(one.job_id, one.in_batch, one.holder) for one in kept.unfinished] == [("a", True, "s/batches")]
    assert [(one.result.job_id, one.in_batch, one.holder) for one in kept.uncollected] == [
        ("b", True, "s/batches"),
        ("c", True, "s/batches"),
    ]


def test_acknowledged_results_leave_nothing_and_their_room_is_used_again(path: Path) -> None:
    with Journal(path) as journal:
        sizes = []
        for sequence in range(1, 100):
            journal.accept([state(sequence)])
            journal.write([], [finished(sequence, block=b"x" * 1_000_000)], [])
            journal.write([], [], [sequence])
            sizes.append(sum(part.stat().st_size for part in path.parent.iterdir() if part.suffix != RESERVE_SUFFIX))
        assert journal.recover()[:3] == ([], [], 0)
        assert max(sizes) < 70 * 2**20  # the log is copied into the file every 64 MiB


def test_a_block_is_written_once_and_given_up_with_its_run(path: Path) -> None:
    with Journal(path) as journal:
        journal.accept([state()])
        first = b"first"
        journal.write([ran(first)], [], [])
        journal.write([ran(first)._replace(stage_id="")], [], [])
        journal.write([state(attempt=3)], [], [])  # lost with its node: INIT again
        assert journal.recover().unfinished == [state(attempt=3)]
        journal.write([ran(b"second run")], [], [])
        (kept,) = journal.recover().unfinished
        assert bytes(journal.block(kept.block)) == b"second run"


def test_a_block_that_was_replaced_while_the_disk_was_full(path: Path) -> None:
    """Both its loss and its successor come with one write."""
    with Journal(path) as journal:
        journal.accept([state()])
        journal.write([ran(b"first")], [], [])
        journal.write([ran(b"other")], [], [])
        (kept,) = journal.recover().unfinished
        assert bytes(journal.block(kept.block)) == b"other"


def test_result_without_its_block_in_memory_is_not_written_again(path: Path) -> None:
    with Journal(path) as journal:
        journal.accept([state()])
        one = finished(block=b"block")
        journal.write([], [one], [])
        light = journal.unloaded(one)
        assert light.block == StoredBlock(1, 5)
        assert bytes(journal.block(light.block)) == b"block"
        assert journal.unloaded(light) is light


def test_state_without_its_block_in_memory_is_read_from_disk(path: Path) -> None:
    with Journal(path) as journal:
        journal.accept([state(), state(2, "b")])
        journal.write([ran(b"trajectory")], [], [])
        light = journal.unloaded(ran(b"trajectory"))
        assert light.block == StoredBlock(1, 10)
        assert bytes(journal.block(light.block)) == b"trajectory"
        unwritten = state(2, "b")._replace(block=b"other")
        assert journal.unloaded(unwritten) is unwritten


def test_state_that_cannot_be_packed_does_not_stop_the_others(path: Path) -> None:
    nested: dict[str, Any] = {}
    for _ in range(5000):
        nested = {"a": nested}
    with Journal(path) as journal:
        journal.accept([state(), state(2, "b")])
        journal.write([state(attempt=2, phase_data=nested), state(2, "b", attempt=2)], [], [])
        assert [one.attempt for one in journal.recover().unfinished] == [1, 2]


@pytest.mark.parametrize(
    "content",
    [b"garbage, not a database", b"SQLite format 3\0" + b"x" * 200, b"\0" * 10],
    ids=["text", "header only", "short"],
)
def test_file_that_is_no_journal_is_left_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a journal of this broker"):
        Journal(path)
    with pytest.raises(ConfigError, match="is not a journal of this broker"):
        read_summary(path)
    assert path.read_bytes() == content
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_database_of_something_else_is_left_as_it_is(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE precious (data)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="is not a journal of this broker"):
        Journal(path)
    assert path.read_bytes() == before


def test_other_schema_version_is_refused_by_name(path: Path) -> None:
    Journal(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    for attempt in (Journal, read_summary):
        with pytest.raises(ConfigError, match=f"{path} is a journal of schema version {SCHEMA_VERSION + 1}, and this"):
            attempt(path)


def edit(path: Path, statement: str) -> None:
    """Change a journal behind its broker's back, as far as SQLite lets one."""
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(statement)
    connection.close()


DAMAGES = [
    "UPDATE states SET progress = x'c1' WHERE sequence = 1",
    "UPDATE states SET progress = 'text' WHERE sequence = 1",
    "UPDATE states SET phase = 'zzz' WHERE sequence = 1",
    "UPDATE states SET attempt = 'abc' WHERE sequence = 1",
    "UPDATE states SET attempt = 9223372036854775807 WHERE sequence = 1",
    "UPDATE states SET attempts_given_back = -1 WHERE sequence = 1",
    "UPDATE states SET stage_id = x'00' WHERE sequence = 1",
    "UPDATE states SET stage_id = CAST(x'ff' AS TEXT) WHERE sequence = 1",
    "UPDATE states SET history = 7 WHERE sequence = 1",
    "UPDATE jobs SET packed = x'c1ffff' WHERE sequence = 1",
    "UPDATE jobs SET packed = x'01' WHERE sequence = 1",
    "UPDATE jobs SET packed = 'text' WHERE sequence = 1",
    "UPDATE jobs SET task = x'ff00' WHERE sequence = 1",
    "UPDATE jobs SET stage_wait_s = 'soon' WHERE sequence = 1",
    "UPDATE results SET result = x'c1' WHERE sequence = 3",
    "UPDATE results SET result = x'80' WHERE sequence = 3",
    "UPDATE results SET digest = 'text' WHERE sequence = 3",
    "UPDATE results SET in_batch = 'no' WHERE sequence = 3",
    "UPDATE jobs SET in_batch = 2 WHERE sequence = 1",
    "DELETE FROM blocks WHERE sequence = 3",
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_row_that_cannot_be_read_is_told_to_its_client_and_stops_nothing_else(path: Path, damage: str) -> None:
    with Journal(path) as journal:
        journal.accept([state(), state(2, "b"), state(3, "c"), state(4, "d")])
        journal.write([ran(b"block")], [finished(3, "c", b"other"), finished(4, "d")], [])
    edit(path, damage)
    number, job_id = (3, "c") if damage.endswith("3") else (1, "a")
    assert count_damaged(path) == 1
    for _ in range(2):  # the row stays until the client knows
        with Journal(path) as journal:
            kept = journal.recover()
            assert kept.last_sequence == 4
            assert [one.job_id for one in kept.unfinished] == [one for one in ("a", "b") if one != job_id]
            assert [one.sequence for one in kept.uncollected] == sorted({3, 4, number})
            (loss,) = [one for one in kept.uncollected if one.sequence == number]
            assert (loss.session, loss.result.job_id, loss.result.tokens) == ("s", job_id, 0)
            assert loss.result.outcome == Outcome.INFRASTRUCTURE_ERROR
            assert loss.result.error is not None
            assert (loss.result.error.code, loss.result.error.fields["job_ids"]) == ("jobs_lost", job_id)
            assert codec.decode(codec.encode(loss.result), Result) == loss.result
            journal.write([state(2, "b", attempt=2)], [], [])
    with Journal(path) as journal:
        journal.recover()
        journal.write([], [], [number])
    assert count_damaged(path) == 0
    with Journal(path) as journal:
        kept = journal.recover()
        assert number not in {one.sequence for one in (*kept.unfinished, *kept.uncollected)}
    left = sqlite3.connect(path)
    assert left.execute("SELECT count(*) FROM states WHERE sequence = 1").fetchone() == (0 if number == 1 else 1,)
    assert left.execute(f"SELECT count(*) FROM blocks WHERE sequence = {number}").fetchone() == (0,)
    left.close()


@pytest.mark.parametrize("cell", ["session = x'ff00'", "session = CAST(x'ff' AS TEXT)", "job_id = '../x'"])
def test_row_that_does_not_say_whose_it_is_stays_and_its_number_is_not_used_again(
    path: Path, cell: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Journal(path) as journal:
        journal.accept([state(), state(2, "b")])
    edit(path, f"UPDATE jobs SET {cell} WHERE sequence = 2")
    with Journal(path) as journal:
        assert journal.recover()[:3] == ([state()], [], 2)
        journal.accept([state(3, "c")])
        assert journal.recover()[:3] == ([state(), state(3, "c")], [], 3)
    assert "a row of the journal" in caplog.text
    assert (read_summary(path).jobs, count_damaged(path)) == (3, 1)


def test_two_rows_of_one_job(path: Path) -> None:
    with Journal(path) as journal:
        journal.accept([state(), state(2, "b")])
    edit(path, "UPDATE jobs SET job_id = 'a' WHERE sequence = 2")
    with Journal(path) as journal:
        assert journal.recover()[:3] == ([state()], [], 2)


class TestRowThatCannotBeWritten:
    """One that SQLite or MessagePack cannot hold: the others are written, in this round and all later ones."""

    @pytest.mark.parametrize(
        "bad", [{"attempt": 2**63}, {"stage_id": "\ud800"}, {"attempts_given_back": [1]}, {"block": object()}]
    )
    def test_state(self, path: Path, bad: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
        with Journal(path) as journal:
            journal.accept([state(), state(2, "b"), state(3, "c")])
            journal.write([state(phase=Phase.RUN), state(2, "b", attempt=2)], [], [])
            bad_one = ran(b"block")._replace(**bad)
            journal.write([bad_one, state(2, "b", attempt=3)], [finished(3, "c", b"x")], [])
            assert "the job's state cannot be written down" in caplog.text
            kept = journal.recover()
            assert kept.unfinished == [state(phase=Phase.RUN), state(2, "b", attempt=3)]
            assert kept.uncollected == [finished(3, "c", StoredBlock(3, 1))]
            journal.write([ran(b"block")], [], [3])
            assert journal.recover().unfinished == [ran(StoredBlock(1, 5)), state(2, "b", attempt=3)]

    @pytest.mark.parametrize(
        "bad",
        [
            finished()._replace(session="\ud800"),
            finished()._replace(job_digest=object()),  # type: ignore[arg-type]
            finished(block=object()),
            finished()._replace(result=msgspec.structs.replace(finished().result, metrics={"m": 2**70})),
        ],
    )
    def test_result_whose_job_is_kept_until_the_client_has_it(
        self, path: Path, bad: Finished, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Journal(path) as journal:
            journal.accept([state(), state(2, "b")])
            journal.write([], [bad, finished(2, "b")], [])
            assert "the job's result cannot be written down" in caplog.text
            assert journal.recover()[:3] == ([state()], [finished(2, "b")], 2)
            journal.write([], [], [1])
            assert journal.recover()[:3] == ([], [finished(2, "b")], 2)


@pytest.mark.parametrize("size", [30_000, 5_000])
def test_truncated_file_is_called_damaged(path: Path, size: int) -> None:
    with Journal(path) as journal:
        journal.accept([state(number, f"job-{number}") for number in range(1, 500)])
    os.truncate(path, size)

    def start() -> None:
        with Journal(path) as journal:
            journal.recover()

    for attempt in (start, lambda: read_summary(path), lambda: count_damaged(path)):
        with pytest.raises(ConfigError, match=f"the journal {path} is damaged .*: keep a copy .*prorl journal clear"):
            attempt()


def test_folder_missing_folder_and_empty_file(tmp_path: Path, path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be opened for writing: Is a directory"):
        Journal(tmp_path)
    with pytest.raises(ConfigError, match="cannot be opened for writing: No such file"):
        Journal(tmp_path / "none" / "journal")
    path.touch()
    with pytest.raises(ConfigError, match="is empty"):
        read_summary(path)
    with Journal(path) as journal:
        assert journal.recover()[:3] == ([], [], 0)


def test_second_broker_is_refused_and_a_reader_is_not(path: Path) -> None:
    with Journal(path) as journal:
        journal.accept([state()])
        with pytest.raises(JournalFailed, match=f"the journal {path} is in use by another process"):
            Journal(path)
        summary = read_summary(path)
        assert (summary.in_use, summary.jobs) == (True, 1)
        journal.accept([state(2, "b")])  # the refused one has taken no lock of ours away
    assert not read_summary(path).in_use
    Journal(path).close()


class TestFull:
    """The limit of the file is the same error to SQLite as that of the disk."""

    def test_new_jobs_are_refused_before_there_is_no_room(self, path: Path) -> None:
        with Journal(path, limit_bytes=2**20) as journal:
            journal.accept([state()])
            journal.write([], [finished(block=b"x" * 950_000)], [])
            with pytest.raises(JournalFailed, match="is full: it holds"):
                journal.accept([state(2, "b")])
            journal.write([], [], [1])
            journal.accept([state(2, "b")])

    def test_write_that_does_not_fit_changes_nothing(self, path: Path) -> None:
        with Journal(path, limit_bytes=2**20) as journal:
            journal.accept([state(), state(2, "b")])
            with pytest.raises(JournalFailed, match=r"is full: .*journal_limit_bytes\), 1 MiB; collect results"):
                journal.write([], [finished(block=b"x" * 600_000), finished(2, "b", b"x" * 600_000)], [])
            kept = journal.recover()
            assert [one.sequence for one in kept.unfinished] == [1, 2]
            assert kept.uncollected == []
            journal.write([], [finished(block=b"x" * 600_000)], [])
            with pytest.raises(JournalFailed, match="is full"):
                journal.write([], [finished(2, "b", b"x" * 600_000)], [1])  # never beyond the limit
            journal.write([], [], [1])  # as `WriteAhead` does next
            journal.write([], [finished(2, "b", b"x" * 600_000)], [])
            assert [one.sequence for one in journal.recover().uncollected] == [2]

    def test_limit_below_what_there_is(self, path: Path) -> None:
        with Journal(path) as journal:
            journal.accept([state()])
            journal.write([], [finished(block=b"x" * 3_000_000)], [])
        with Journal(path, limit_bytes=2**20) as journal:
            with pytest.raises(JournalFailed):
                journal.accept([state(2, "b")])
            assert len(journal.recover().uncollected) == 1
            journal.write([], [], [1])
            journal.accept([state(2, "b")])


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that other users reach; pytest's own are private."""
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_read_only_file_and_folder(public_folder: Path) -> None:
    """As another user, since root may write anywhere."""
    path = public_folder / "rollout.journal"
    with Journal(path) as journal:
        journal.accept([state()])
    script = (
        "import os, sys, pathlib; from prorl_zmq.brokers.journal.journal import Journal; "
        "from prorl_zmq.errors import ProrlError\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "try: Journal(pathlib.Path(sys.argv[1]))\n"
        "except ProrlError as error: print(error.code, error.message)"
    )
    for mode, folder_mode, expected in (
        (0o444, 0o755, "config_error the journal"),
        (0o666, 0o555, "journal_failed the journal"),
    ):
        path.chmod(mode)
        path.parent.chmod(folder_mode)
        command = [sys.executable, *ISOLATED, "-c", script, str(path)]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        path.parent.chmod(0o755)
        assert said.startswith(expected), said
        assert str(path) in said


@pytest.mark.parametrize("statement", range(0, 24, 3))
def test_crash_between_any_two_statements(path: Path, statement: int) -> None:
    """A child says what is safe, and is killed within a transaction: what it said is there, and nothing half."""
    command = [sys.executable, str(KILLED_CHILD), str(path), str(statement)]
    child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert child.returncode == -signal.SIGKILL, child.stderr
    check_what_was_said(path, child.stdout)


def check_what_was_said(path: Path, output: str) -> None:
    said = [line.split() for line in output.splitlines()]
    with Journal(path) as journal:
        kept = journal.recover()
        jobs = {one.sequence: one for one in kept.unfinished}
        results = {one.sequence: one for one in kept.uncollected}
        for sequence in range(1, 12):
            events = [words[0] for words in said if int(words[1]) == sequence]
            last = events[-1] if events else ""
            assert (sequence in jobs) + (sequence in results) <= 1
            if last == "accepted":  # the next write may have been done and not said
                assert jobs[sequence].attempt in (1, 2)
            elif last == "ran":
                block = (jobs.get(sequence) or results[sequence]).block
                assert bytes(journal.block(block)) == b"block" * 2000
            elif last == "ended" and sequence in results:
                assert bytes(journal.block(results[sequence].block)) == b"block" * 2000
            elif last == "acknowledged":
                assert sequence not in jobs
                assert sequence not in results
        integrity = sqlite3.connect(path)
        assert integrity.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        integrity.close()


def test_application_id_is_in_the_header(path: Path) -> None:
    """So a file is known before SQLite touches it."""
    Journal(path).close()
    assert int.from_bytes(path.read_bytes()[68:72], "big") == APPLICATION_ID
    assert path.stat().st_size % 4096 == 0


def test_packed_job_that_is_a_map_and_no_job_has_one_attempt(path: Path) -> None:
    """Whether it is one shows only when it is needed; then its lease lapses, and it ends."""
    with Journal(path) as journal:
        journal.accept([state()._replace(packed=codec.pack({"task": 1}))])
        (kept,) = journal.recover().unfinished
    job = JobRecord.restored(kept).job
    assert (job.job_id, job.task, job.max_attempts) == ("a", "math", 1)


def test_the_last_submissions_are_kept(path: Path) -> None:
    with Journal(path) as journal:
        for number in range(1, SUBMISSIONS + 11):
            journal.accept([state(number, f"job-{number}")], Submission("s", f"request-{number}", 1))
    with Journal(path) as journal:
        kept = journal.recover().submissions
    assert len(kept) == SUBMISSIONS
    assert (kept[0].request_id, kept[-1]) == ("request-11", Submission("s", f"request-{SUBMISSIONS + 10}", 1))
