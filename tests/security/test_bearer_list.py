from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest

from prorl_zmq.errors import ConfigError, NotAllowed
from prorl_zmq.security import bearer_list
from prorl_zmq.security.bearer_list import BearerList
from prorl_zmq.security.keys import KeyFolder
from prorl_zmq.wire.messages.base import KeyRole

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    return KeyFolder(tmp_path / "keys")


def test_a_token_lets_in_who_has_it_and_is_kept_nowhere(folder: KeyFolder) -> None:
    token = folder.new_bearer("alice", KeyRole.TRAINER)
    sender = BearerList(folder).sender(token)
    assert (sender.name, sender.role, sender.revoked) == ("alice", KeyRole.TRAINER, False)
    (path,) = (folder.path / "allowed").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert token not in path.read_text()
    assert token != folder.new_bearer("bob", KeyRole.TRAINER)


@pytest.mark.parametrize("token", ["", "wrong", "\udcff"])
def test_no_other_is_let_in(folder: KeyFolder, token: str) -> None:
    folder.new_bearer("alice", KeyRole.TRAINER)
    with pytest.raises(NotAllowed, match="prorl keys bearer"):
        BearerList(folder).sender(token)


def test_the_list_is_as_its_folder_is_now(folder: KeyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bearer_list, "REREAD_S", 0.0)
    token = folder.new_bearer("alice", KeyRole.TRAINER)
    known = BearerList(folder)
    later = folder.new_bearer("bob", KeyRole.OPERATOR)
    assert known.sender(later).name == "bob"
    folder.revoke("alice")
    with pytest.raises(NotAllowed):
        known.sender(token)


def test_a_file_that_is_none_is_told_and_keeps_nobody_out(folder: KeyFolder, caplog: pytest.LogCaptureFixture) -> None:
    token = folder.new_bearer("alice", KeyRole.TRAINER)
    (folder.path / "allowed" / "bad.bearer").write_text("?")
    assert BearerList(folder).sender(token).name == "alice"
    assert "bad.bearer is not a key file" in caplog.text


@pytest.mark.parametrize(("name", "role"), [("a", KeyRole.STAGE), ("a", KeyRole.SERVICE), ("../a", KeyRole.TRAINER)])
def test_what_cannot_be_a_token(folder: KeyFolder, name: str, role: KeyRole) -> None:
    with pytest.raises(ConfigError):
        folder.new_bearer(name, role)


def test_a_token_is_never_overwritten(folder: KeyFolder) -> None:
    folder.new_bearer("alice", KeyRole.TRAINER)
    with pytest.raises(ConfigError, match="never overwritten"):
        folder.new_bearer("alice", KeyRole.OPERATOR)


def test_a_list_in_a_folder_that_others_may_change_is_not_used(folder: KeyFolder) -> None:
    folder.new_bearer("alice", KeyRole.TRAINER)
    folder.path.chmod(0o777)
    with pytest.raises(ConfigError, match="others can change"):
        BearerList(folder)
