"""Trajectories beside the journal: what comes back after any end, what is told as lost, and what the disk holds."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_zmq.brokers.journal import segment_store
from prorl_zmq.brokers.journal.journal import Journal
from prorl_zmq.brokers.journal.journal_summary import count_damaged, read_summary
from prorl_zmq.brokers.journal.records import StoredBlock
from prorl_zmq.brokers.journal.segment_store import BlockLost, segment_paths, segment_sizes
from prorl_zmq.errors import JournalFailed
from prorl_zmq.system import stored_block

from .test_journal import KILLED_CHILD, check_what_was_said, finished, state

LIMIT_BYTES = 2**20
SEGMENT_BYTES = LIMIT_BYTES // segment_store.SEGMENTS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rollout.journal"


def end(journal: Journal, *sequences: int, size: int = 1000) -> None:
    """Have jobs end, with trajectories."""
    journal.accept([state(number, f"job-{number}") for number in sequences])
    journal.write([], [finished(number, f"job-{number}", content(number, size)) for number in sequences], [])


def content(number: int, size: int = 1000) -> bytes:
    return number.to_bytes(4, "big") * (size // 4)


def read(journal: Journal, number: int, size: int = 1000) -> bytes:
    return bytes(journal.block(StoredBlock(number, size)))


@pytest.mark.parametrize("call", range(0, 11, 3))
def test_killed_in_the_middle_of_a_block(path: Path, call: int) -> None:
    """Half of it is in the file, and no row says so; what was said to be safe is."""
    command = [sys.executable, str(KILLED_CHILD), str(path), "1000000", str(call)]
    child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert child.returncode == -signal.SIGKILL, child.stderr
    check_what_was_said(path, child.stdout)


DAMAGES = {
    "cut off by a byte": (lambda file: os.truncate(file, file.stat().st_size - 1), {3}),
    "cut off": (lambda file: os.truncate(file, 1500), {2, 3}),
    "a hole": (lambda file: file.write_bytes(bytes(2500) + file.read_bytes()[2500:]), {1, 2, 3}),
    "a bit": (lambda file: file.write_bytes(file.read_bytes()[:1999] + b"\xff" + file.read_bytes()[2000:]), {2}),
    "gone": (lambda file: file.unlink(), {1, 2, 3}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_torn_tail_is_told_at_the_start_for_the_jobs_that_it_held(path: Path, damage: str) -> None:
    with Journal(path) as journal:
        end(journal, 1, 2, 3)
    (file,) = segment_paths(path)
    act, lost = DAMAGES[damage]
    act(file)
    assert count_damaged(path) == len(lost)
    with Journal(path) as journal:
        kept = {one.sequence: one for one in journal.recover().uncollected}
        assert set(kept) == {1, 2, 3}
        for number, one in kept.items():
            if number in lost:
                assert one.result.error is not None
                assert (one.result.error.code, one.result.tokens) == ("jobs_lost", 0)
            else:
                assert read(journal, number) == content(number)
        journal.write([], [], [1, 2, 3])
        assert segment_paths(path) == []
    assert count_damaged(path) == 0


def test_segment_that_is_damaged_behind_the_brokers_back_costs_the_jobs_in_it(path: Path) -> None:
    with Journal(path, LIMIT_BYTES) as journal:
        for number in range(1, 4):
            end(journal, number, size=2 * SEGMENT_BYTES)
        first, second, third = sorted(segment_paths(path))
        first.unlink()
        os.truncate(second, 100)
        for number, problem in ((1, f"{first} is gone"), (2, f"{second} is too short")):
            with pytest.raises(BlockLost, match=problem):
                read(journal, number, 2 * SEGMENT_BYTES)
        assert read(journal, 3, 2 * SEGMENT_BYTES) == content(3, 2 * SEGMENT_BYTES)
        third.write_bytes(bytes(2 * SEGMENT_BYTES))
        with pytest.raises(BlockLost, match="is not what was written"):
            read(journal, 3, 2 * SEGMENT_BYTES)
        journal.compact()
        journal.write([], [], [1, 2, 3])
        end(journal, 4)
        assert read(journal, 4) == content(4)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("place", [0, 4095, 4096, 2**20, 2**20 + 403])
def test_damaged_byte_of_a_large_block_is_noticed_wherever_it_is(
    path: Path, monkeypatch: pytest.MonkeyPatch, local: bool, place: int
) -> None:
    if not local:
        monkeypatch.setattr(stored_block, "file_system_of", lambda _: "nfs4")
    size = 2**20 + 404
    with Journal(path) as journal:
        end(journal, 1)
        end(journal, 2, 3, size=size)
        assert isinstance(journal.block(StoredBlock(2, size)), memoryview) == local
        for number in (2, 3):
            assert read(journal, number, size) == content(number, size)
        (file,) = segment_paths(path)
        with file.open("r+b") as behind:
            behind.seek(1000 + place)
            behind.write(b"\xff")
        with pytest.raises(BlockLost, match="is not what was written"):
            read(journal, 2, size)
        assert read(journal, 3, size) == content(3, size)


def test_swapped_pages_of_a_large_block_are_noticed(path: Path) -> None:
    block = os.urandom(2**21)
    with Journal(path) as journal:
        journal.accept([state(1, "job-1")])
        journal.write([], [finished(1, "job-1", block)], [])
        segment_paths(path)[0].write_bytes(block[4096:8192] + block[:4096] + block[8192:])
        with pytest.raises(BlockLost, match="is not what was written"):
            read(journal, 1, len(block))


def test_new_segment_is_never_one_that_rows_name(path: Path) -> None:
    with Journal(path) as journal:
        end(journal, 1)
    segment_paths(path)[0].unlink()
    with Journal(path) as journal:
        journal.recover()
        end(journal, 2)
        assert list(segment_sizes(path)) == [2]


def test_segments_are_private_and_what_no_row_names_goes_at_the_next_start(path: Path) -> None:
    with Journal(path) as journal:
        end(journal, 1)
    (file,) = segment_paths(path)
    assert file.stat().st_mode & 0o777 == 0o600
    with file.open("ab") as behind:
        behind.write(b"x" * 500)
    orphan = path.with_name(f"{path.name}{segment_store.SUFFIX}00000009")
    orphan.write_bytes(b"x" * 500)
    with Journal(path) as journal:
        assert segment_paths(path) == [file]
        assert read(journal, 1) == content(1)
        end(journal, 2)
        assert sorted(segment_sizes(path)) == [1, 10]


def test_the_journal_does_not_wait_until_a_large_segment_is_removed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_store, "REMOVED_APART_BYTES", 2 * SEGMENT_BYTES)
    asked, allowed = threading.Event(), threading.Event()
    unlink = Path.unlink

    def slow(file: Path, missing_ok: bool = False) -> None:
        asked.set()
        assert allowed.wait(60)
        unlink(file, missing_ok)

    with Journal(path, LIMIT_BYTES) as journal:
        end(journal, 1, size=2 * SEGMENT_BYTES)
        end(journal, 2)
        with monkeypatch.context() as slowly:
            slowly.setattr(Path, "unlink", slow)
            journal.write([], [], [1])
            assert asked.wait(60)
            assert sorted(segment_sizes(path)) == [1, 2]
            assert read(journal, 2) == content(2)
            allowed.set()
            (removal,) = [one for one in threading.enumerate() if one.name == "remove-segment"]
            removal.join(60)
        assert sorted(segment_sizes(path)) == [2]


def test_stragglers_are_copied_on_and_the_rest_of_their_segments_goes(path: Path) -> None:
    """One result in 20 is not collected: its whole segment stayed for it."""
    with Journal(path, 16 * LIMIT_BYTES) as journal:
        for number in range(1, 2001):
            end(journal, number, size=20_000)
            if number > 10 and number % 20:
                journal.write([], [], [number - 10])
        left = read_summary(path).trajectory_bytes
        assert sum(segment_sizes(path).values()) <= 2 * left + 5 * 16 * SEGMENT_BYTES
        assert max(segment_sizes(path)) * 16 * SEGMENT_BYTES <= 1.2 * 2000 * 20_000, "each copied once or so"
    with Journal(path, 16 * LIMIT_BYTES) as journal:
        kept = [one.sequence for one in journal.recover().uncollected]
        assert kept == [*range(10, 1991, 20), *range(1991, 2001)]
        assert all(read(journal, number, 20_000) == content(number, 20_000) for number in kept)


def test_near_the_limit_room_is_made_of_what_is_not_wanted(path: Path) -> None:
    """Less than is wanted, so that it would have lain about: at most four segments at each try."""
    with Journal(path, LIMIT_BYTES) as journal:
        end(journal, *range(1, 201), size=4000)
        journal.write([], [], [number for number in range(1, 201) if number % 5 < 2])
        before = sum(segment_sizes(path).values())
        assert before > 780_000
        journal.accept([state(201, "big")])
        with pytest.raises(JournalFailed, match="is full"):
            journal.write([], [finished(201, "big", bytes(250_000))], [])
        assert sum(segment_sizes(path).values()) < before
        for _ in range(3):  # as `WriteAhead` does
            with contextlib.suppress(JournalFailed):
                journal.write([], [finished(201, "big", bytes(250_000))], [])
                break
        assert read(journal, 201, 250_000) == bytes(250_000)
        assert all(read(journal, number, 4000) == content(number, 4000) for number in range(1, 201) if number % 5 > 1)


def test_lost_block_is_not_copied_and_its_neighbours_are(path: Path) -> None:
    with Journal(path) as journal:
        end(journal, 1, 2, 3)
        (file,) = segment_paths(path)
    with Journal(path) as journal:
        journal.write([], [], [1])
        with file.open("r+b") as behind:
            behind.seek(1500)
            behind.write(b"x")
        journal.compact()
        assert list(segment_sizes(path).values()) == [1000]
        assert read(journal, 3) == content(3)
        with pytest.raises(BlockLost):
            read(journal, 2)
    assert count_damaged(path) == 1
    segment_paths(path)[0].write_bytes(bytes(1000))
    with Journal(path) as journal:
        end(journal, 4, 5)
        journal.write([], [], [5])
    with Journal(path) as journal:
        for file in segment_paths(path):
            file.write_bytes(bytes(file.stat().st_size))
        journal.compact()  # of the second nothing is left to be copied
        assert len(segment_paths(path)) == 1
    assert count_damaged(path) == 3


def test_rows_that_cannot_be_written_leave_no_blocks_however_often_that_is_tried(path: Path) -> None:
    with Journal(path) as journal:
        end(journal, 1)
        journal.accept([state(2, "b")])
        connection: Any = journal._file.connection
        connection.execute("PRAGMA query_only = 1")
        for _ in range(20):
            with pytest.raises(JournalFailed):
                journal.write([], [finished(2, "b", content(2))], [])
            assert list(segment_sizes(path).values()) == [1000]
        connection.execute("PRAGMA query_only = 0")
        journal.write([], [finished(2, "b", content(2))], [])
        assert [read(journal, number) for number in (1, 2)] == [content(1), content(2)]


def test_with_sync_the_disk_has_a_block_before_its_row(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    wait = os.fdatasync

    def fdatasync(file: int) -> None:
        wait(file)
        events.append("block")

    monkeypatch.setattr(segment_store.os, "fdatasync", fdatasync)
    with Journal(path, sync=True) as journal:
        journal.accept([state()])
        connection: Any = journal._file.connection
        connection.set_trace_callback(lambda statement: events.append(statement.split()[0]))
        journal.write([], [finished(block=b"block")], [])
    assert events.index("block") < events.index("COMMIT")


STEPS = st.one_of(
    st.tuples(st.just("end"), st.lists(st.integers(1, 3 * SEGMENT_BYTES), min_size=1, max_size=4)),
    st.tuples(st.just("collect"), st.lists(st.integers(0, 50), min_size=1, max_size=8)),
    st.tuples(st.sampled_from(["kill", "restart", "compact", "refused"]), st.just([])),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=30))
def test_what_was_written_is_there_whatever_happens_and_the_disk_holds_little_else(
    steps: list[tuple[str, list[int]]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "0" / "rollout.journal"
        path.parent.mkdir()
        journal = Journal(path, LIMIT_BYTES)
        held: dict[int, bytes] = {}
        last = 0
        for step, numbers in steps:
            if step == "end":
                new = {last + place: os.urandom(size) for place, size in enumerate(numbers, 1)}
                try:
                    journal.accept([state(number, f"job-{number}") for number in new])
                except JournalFailed:
                    continue  # it is full
                last += len(new)
                ended = [finished(number, f"job-{number}", block) for number, block in new.items()]
                try:
                    journal.write([], ended, [])
                    held |= new
                except JournalFailed:
                    journal.write([], [], [], list(new))
            elif step == "collect" and held:
                gone = {list(held)[number % len(held)] for number in numbers}
                journal.write([], [], list(gone))
                held = {number: block for number, block in held.items() if number not in gone}
            elif step == "compact":
                journal.compact()
            elif step == "refused":  # bytes that are written, and rows that are not
                connection: Any = journal._file.connection
                connection.execute("PRAGMA query_only = 1")
                with pytest.raises(JournalFailed):
                    journal.write([], [finished(last + 1, "refused", b"x" * 5000)], [])
                connection.execute("PRAGMA query_only = 0")
            elif step in ("kill", "restart"):
                if step == "kill":  # what a process leaves that ends here
                    copy = path.parent.with_name(str(int(path.parent.name) + 1))
                    shutil.copytree(path.parent, copy)
                    journal.close()
                    path = copy / path.name
                else:
                    journal.close()
                journal = Journal(path, LIMIT_BYTES)
                assert [one.sequence for one in journal.recover().uncollected] == sorted(held)
            assert {number: read(journal, number, len(block)) for number, block in held.items()} == held
            wanted, size = sum(map(len, held.values())), sum(segment_sizes(path).values())
            assert size <= LIMIT_BYTES
            assert size <= 2 * wanted + 5 * SEGMENT_BYTES + 3 * SEGMENT_BYTES
        journal.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this root cannot mount file systems")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_full_disk_takes_nothing_and_loses_nothing_and_the_reserve_is_for_what_ends(small_disk: Path) -> None:
    path = small_disk / "rollout.journal"
    with Journal(path) as journal:
        end(journal, 1, size=100_000)
        journal.accept([state(number, f"job-{number}") for number in (2, 3, 4)])
        free = os.statvfs(small_disk)
        (small_disk / "other").write_bytes(bytes(free.f_bavail * free.f_frsize - 50_000))
        journal.write([], [finished(2, "job-2", content(2, 200_000))], [])  # with the room of the reserve
        with pytest.raises(JournalFailed, match=r"the disk of the journal .* is full"):
            journal.accept([state(5, "job-5")])
        with pytest.raises(JournalFailed, match=r"the trajectories of .* cannot be written: No space left on device"):
            journal.write([], [finished(3, "job-3", content(3, 2_000_000))], [])
        assert [one.sequence for one in journal.recover().unfinished] == [3, 4]
        assert [read(journal, 1, 100_000), read(journal, 2, 200_000)] == [content(1, 100_000), content(2, 200_000)]
        journal.write([], [], [1])
        (small_disk / "other").unlink()
        journal.write([], [finished(3, "job-3", content(3, 2_000_000))], [])
    with Journal(path) as journal:
        assert [one.sequence for one in journal.recover().uncollected] == [2, 3]
        assert read(journal, 3, 2_000_000) == content(3, 2_000_000)
