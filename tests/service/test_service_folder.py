"""The folder of a service: its keys, where brokers are, who may hold it, and what it is refused for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.errors import ConfigError, EndpointInUse, RequestTimeout
from prorl_zmq.security.keyring import BROKER, CLIENT, WORKER, Keyring
from prorl_zmq.service.service_folder import BACKENDS, LOCK, MARKER, TOPOLOGY, ServiceFolder
from prorl_zmq.wire.messages.base import KeyRole

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> ServiceFolder:
    return ServiceFolder.create(tmp_path / "service")


def announce_all(folder: ServiceFolder) -> None:
    for name in folder.rollout_brokers:
        folder.announce("rollout", name, {"front_door": f"tcp://h:{name[-1]}", "stage_events": "tcp://h:2"})
    folder.announce("backend", BACKENDS, {"endpoint": "tcp://h:3"})


def test_its_keys_fit_each_other(folder: ServiceFolder) -> None:
    service = Keyring.load(folder.keys("service"), BROKER)
    node, client = Keyring.load(folder.keys("node"), WORKER), Keyring.load(folder.keys("client"), CLIENT)
    operator = Keyring.load(folder.keys("operator"), CLIENT)
    assert service is not None
    assert node is not None
    assert client is not None
    assert operator is not None
    assert {one.service_key for one in (node, client, operator)} == {service.own.public_key}
    let_in = {key.public_key: key.role for key in service.folder.allowed()}
    assert let_in == {
        node.own.public_key: KeyRole.STAGE,
        client.own.public_key: KeyRole.TRAINER,
        operator.own.public_key: KeyRole.OPERATOR,
    }
    assert [path for path in folder.path.rglob("*") if path.is_dir() and path.stat().st_mode & 0o077] == []


def test_what_is_announced_is_found_by_others(folder: ServiceFolder) -> None:
    other = ServiceFolder.open(folder.path)
    assert other.broker_endpoints() == {}
    assert other.front_door("a") == other.backend_broker() == ""
    announce_all(folder)
    assert other.wait_for_brokers(0.0) == {
        "rollout-0": {"front_door": "tcp://h:0", "stage_events": "tcp://h:2"},
        BACKENDS: {"endpoint": "tcp://h:3"},
    }
    assert other.stage_events() == {"rollout-0": "tcp://h:2"}
    assert other.front_door("a") == "tcp://h:0"
    assert other.backend_broker("another life") == ""
    folder.announce("backend", BACKENDS, {"endpoint": "tcp://h:4"})
    assert other.backend_broker() == "tcp://h:4"


def test_brokers_are_waited_for(folder: ServiceFolder) -> None:
    with pytest.raises(RequestTimeout, match=r"no broker called rollout-0, backends .*`prorl serve --service"):
        folder.wait_for_brokers(0.0)
    thread = threading.Thread(target=announce_all, args=(folder,))
    thread.start()
    assert len(folder.wait_for_brokers(20.0)) == 2
    thread.join()


@given(st.integers(1, 8), st.lists(st.uuids(), min_size=1))
def test_a_session_stays_with_its_broker(count: int, sessions: list[object]) -> None:
    folder = ServiceFolder.__new__(ServiceFolder)
    folder.rollout_brokers = tuple(f"rollout-{number}" for number in range(count))
    for session in map(str, sessions):
        broker = folder.broker_of(session)
        assert broker in folder.rollout_brokers
        fewer = ServiceFolder.__new__(ServiceFolder)
        fewer.rollout_brokers = tuple(name for name in folder.rollout_brokers if name in (broker, "rollout-0"))
        assert fewer.broker_of(session) == broker  # the others do not matter


def test_sessions_are_spread_over_all_brokers(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text("[service]\nrollout_brokers = 4\n")
    folder = ServiceFolder.create(tmp_path / "service", tmp_path / "t.toml")
    counts = Counter(folder.broker_of(f"session-{number}") for number in range(4000))
    assert len(counts) == 4
    assert min(counts.values()) > 850


def test_one_service_holds_it(folder: ServiceFolder) -> None:
    other = ServiceFolder.open(folder.path)
    with folder.held() as lock:
        assert not lock.is_lost()
        with pytest.raises(EndpointInUse, match=rf"process {os.getpid()} on .*--take-over"), other.held():
            pass
        with other.held(take_over=True) as taken:
            assert lock.is_lost()
            assert not taken.is_lost()
    with other.held():
        pass
    assert (folder.path / LOCK).exists()
    with folder.held():
        (folder.path / LOCK).write_bytes(b"\xff")
        with pytest.raises(EndpointInUse, match="another service runs"), other.held():
            pass


def test_what_goes_wrong_while_it_is_held_is_told_as_it_is(folder: ServiceFolder) -> None:
    with pytest.raises(EndpointInUse) as caught, folder.held():
        raise EndpointInUse("the run folder is in use")
    assert caught.value.message == "the run folder is in use"


def test_two_that_make_it_at_once_make_one(tmp_path: Path) -> None:
    path = tmp_path / "service"
    path.mkdir(mode=0o700)
    with ServiceFolder(path, 1).held(), pytest.raises(EndpointInUse, match=rf"process {os.getpid()} on"):
        ServiceFolder.create(path)
    ServiceFolder.create(path)
    secret = path / "keys" / "service" / "service.secret"
    before = secret.read_bytes()
    assert len(ServiceFolder.create(path).rollout_brokers) == 1  # it had seen no service there
    assert secret.read_bytes() == before


def test_a_killed_holder_leaves_it_free(folder: ServiceFolder) -> None:
    code = (
        "import sys, time, pathlib; from prorl_zmq.service.service_folder import ServiceFolder\n"
        f"with ServiceFolder.open(pathlib.Path({str(folder.path)!r})).held(): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(EndpointInUse), folder.held():
            pass
        holder.kill()
        holder.wait()
    with folder.held():
        pass


def test_a_topology_that_is_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "service"
    path.mkdir(mode=0o700)
    (path / TOPOLOGY).write_text("[service]\nrollout_brokers = 3\n")
    assert len(ServiceFolder.create(path).rollout_brokers) == 3
    assert len(ServiceFolder.open(path).rollout_brokers) == 3


def test_the_number_of_brokers_is_fixed(folder: ServiceFolder) -> None:
    (folder.path / TOPOLOGY).write_text("[service]\nrollout_brokers = 3\n")
    with pytest.raises(ConfigError, match="is 3, and the folder was made for 1") as caught:
        ServiceFolder.open(folder.path).topology()
    assert caught.value.key == "service.rollout_brokers"


def test_a_folder_that_is_unfit_is_refused(folder: ServiceFolder, tmp_path: Path) -> None:
    path = folder.path
    path.chmod(0o750)
    with pytest.raises(ConfigError, match=rf"others can read or change {path} \(mode 0750\).*chmod 700 {path}"):
        ServiceFolder.open(path)
    path.chmod(0o700)
    (path / MARKER).write_text("schema = 2\nrollout_brokers = 1\nmade_by = ''\nversion = '9.9'\n")
    with pytest.raises(ConfigError, match=r"made by prorl-zmq 9\.9 in another form"):
        ServiceFolder.open(path)
    for wrong in ("schema = 'x'", "schema = 1\nrollout_brokers = 0\nmade_by = ''\nversion = '9.9'\n"):
        (path / MARKER).write_text(wrong)
        with pytest.raises(ConfigError, match="is not what prorl-zmq wrote"):
            ServiceFolder.open(path)
    for unfit in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="is not a service's folder: `prorl serve --service"):
            ServiceFolder.open(unfit)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made a service's folder: File exists"):
        ServiceFolder.create(tmp_path / "file")
    (tmp_path / "full").mkdir(mode=0o700)
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"other things in it \(thesis\.tex\)"):
        ServiceFolder.create(tmp_path / "full")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_the_folder_of_another_user_is_refused(folder: ServiceFolder) -> None:
    os.chown(folder.path, 65534, -1)
    with pytest.raises(ConfigError, match=r"belongs to another user \(uid 65534\)"):
        ServiceFolder.open(folder.path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_is_said(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", tmp_path], check=False).returncode:
        pytest.skip("this root cannot mount file systems")
    try:
        folder = ServiceFolder.create(tmp_path / "service")
        with suppress(OSError), (tmp_path / "full").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with pytest.raises(ConfigError, match=r"backends\.json cannot be written: No space left"):
            folder.announce("backend", BACKENDS, {"endpoint": "tcp://127.0.0.1:1"})
        with pytest.raises(ConfigError, match="No space left"):
            ServiceFolder.create(tmp_path / "other")
        assert [path.name for path in (folder.path / "brokers").iterdir()] == []
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)
