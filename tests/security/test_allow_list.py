from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import zmq
from key_folders import LET_IN, KeyFolders
from zmq.utils import z85

from prorl_zmq.security.allow_list import AllowList
from prorl_zmq.security.keyring import BROKER, WORKER, Keyring
from prorl_zmq.security.keys import KeyFolder
from prorl_zmq.security.rights import ANYBODY, CONNECTING_ROLES, Listener
from prorl_zmq.wire.messages.backends import AllowedKey
from prorl_zmq.wire.messages.base import KeyRole

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folders(tmp_path: Path) -> KeyFolders:
    return KeyFolders(tmp_path)


@pytest.fixture
def allow_list(folders: KeyFolders) -> AllowList:
    return AllowList(Keyring.load(folders.service.path, BROKER))


def public(folder: Path) -> str:
    return KeyFolder(folder).own(*KeyRole).public_key


def comes(allow_list: AllowList, listener: Listener, key: str) -> bool:
    return allow_list.judge(listener, "192.0.2.1", b"CURVE", [z85.decode(key)]).user_id == key


@pytest.mark.parametrize("listener", Listener)
@pytest.mark.parametrize("name", LET_IN)
def test_a_key_comes_in_by_the_doors_of_its_role(
    allow_list: AllowList, folders: KeyFolders, name: str, listener: Listener
) -> None:
    assert comes(allow_list, listener, public(folders[name])) == (LET_IN[name] in CONNECTING_ROLES[listener])


@pytest.mark.parametrize("listener", Listener)
def test_who_is_not_on_the_list_comes_in_nowhere_but_where_names_are_secret(
    allow_list: AllowList, listener: Listener
) -> None:
    assert (listener == Listener.BLOCKS) == comes(allow_list, listener, zmq.curve_keypair()[0].decode())


@pytest.mark.parametrize(
    ("mechanism", "credentials"), [(b"NULL", []), (b"PLAIN", [b"a", b"b"]), (b"CURVE", []), (b"CURVE", [b"short"])]
)
def test_only_a_key_is_a_key(allow_list: AllowList, mechanism: bytes, credentials: list[bytes]) -> None:
    assert allow_list.judge(Listener.FRONT_DOOR, "127.0.0.1", mechanism, credentials).user_id is None


def test_the_list_is_as_its_folder_is_now(allow_list: AllowList, folders: KeyFolders) -> None:
    alice, before = public(folders["alice"]), allow_list.list_state
    folders.service.revoke("alice")
    assert not comes(allow_list, Listener.FRONT_DOOR, alice)
    sender = allow_list.sender(alice)
    assert (sender.name, sender.revoked) == ("alice", True)
    assert (
        allow_list.judge(Listener.FRONT_DOOR, "", b"CURVE", [z85.decode(alice)]).reason
        == "the key alice is not allowed"
    )
    assert allow_list.list_state != before
    folders.service.allow(folders["alice"] / "alice.pub", KeyRole.OPERATOR)
    assert comes(allow_list, Listener.FRONT_DOOR, alice)
    sender = allow_list.sender(alice)
    assert (sender.name, sender.role, sender.revoked) == ("alice", KeyRole.OPERATOR, False)


def test_one_bad_file_costs_nobody_else_anything(
    allow_list: AllowList, folders: KeyFolders, caplog: pytest.LogCaptureFixture
) -> None:
    bad = folders.service.path / "allowed" / "bad.pub"
    bad.write_text("what")
    assert comes(allow_list, Listener.FRONT_DOOR, public(folders["alice"]))
    assert "bad.pub is not a key file" in caplog.text


def test_a_service_that_somebody_wrote_into_the_list_is_none(allow_list: AllowList, folders: KeyFolders) -> None:
    folders.make("mallory", KeyRole.SERVICE)
    (folders.service.path / "allowed" / "mallory.pub").write_bytes((folders["mallory"] / "mallory.pub").read_bytes())
    assert not comes(allow_list, Listener.STAGE_INBOX, public(folders["mallory"]))


def test_a_list_that_cannot_be_read_stays_as_it_was(
    allow_list: AllowList, folders: KeyFolders, caplog: pytest.LogCaptureFixture
) -> None:
    place = folders.service.path / "allowed"
    place.rename(place.with_name("elsewhere"))
    place.touch()  # what is not a folder cannot be listed, not even by root
    assert comes(allow_list, Listener.FRONT_DOOR, public(folders["alice"]))
    assert "the list of keys stays as it was" in caplog.text


def test_an_engine_host_of_another_node_is_told_the_list(allow_list: AllowList, folders: KeyFolders) -> None:
    folders.make("gpu-8", KeyRole.STAGE)
    folders.service.allow(folders["gpu-8"] / "gpu-8.pub", KeyRole.STAGE)
    allow_list.reread()
    host = AllowList(Keyring.load(folders["gpu-7"], WORKER))
    other = public(folders["gpu-8"])
    assert host.is_told
    assert not host.list_state
    assert not comes(host, Listener.ENGINE, other)
    assert comes(host, Listener.ENGINE, public(folders["gpu-7"]))  # its own node's stage processes
    assert comes(host, Listener.STAGE_INBOX, public(folders.service.path))
    host.learn(allow_list.listed(), allow_list.list_state)
    assert host.list_state == allow_list.list_state
    assert comes(host, Listener.ENGINE, other)
    assert not comes(host, Listener.ENGINE, public(folders["alice"])), "trainers ask the backend broker"
    assert not comes(host, Listener.STAGE_INBOX, other)
    folders.service.revoke("gpu-8")
    allow_list.reread()
    host.learn(allow_list.listed(), allow_list.list_state)
    assert host.sender(other).revoked


def test_no_list_makes_another_key_the_services(folders: KeyFolders) -> None:
    host = AllowList(Keyring.load(folders["gpu-7"], WORKER))
    host.learn([AllowedKey("alice", KeyRole.SERVICE, public(folders["alice"]))], "1")
    assert not comes(host, Listener.STAGE_INBOX, public(folders["alice"]))


@pytest.mark.parametrize(
    ("address", "insecure", "let_in"),
    [
        ("127.0.0.1", False, True),
        ("127.1.2.3", False, True),
        ("::1", False, True),
        ("192.0.2.1", False, False),
        ("", False, False),
        ("192.0.2.1", True, True),
    ],
)
def test_without_keys_the_address_decides(address: str, insecure: bool, let_in: bool) -> None:
    allow_list = AllowList(None, insecure=insecure)
    verdict = allow_list.judge(Listener.FRONT_DOOR, address, b"NULL", [])
    assert (verdict.user_id == "") == let_in
    assert allow_list.judge(Listener.FRONT_DOOR, address, b"CURVE", [b"k" * 32]).user_id is None
    assert allow_list.sender("") == ANYBODY
