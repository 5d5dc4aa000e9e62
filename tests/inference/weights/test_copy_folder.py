"""The folder of a copy of weights: where none can be made, and whether a host uses it."""

from __future__ import annotations

import fcntl
import shutil
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING

import pytest
from support.weight_versions import model, write_checkpoint

from prorl_zmq.errors import ConfigError
from prorl_zmq.inference.weights import copy_folder
from prorl_zmq.inference.weights.copy_folder import LOCKS, SYNC, find_copies, unused_copy, used_copy
from prorl_zmq.service import leftovers
from prorl_zmq.service.leftovers import Leftover, Wanted, find_leftovers

if TYPE_CHECKING:
    from pathlib import Path


def is_unused(folder: Path) -> bool:
    with unused_copy(folder) as found:
        return found


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
    def removed_meanwhile(file: IO[str], kind: int) -> None:
        monkeypatch.setattr(copy_folder.fcntl, "flock", flock)
        shutil.rmtree(tmp_path / "copy")
        flock(file, kind)

    flock = fcntl.flock
    monkeypatch.setattr(copy_folder.fcntl, "flock", removed_meanwhile)
    with used_copy(tmp_path / "copy", "", tmp_path):
        assert (tmp_path / "copy" / SYNC / LOCKS[0]).is_file()
        assert not is_unused(tmp_path / "copy")


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
