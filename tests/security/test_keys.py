from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest
import zmq

from prorl_zmq.errors import ConfigError
from prorl_zmq.security.keyring import BROKER, CLIENT, WORKER, Keyring
from prorl_zmq.security.keys import KeyFolder, default_folder, named_folder
from prorl_zmq.system.logs import one_line
from prorl_zmq.wire.messages.base import KeyRole

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    return KeyFolder(tmp_path / "keys")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_files_are_made_with_their_modes_whatever_the_umask(folder: KeyFolder, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder.new("alice", KeyRole.TRAINER)
        folder.allow(folder.path / "alice.pub", KeyRole.TRAINER)
    finally:
        os.umask(before)
    assert mode(folder.path / "alice.secret") == 0o600
    assert mode(folder.path / "alice.pub") == 0o644
    assert mode(folder.path / "allowed" / "alice.pub") == 0o644
    assert (mode(folder.path), mode(folder.path / "allowed")) == (0o700, 0o700)
    assert sorted(path.name for path in folder.path.iterdir()) == ["alice.pub", "alice.secret", "allowed"]


def test_a_key_pair_is_one(folder: KeyFolder) -> None:
    public = folder.new("alice", KeyRole.TRAINER)
    own = folder.own(KeyRole.TRAINER)
    assert own.public == public
    assert zmq.curve_public(own.secret_key.encode()).decode() == public.public_key


def test_a_secret_is_in_no_text(folder: KeyFolder) -> None:
    folder.new("alice", KeyRole.TRAINER)
    own = folder.own(KeyRole.TRAINER)
    assert own.secret_key not in f"{own} {own!r} {[own]}"
    assert own.secret_key not in one_line(f"a server quotes {own.secret_key}")


@pytest.mark.parametrize("wrong", [0o640, 0o604, 0o660, 0o644, 0o620])
def test_a_secret_that_others_can_read_is_not_used(folder: KeyFolder, wrong: int) -> None:
    folder.new("alice", KeyRole.TRAINER)
    path = folder.path / "alice.secret"
    path.chmod(wrong)
    with pytest.raises(
        ConfigError, match=f"alice.secret can be read by others .mode 0{wrong:o}.*: chmod 600 "
    ) as caught:
        folder.own(KeyRole.TRAINER)
    assert caught.value.key == "security.keys"


@pytest.mark.parametrize("wrong", [0o770, 0o702, 0o777])
def test_a_folder_that_others_can_change_is_not_used(folder: KeyFolder, wrong: int) -> None:
    folder.new("alice", KeyRole.TRAINER)
    folder.path.chmod(wrong)
    for use in (lambda: folder.own(KeyRole.TRAINER), folder.listing, lambda: folder.new("bob", KeyRole.TRAINER)):
        with pytest.raises(ConfigError, match=r"others can change .*: chmod 700 "):
            use()


def test_nothing_is_overwritten(folder: KeyFolder) -> None:
    folder.new("alice", KeyRole.TRAINER)
    before = {path: path.read_bytes() for path in folder.path.iterdir()}
    with pytest.raises(ConfigError, match="is there already"):
        folder.new("alice", KeyRole.OPERATOR)
    (folder.path / "alice.pub").rename(folder.path.parent / "alice.pub")
    with pytest.raises(ConfigError, match="is there already"):
        folder.new("alice", KeyRole.OPERATOR)
    (folder.path.parent / "alice.pub").rename(folder.path / "alice.pub")
    assert {path: path.read_bytes() for path in folder.path.iterdir()} == before


def test_a_key_is_let_in_once_and_in_the_role_that_it_is_given(folder: KeyFolder) -> None:
    folder.new("mallory", KeyRole.OPERATOR)  # says so itself
    file = folder.path / "mallory.pub"
    assert folder.allow(file, KeyRole.TRAINER).role == KeyRole.TRAINER
    assert [key.role for key in folder.allowed()] == [KeyRole.TRAINER]
    with pytest.raises(ConfigError, match=r"allowed already, as mallory \(trainer\)"):
        folder.allow(file, KeyRole.OPERATOR)
    other = KeyFolder(folder.path.parent / "other")
    other.new("mallory", KeyRole.TRAINER)
    with pytest.raises(ConfigError, match="is there already"):
        folder.allow(other.path / "mallory.pub", KeyRole.TRAINER)
    folder.revoke("mallory")
    assert folder.allowed() == []
    with pytest.raises(ConfigError, match="no key called mallory is allowed; allowed keys: none"):
        folder.revoke("mallory")


def test_no_key_is_let_in_as_a_service(folder: KeyFolder) -> None:
    folder.new("alice", KeyRole.TRAINER)
    with pytest.raises(ConfigError, match="a service key is not added to a list: it checks the others"):
        folder.allow(folder.path / "alice.pub", KeyRole.SERVICE)


def test_a_secret_is_not_taken_for_a_public_key(folder: KeyFolder) -> None:
    folder.new("alice", KeyRole.TRAINER)
    with pytest.raises(ConfigError, match="holds a secret key") as caught:
        folder.allow(folder.path / "alice.secret", KeyRole.TRAINER)
    assert folder.own(KeyRole.TRAINER).secret_key not in str(caught.value)


@pytest.mark.parametrize("name", ["", "../alice", "a/b", ".hidden", "a\nb", "ä", "x" * 129, "-rf"])
def test_a_name_is_a_file_of_the_folder(folder: KeyFolder, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a key's name"):
        folder.new(name, KeyRole.TRAINER)
    with pytest.raises(ConfigError, match="cannot be a key's name"):
        folder.revoke(name)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"name = 'a'\n",
        b'name = "a"\nrole = "trainer"\npublic_key = "short"\n',
        b'name = "../a"\nrole = "trainer"\npublic_key = "' + b"a" * 40 + b'"\n',
        b'name = "a"\nrole = "king"\npublic_key = "' + b"a" * 40 + b'"\n',
        b'name = "a"\nrole = "trainer"\npublic_key = "' + b"a" * 40 + b'"\nmore = 1\n',
        b"x" * 100_000,
    ],
)
def test_what_is_no_key_file_is_refused_by_its_name(folder: KeyFolder, content: bytes) -> None:
    file = folder.path.parent / "strange.pub"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"strange\.pub is not a key file"):
        folder.allow(file, KeyRole.TRAINER)


