"""The folder of a copy of weights: where none can be made, and whether a host uses it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from support.weight_versions import assert_same, model, read_copy, write_checkpoint

from prorl_zmq.errors import ConfigError, EndpointInUse, EngineFailed
from prorl_zmq.inference.weights import copy_folder
from prorl_zmq.inference.weights.copy_folder import LOCKS, SYNC, find_copies, unused_copy, used_copy
from prorl_zmq.inference.weights.local_copy import LocalCopy
from prorl_zmq.inference.weights.version_chain import Content
from prorl_zmq.service import leftovers
from prorl_zmq.service.leftovers import Leftover, Wanted, find_leftovers
from prorl_zmq.system.run_folder import own_run_dir

if TYPE_CHECKING:
    from collections.abc import Iterator


def is_unused(folder: Path) -> bool:
    with unused_copy(folder) as found:
        return found


@contextmanager
def without_rights() -> Iterator[None]:
    """What follows may not open files that others may not."""
    account = os.geteuid()
    if account == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(account)


def found_in(folder: Path) -> list[Leftover]:
    return find_leftovers([folder], folder / "images", folder / "unpacked", folder / "programs", Wanted())


def test_a_folder_where_no_copy_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = write_checkpoint(tmp_path / "served", model())

    def check(folder: Path, like: Path) -> None:
        with used_copy(folder, str(like), tmp_path):
            pass

    check(tmp_path / "disk" / "copy", served)
    check(tmp_path / "disk" / "copy", tmp_path / "a hub's name")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    for folder, problem in (("file/copy", "Not a directory"), ("mine", "files that are no copy of weights")):
        with pytest.raises(ConfigError, match=f"{problem}.*give another `weights_dir`") as caught:
            check(tmp_path / folder, served)
        assert caught.value.fields == {"key": "weights_dir"}
    monkeypatch.setattr(copy_folder.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match="No space left on device: the model has"):
        check(tmp_path / "disk" / "copy", served)
    shutil.copytree(served, tmp_path / "disk" / "copy", dirs_exist_ok=True)
    check(tmp_path / "disk" / "copy", served)  # in place of the copy that is there


def test_a_backend_without_a_model_needs_no_known_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_checkpoint(tmp_path / "served", model()))
    monkeypatch.setattr(copy_folder.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with used_copy(tmp_path / "copy", "", tmp_path):
        assert not is_unused(tmp_path / "copy")


def test_hosts_share_a_copy_that_a_run_folder_links_to(tmp_path: Path) -> None:
    copy, run_dir = tmp_path / "disk" / "weights" / "policy", tmp_path / "run"
    run_dir.mkdir()
    with used_copy(copy, "", run_dir):
        with used_copy(copy, "", run_dir):
            assert not is_unused(copy)
        assert not is_unused(copy)
    assert is_unused(copy)
    for folder in (run_dir, copy, tmp_path / "disk"):
        assert find_copies(folder) == [copy]
    assert find_copies(tmp_path) == []
    shutil.rmtree(copy)
    assert find_copies(run_dir) == []


def test_a_host_makes_a_copy_again_that_is_removed_while_it_locks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed_meanwhile(file: int, kind: int) -> None:
        monkeypatch.setattr(copy_folder.fcntl, "flock", flock)
        shutil.rmtree(tmp_path / "copy")
        flock(file, kind)

    flock = fcntl.flock
    monkeypatch.setattr(copy_folder.fcntl, "flock", removed_meanwhile)
    with used_copy(tmp_path / "copy", "", tmp_path):
        assert (tmp_path / "copy" / SYNC / LOCKS[0]).is_file()
        assert not is_unused(tmp_path / "copy")


def test_a_copy_on_nfs_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux has locks there only of files that are opened for reading (shared) or for writing (exclusive)."""

    def nfs(file: int, how: int) -> None:
        mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        if mode == (os.O_WRONLY if how & fcntl.LOCK_SH else os.O_RDONLY):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, how)

    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", nfs)
    version = write_checkpoint(tmp_path / "version", model())
    copy = LocalCopy(tmp_path / "copy", None, threads=1)
    with used_copy(copy.folder, "", tmp_path):
        copy.fetch(version, Content(1))
        with copy.reading(Content(1)) as folder:
            assert_same(read_copy(folder), model())
        assert not is_unused(copy.folder)
    assert is_unused(copy.folder)


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_that_is_a_pipe_is_refused(tmp_path: Path, lock: str) -> None:
    (tmp_path / "copy" / SYNC).mkdir(parents=True)
    os.mkfifo(tmp_path / "copy" / SYNC / lock)
    expected = pytest.raises((ConfigError, EngineFailed), match=r"no regular file.*give another `weights_dir`")
    with expected, used_copy(tmp_path / "copy", "", tmp_path):
        LocalCopy(tmp_path / "copy", None).fetch(tmp_path / "weight_v000001", Content(1))


