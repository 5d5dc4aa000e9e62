"""A folder that one process uses, and that no other account has prepared."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from prorl_zmq.errors import ConfigError
from prorl_zmq.system.held_file import claim_folder

if TYPE_CHECKING:
    from pathlib import Path

NOBODY = 65534


def test_a_folder_is_made_and_one_claim_holds_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "weights"
    lock = claim_folder(folder, ".lock")
    with pytest.raises(BlockingIOError):
        claim_folder(folder, ".lock")
    os.close(lock)
    os.close(claim_folder(folder, ".lock"))


def test_a_link_in_the_place_of_the_lock_is_refused_and_what_it_names_stays(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_bytes(b"weights")
    folder = tmp_path / "weights"
    folder.mkdir(0o755)
    (folder / ".lock").symlink_to(checkpoint)
    with pytest.raises(ConfigError, match=r"\.lock is a link; remove it"):
        claim_folder(folder, ".lock")
    assert checkpoint.read_bytes() == b"weights"


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    folder.chmod(0o775)
    with pytest.raises(ConfigError, match=r"others may write to .*chmod go-w.*; name a folder of your own"):
        claim_folder(folder, ".lock")
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another account")
def test_a_folder_of_another_account_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir(0o755)
    os.chown(folder, NOBODY, -1)
    with pytest.raises(ConfigError, match=f"belongs to another user \\(uid {NOBODY}\\)"):
        claim_folder(folder, ".lock")
    assert list(folder.iterdir()) == []


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="is not a folder: it, or one above it, is a file"):
            claim_folder(folder, "lock")
    assert (tmp_path / "file").read_text() == "mine"