def test_halves_of_two_keys_are_not_one(folder: KeyFolder) -> None:
    folder.new("alice", KeyRole.TRAINER)
    path = folder.path / "alice.secret"
    public, _ = zmq.curve_keypair()
    path.write_text(path.read_text().replace(folder.own(KeyRole.TRAINER).public_key, public.decode()))
    with pytest.raises(ConfigError, match="do not belong together"):
        folder.own(KeyRole.TRAINER)


def test_a_process_takes_the_first_role_that_there_is_a_key_of(folder: KeyFolder) -> None:
    folder.new("service", KeyRole.SERVICE)
    assert folder.own(*CLIENT).name == folder.own(*WORKER).name == folder.own(*BROKER).name == "service"
    folder.new("gpu-7", KeyRole.STAGE)
    folder.new("alice", KeyRole.TRAINER)
    assert [folder.own(*roles).name for roles in (CLIENT, WORKER, BROKER)] == ["alice", "gpu-7", "service"]
    folder.new("bob", KeyRole.TRAINER)
    with pytest.raises(ConfigError, match=r"several keys of role trainer \(alice.secret, bob.secret\)"):
        folder.own(*CLIENT)
    assert KeyFolder(folder.path / "bob.secret").own(*CLIENT).name == "bob"


def test_what_is_missing_is_said(folder: KeyFolder) -> None:
    with pytest.raises(ConfigError, match="cannot be used: No such file or directory; `prorl keys new` makes one"):
        folder.own(*CLIENT)
    folder.new("alice", KeyRole.TRAINER)
    with pytest.raises(ConfigError, match="no key of role service; make one with `prorl keys new NAME --role service`"):
        Keyring.load(folder.path, BROKER)
    with pytest.raises(ConfigError, match=r"lacks the service's public key; copy service\.pub"):
        Keyring.load(folder.path, CLIENT)
    for name in ("one", "two"):
        service = KeyFolder(folder.path.parent / name)
        service.new(name, KeyRole.SERVICE)
        (folder.path / f"{name}.pub").write_bytes((service.path / f"{name}.pub").read_bytes())
    with pytest.raises(ConfigError, match=r"public keys of several services \(one.pub, two.pub\)"):
        Keyring.load(folder.path, CLIENT)


def test_which_folder_is_meant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PRORL_KEYS", raising=False)
    assert named_folder() is None
    assert Keyring.load(None, CLIENT) is None
    assert default_folder() == tmp_path / ".config" / "prorl" / "keys"
    monkeypatch.setenv("PRORL_KEYS", "~/mine")
    assert named_folder() == default_folder() == tmp_path / "mine"
    assert named_folder("/other") != tmp_path / "mine"


def test_a_public_key_says_no_more_than_it_must(folder: KeyFolder) -> None:
    key = folder.new("alice", KeyRole.TRAINER)
    text = (folder.path / "alice.pub").read_text()
    assert text == f'name = "alice"\nrole = "trainer"\npublic_key = "{key.public_key}"\n'
    assert folder.own(KeyRole.TRAINER).secret_key not in text
