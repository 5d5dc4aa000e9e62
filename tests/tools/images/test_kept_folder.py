from __future__ import annotations

import os
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest

from prorl_zmq.errors import SandboxFailed
from prorl_zmq.tools.images.kept_folder import locked, remove

from .conftest import needs_root, python_as_user

if TYPE_CHECKING:
    from pathlib import Path


REMOVE = "import sys, pathlib; from prorl_zmq.tools.images.kept_folder import remove; remove(pathlib.Path(sys.argv[1]))"


def test_waiting_has_a_limit_and_says_for_whom(tmp_path: Path) -> None:
    said: list[str] = []
    with locked(tmp_path / "a", wait_s=1, say=said.append):
        late = pytest.raises(SandboxFailed, match=f"process {os.getpid()} still holds .* after 0.1 s")
        with late, locked(tmp_path / "a", wait_s=0.1, say=said.append):
            pass
        assert said == [f"process {os.getpid()} builds it at the moment; waiting for it to end"]
    with locked(tmp_path / "a", wait_s=0, say=said.append):
        assert len(said) == 1


def test_what_a_killed_builder_started_keeps_the_lock(tmp_path: Path) -> None:
    with locked(tmp_path / "a", wait_s=1, say=print) as folder:
        orphan = subprocess.Popen(["sleep", "600"], pass_fds=(folder.descriptor,))
    with pytest.raises(SandboxFailed, match="still holds"), locked(tmp_path / "a", wait_s=0.1, say=print):
        pass
    orphan.kill()
    orphan.wait()
    with locked(tmp_path / "a", wait_s=1, say=print):
        pass


def test_a_folder_that_is_removed_while_somebody_waits_is_made_anew(tmp_path: Path) -> None:
    waits = threading.Event()
    held = threading.Event()

    def wait() -> None:
        with locked(tmp_path / "a", wait_s=20, say=lambda _: waits.set()) as folder:
            held.set()
            (folder.path / "mine").touch()

    waiter = threading.Thread(target=wait)
    with locked(tmp_path / "a", wait_s=1, say=print) as folder:
        waiter.start()
        assert waits.wait(20)
        folder.remove_if_empty()
        assert not (tmp_path / "a").exists()
        assert not held.is_set()
    waiter.join(20)
    assert {each.name for each in (tmp_path / "a").iterdir()} == {"lock", "mine"}


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    with locked(tmp_path / "a", wait_s=1, say=print) as folder:
        for name in ("building-1", "trash-2", "3"):
            (folder.path / name / "deep").mkdir(parents=True)
        folder.clear()
        assert {each.name for each in folder.path.iterdir()} == {"lock", "3"}


@needs_root
def test_a_user_removes_folders_that_may_not_be_written(user_folder: Path) -> None:
    (user_folder / "tiny" / "bin").chmod(0)
    (user_folder / "tiny").chmod(0o500)
    done = python_as_user(user_folder, "-c", REMOVE, str(user_folder / "tiny"))
    assert done.returncode == 0, done.stderr
    assert not (user_folder / "tiny").exists()


@needs_root
def test_what_a_user_cannot_remove_is_said(user_folder: Path) -> None:
    (user_folder / "tiny" / "others").mkdir(0o700)
    (user_folder / "tiny" / "others" / "file").write_text("root's")
    done = python_as_user(user_folder, "-c", REMOVE, str(user_folder / "tiny"))
    assert "cannot be removed" in done.stderr
    assert "Permission denied" in done.stderr


def test_what_is_not_there_is_removed_already(tmp_path: Path) -> None:
    remove(tmp_path / "none")
