"""Which file system a journal is on, and what follows for it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from prorl_zmq.brokers.backends.backend_journal import BackendJournal
from prorl_zmq.brokers.journal.journal import Journal
from prorl_zmq.brokers.journal.journal_summary import count_damaged, read_summary
from prorl_zmq.errors import ConfigError, JournalFailed
from prorl_zmq.system.file_system import LOCAL, file_system_of

from .test_journal import finished, state

if TYPE_CHECKING:
    from collections.abc import Iterator

MOUNTS = r"""21 1 0:20 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 21 0:40 / /home rw,relatime shared:7 master:2 - nfs4 server:/home rw,vers=4.2
41 40 0:41 / /home/scratch rw - lustre mgs@tcp:/scratch rw,flock
42 21 0:42 / /two\040words rw - fuse.sshfs x rw
43 21 0:43 / /tmp rw - nfs server:/tmp rw
44 43 0:44 / /tmp rw - tmpfs none rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/x/rollout.journal", "ext4"),
        ("/home/me/run/rollout.journal", "nfs4"),
        ("/home/scratch/rollout.journal", "lustre"),
        ("/homes/rollout.journal", "ext4"),
        ("/two words/rollout.journal", "fuse.sshfs"),
        ("/tmp/rollout.journal", "tmpfs"),
    ],
)
def test_kind(path: str, kind: str) -> None:
    assert file_system_of(Path(path), MOUNTS) == kind


def test_where_the_kernel_says_nothing() -> None:
    assert file_system_of(Path("/x/rollout.journal"), "") == ""
    assert file_system_of(Path("/x/rollout.journal")) != ""


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that is not known to be local; FUSE may have anything behind it."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount another file system")
    for name in ("lower", "upper", "work", "other"):
        (tmp_path / name).mkdir()
    options = ",".join(f"{name}dir={tmp_path / name}" for name in ("lower", "upper", "work"))
    other = tmp_path / "other"
    program = shutil.which("fuse-overlayfs")
    if program is None or subprocess.run([program, "-o", options, other], capture_output=True, check=False).returncode:
        pytest.skip("no fuse-overlayfs can be mounted here")
    yield other
    subprocess.run(["umount", "--lazy", other], check=True)


def test_no_memory_is_shared_where_that_is_not_safe(other_disk: Path) -> None:
    path, killed = other_disk / "rollout.journal", other_disk / "killed"
    killed.mkdir()
    with Journal(path) as journal, BackendJournal(other_disk / "backends.journal") as backends:
        assert backends.load() == []
        journal.accept([state(), state(2, "b")])
        journal.write([], [finished(block=b"block")], [])
        assert file_system_of(path) not in LOCAL
        assert sorted(part.name for part in other_disk.glob("*-*")) == [
            "backends.journal-wal",
            "rollout.journal-wal",
            "rollout.journal.segment-00000001",
        ]
        for read in (read_summary, count_damaged):
            with pytest.raises(
                JournalFailed, match=r"in use by a broker, and on this file system \(fuse.*\) no other process"
            ):
                read(path)
        with pytest.raises(JournalFailed, match="in use by another process"):
            Journal(path)
        for part in other_disk.glob("rollout*"):
            shutil.copy(part, killed)
    for left in (path, killed / path.name):
        assert (read_summary(left).jobs, read_summary(left).results, count_damaged(left)) == (1, 1, 0)
        with Journal(left) as journal:
            assert len(journal.recover().uncollected) == 1
    assert not list(other_disk.rglob("*-shm"))


def test_memory_is_shared_on_a_local_disk_so_that_others_can_read(tmp_path: Path) -> None:
    path = tmp_path / "rollout.journal"
    with Journal(path) as journal:
        journal.accept([state()])
        if file_system_of(path) in LOCAL:
            assert (read_summary(path).in_use, read_summary(path).jobs) == (True, 1)


def test_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lustre is when it is mounted without `flock`."""

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match=r"cannot be locked against a second broker \(Function not implemented\)"):
        Journal(tmp_path / "rollout.journal")