def test_a_copy_that_another_machine_may_use_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "weights" / "policy"
    with used_copy(copy, "", tmp_path):
        (used,) = found_in(tmp_path)
    (unused,) = found_in(tmp_path)
    monkeypatch.setattr(copy_folder, "file_system_of", lambda _: "nfs4")
    (shared,) = found_in(tmp_path)
    assert (used.kept, unused.kept) == (leftovers.USED, "")
    assert "it is on nfs4, where another machine's engine may use it" in shared.kept


def test_a_removal_leaves_the_copy_that_a_host_makes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, removed = tmp_path / "weights" / "policy", []

    def remove(path: Path) -> None:
        assert path != copy
        with used_copy(copy, "", tmp_path):
            shutil.rmtree(path)
            removed.append(path)
            assert not is_unused(copy)

    with used_copy(copy, "", tmp_path):
        pass
    monkeypatch.setattr(leftovers, "remove", remove)
    (found,) = found_in(tmp_path / "weights" / "policy")
    assert not found.kept
    found.remove()
    assert removed
    assert find_copies(tmp_path) == [copy]


def test_a_copy_stays_if_a_service_starts_in_its_run_folder_after_it_was_found(tmp_path: Path) -> None:
    run_dir = own_run_dir(tmp_path / "run")
    copy = run_dir / "weights" / "policy"
    (copy / SYNC).mkdir(parents=True)
    (found,) = found_in(copy)
    assert not found.kept
    with (run_dir / "serve.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(EndpointInUse, match="a process of a service uses it"):
            found.remove()
    assert (copy / SYNC).is_dir()


def test_copies_that_cannot_be_looked_at_stay() -> None:
    with tempfile.TemporaryDirectory() as name:
        disk = Path(name)
        disk.chmod(0o755)
        copies = {each: disk / "weights" / each for each in ("locked", "pipe", "folder", "mine")}
        for copy in copies.values():
            (copy / SYNC).mkdir(parents=True)
        (copies["locked"] / SYNC / LOCKS[0]).touch(0o000)
        os.mkfifo(copies["pipe"] / SYNC / LOCKS[0])
        (copies["pipe"] / SYNC / LOCKS[0]).chmod(0o666)
        (copies["folder"] / SYNC / LOCKS[0]).mkdir()
        for lock in LOCKS:
            (copies["mine"] / SYNC / lock).touch()
            (copies["mine"] / SYNC / lock).chmod(0o666)
        closed = disk / "closed" / "weights" / "policy"
        (closed / SYNC).mkdir(parents=True)
        (disk / "copies").mkdir()
        (disk / "copies" / "link").symlink_to(closed)
        (disk / "closed").chmod(0o000)
        with without_rights():
            kept = {each.path: each.kept for each in found_in(disk)}
        (disk / "closed").chmod(0o755)
    reasons = {
        closed: "Permission denied",
        copies["locked"]: "Permission denied",
        copies["pipe"]: "it is no regular file",
        copies["folder"]: "Is a directory",
        copies["mine"]: "",
    }
    assert kept.keys() == reasons.keys()
    for path, reason in reasons.items():
        assert reason in kept[path]
        assert bool(kept[path]) == bool(reason)
