"""A service whose three endpoints are TCP with CURVE: brokers here, its stage processes and engine host on "gpu-7"."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from key_folders import KeyFolders
from support import forks
from support.waiting import until

from prorl_zmq import AsyncRolloutClient, Job, RolloutClient, Sampling, errors
from prorl_zmq.brokers.backends.backend_broker import BackendBroker
from prorl_zmq.brokers.journal.journal import Journal
from prorl_zmq.brokers.rollout.rollout_broker import RolloutBroker
from prorl_zmq.config import (
    BackendBrokerSettings,
    RolloutBrokerSettings,
    SecuritySettings,
    ServiceSettings,
    Topology,
)
from prorl_zmq.inference.policy import Policy, PolicyShape
from prorl_zmq.inference.tokenizer import VOCABULARY_SIZE
from prorl_zmq.wire.messages.base import KeyRole

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.xdist_group("secured service")
WAIT_S = 60.0
START_S = 100.0
SHORT_S = 1.5
"""Time that a call is given which is not going to be answered."""


class Cluster:
    """Brokers in threads, and processes of another node that has its own keys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys = KeyFolders(folder / "keys")
        self._threads: list[tuple[Any, threading.Thread]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        secured = Topology(
            service=ServiceSettings(run_dir=str(folder)),
            security=SecuritySettings(str(self.keys.service.path)),
            rollout_broker=RolloutBrokerSettings(
                front_door="tcp://127.0.0.1:*", stage_events="tcp://127.0.0.1:*", heartbeat_s=0.2, lease_s=5.0
            ),
            backend_broker=BackendBrokerSettings(endpoint="tcp://127.0.0.1:*"),
        )
        backend_broker = BackendBroker(secured)
        self._serve(backend_broker)
        known = msgspec.structs.replace(secured, backend_broker=BackendBrokerSettings(backend_broker.endpoint))
        rollout_broker = RolloutBroker(known, Journal())
        self._serve(rollout_broker)
        self.front_door = rollout_broker.front_door
        self.backend_broker, self.stage_events = backend_broker.endpoint, rollout_broker.stage_events

    def start_node(self, keys: Path) -> None:
        for role in ("init", "run", "eval"):
            self.start_stage(keys, role)
        weights = self.folder / "old.npz"
        Policy.initial(PolicyShape(VOCABULARY_SIZE), 1).save(weights)  # quicker than the base policy
        place = ("--connect", self.backend_broker, "--name", "engine")
        self.start("prorl-engine", keys, "--model", str(weights), *place)

    def start_stage(self, keys: Path, role: str = "eval") -> subprocess.Popen[bytes]:
        arguments = ("--role", role, "--connect", self.stage_events, "--sandbox", "process")
        return self.start("prorl-stage", keys, *arguments)

    def start(self, program: str, keys: Path, *arguments: str) -> subprocess.Popen[bytes]:
        run_dir = str(self.folder / keys.name)
        place = ["--keys", str(keys), "--run-dir", run_dir, "--node", keys.name]
        with (self.folder / "log").open("ab") as log:
            process = forks.start("-m", "prorl_zmq.cli", program, *arguments, *place, stdout=log, stderr=log)
        self._processes.append(process)
        return process

    def client(self, name: str, **options: Any) -> RolloutClient:
        return RolloutClient(self.front_door, keys=self.keys[name], **{"timeout_s": WAIT_S, **options})

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def close(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for broker, thread in self._threads:
            broker.stop()
            thread.join(10)
            assert not thread.is_alive()

    def _serve(self, broker: Any) -> None:
        thread = threading.Thread(target=broker.run)
        thread.start()
        self._threads.append((broker, thread))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        cluster = Cluster(Path(folder))
        try:
            cluster.start_node(cluster.keys["gpu-7"])
            with cluster.client("olga") as client:
                until(lambda: len(client.status().stages) == 3 and client.backends.list(), "gpu-7", START_S)
            yield cluster
        finally:
            cluster.close()
            print(cluster.log())


def job(problem: str = "1 + 1") -> Job:
    return Job(task="math", instance={"problem": problem, "ground_truth": "2"}, sampling=Sampling(max_tokens=4, seed=1))


def test_a_trainers_job_goes_through(cluster: Cluster) -> None:
    with cluster.client("alice") as client:
        client.submit(job() for _ in range(4))
        ended = list(client.stream(timeout_s=WAIT_S))
    assert [trajectory.outcome for trajectory in ended] == ["completed"] * 4
    assert all(len(trajectory.token_ids) for trajectory in ended)


def test_the_keys_may_be_named_by_the_environment_or_as_a_file(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRORL_KEYS", str(cluster.keys["alice"]))
    with RolloutClient(cluster.front_door, timeout_s=WAIT_S) as client:
        assert client.status().stages
    monkeypatch.delenv("PRORL_KEYS")
    with RolloutClient(cluster.front_door, keys=cluster.keys["alice"] / "alice.secret", timeout_s=WAIT_S) as client:
        assert client.status().stages


def test_an_asynchronous_trainer_too(cluster: Cluster) -> None:
    async def main() -> list[str]:
        async with AsyncRolloutClient(cluster.front_door, keys=cluster.keys["alice"], timeout_s=WAIT_S) as client:
            await client.submit(job())
            return [trajectory.outcome async for trajectory in client.stream(timeout_s=WAIT_S)]

    assert asyncio.run(main()) == ["completed"]


def test_weights_reach_the_engine_host_of_another_node(cluster: Cluster) -> None:
    weights = cluster.folder / "new.npz"
    Policy.initial(PolicyShape(VOCABULARY_SIZE), 5).save(weights)
    with cluster.client("alice") as client:
        client.update_weights(weights, 3)
        assert [status.backend.weight_version for status in client.backends.list()] == [3]

    async def main() -> None:
        async with AsyncRolloutClient(cluster.front_door, keys=cluster.keys["olga"], timeout_s=WAIT_S) as client:
            await client.update_weights(weights, 4)

    asyncio.run(main())


# Who is not let in ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def strangers(cluster: Cluster) -> KeyFolders:
    """Those that are not let in: a trainer's key nobody knows, and one whose service's key is another's."""
    folders = cluster.keys
    folders.make("mallory", KeyRole.TRAINER)
    other = folders.make("other", KeyRole.SERVICE)
    folders.make("lost", KeyRole.TRAINER, service=other / "other.pub")
    return folders


REFUSALS = {
    "mallory": (
        errors.NotAllowed,
        r"refused the key mallory \(trainer\).*`prorl keys allow mallory.pub --role trainer`",
    ),
    "gpu-7": (errors.NotAllowed, r"refused the key gpu-7 .*or not by keys of this role"),
    "lost": (errors.RequestTimeout, r"ends the handshake: is the service's public key in .*lost that of the service"),
    "nobody": (errors.NotAllowed, r"wants a key: name a key folder \(keys=…, --keys or \$PRORL_KEYS\)"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_who_is_not_let_in_is_told_why(
    cluster: Cluster, strangers: KeyFolders, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, said = REFUSALS[name]
    keys = _keys(cluster, name, monkeypatch)
    # Only the wrong key of the service has to be waited out: libzmq knows no more than that the connection was closed.
    timeout_s = SHORT_S if error is errors.RequestTimeout else WAIT_S
    with RolloutClient(cluster.front_door, keys=keys, timeout_s=timeout_s) as client:
        for _ in range(2):  # the second time is as the first
            with pytest.raises(error, match=said):
                client.status()


@pytest.mark.proof(quick=True)
@pytest.mark.parametrize("name", REFUSALS)
def test_who_is_not_let_in_is_told_why_asynchronously(
    cluster: Cluster, strangers: KeyFolders, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, said = REFUSALS[name]
    keys = _keys(cluster, name, monkeypatch)
    timeout_s = SHORT_S if error is errors.RequestTimeout else WAIT_S

    async def main() -> None:
        async with AsyncRolloutClient(cluster.front_door, keys=keys, timeout_s=timeout_s) as client:
            for _ in range(2):
                with pytest.raises(error, match=said):
                    await client.status()

    asyncio.run(main())


def test_a_trainer_at_the_stages_port_is_told_that_it_may_be_the_wrong_one(cluster: Cluster) -> None:
    """libzmq closes a connection of sockets that do not go together, without a word about keys."""
    with (
        RolloutClient(cluster.stage_events, keys=cluster.keys["alice"], timeout_s=SHORT_S) as client,
        pytest.raises(errors.RequestTimeout, match=r"is it the right port.* not for a key of role trainer"),
    ):
        client.status()


def _keys(cluster: Cluster, name: str, monkeypatch: pytest.MonkeyPatch) -> Path | None:
    monkeypatch.delenv("PRORL_KEYS", raising=False)
    if name == "gpu-7":  # a client would not take a stage's key: say that it is a trainer's
        secret = (cluster.keys["gpu-7"] / "gpu-7.secret").read_text()
        posing = cluster.keys["posing"]
        posing.mkdir(mode=0o700, exist_ok=True)
        (posing / "service.pub").write_bytes((cluster.keys["gpu-7"] / "service.pub").read_bytes())
        (posing / "gpu-7.secret").touch(mode=0o600)
        (posing / "gpu-7.secret").write_text(secret.replace('"stage"', '"trainer"'))
        return posing
    return None if name == "nobody" else cluster.keys[name]


def test_a_service_without_keys_is_told_apart(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRORL_KEYS", raising=False)
    plain = Topology(
        service=ServiceSettings(run_dir=str(cluster.folder / "plain")),
        rollout_broker=RolloutBrokerSettings(front_door="tcp://127.0.0.1:*", stage_events="tcp://127.0.0.1:*"),
    )
    broker = RolloutBroker(plain, Journal())
    thread = threading.Thread(target=broker.run)
    thread.start()
    try:
        keyed = RolloutClient(broker.front_door, keys=cluster.keys["alice"], timeout_s=WAIT_S)
        with keyed, pytest.raises(errors.NotAllowed, match="takes no keys: start it with --keys, or do without"):
            keyed.status()
        with RolloutClient(broker.front_door, timeout_s=WAIT_S) as client:
            assert client.status().stages == ()
        lost = RolloutClient(broker.stage_events, timeout_s=SHORT_S)
        with lost, pytest.raises(errors.RequestTimeout, match="ends the handshake: is it the right port"):
            lost.status()
    finally:
        broker.stop()
        thread.join(10)
    with pytest.raises(errors.ConfigError, match="has no key of role trainer or operator or service"):
        RolloutClient(broker.front_door, keys=cluster.keys["gpu-7"])


def test_each_role_has_its_rights(cluster: Cluster) -> None:
    with cluster.client("olga") as operator, cluster.client("alice") as trainer:
        with pytest.raises(errors.NotAllowed, match=r"the operator key olga may not .*`submit`.*of role trainer"):
            operator.submit(job())
        with pytest.raises(errors.NotAllowed, match=r"`collect`"):
            operator.collect(wait_s=0)
        with pytest.raises(
            errors.NotAllowed, match=r"the trainer key alice may not .*`drain_backend`.*of role operator$"
        ):
            trainer.backends.drain("engine")
        operator.backends.drain("engine")
        assert [status.state for status in trainer.backends.list()] == ["draining"]
        until(lambda: _undrained(operator), "the engine to be ready again")


def _undrained(operator: RolloutClient) -> bool:
    (status,) = operator.backends.list()
    operator.backends.add(status.backend)
    return operator.backends.list()[0].state == "ready"


def test_a_node_that_is_let_in_late_joins_by_itself(cluster: Cluster) -> None:
    keys = cluster.keys.make("gpu-8", KeyRole.STAGE)
    late = cluster.start(
        "prorl-stage", keys, "--role", "eval", "--connect", cluster.stage_events, "--sandbox", "process"
    )
    until(lambda: "refused the key gpu-8 (stage)" in cluster.log(), "the refusal", WAIT_S)
    cluster.keys.service.allow(keys / "gpu-8.pub", KeyRole.STAGE)
    with cluster.client("olga") as client:
        until(lambda: any(stage.node == "gpu-8" for stage in client.status().stages), "gpu-8 to join", WAIT_S)
        late.send_signal(signal.SIGTERM)
        assert late.wait(20) == 0


def test_a_key_that_is_revoked_is_of_no_use_on_open_connections_either(cluster: Cluster) -> None:
    folders = cluster.keys
    folders.make("bob", KeyRole.TRAINER)
    folders.service.allow(folders["bob"] / "bob.pub", KeyRole.TRAINER)
    with cluster.client("bob") as client:
        assert client.status().stages
        folders.service.revoke("bob")

        def refused() -> bool:
            try:
                client.status()
            except errors.NotAllowed as error:
                return "revoked" in error.message
            return False

        until(refused, "the revocation")
    with cluster.client("bob") as client, pytest.raises(errors.NotAllowed, match="refused the key bob"):
        client.status()


@pytest.mark.proof
def test_a_revoked_nodes_processes_lose_their_jobs_and_nothing_else(cluster: Cluster) -> None:
    keys = cluster.keys.make("gpu-9", KeyRole.STAGE)
    cluster.keys.service.allow(keys / "gpu-9.pub", KeyRole.STAGE)
    process = cluster.start_stage(keys)
    with cluster.client("alice") as client:
        until(lambda: any(stage.node == "gpu-9" for stage in client.status().stages), "gpu-9 to join", WAIT_S)
        cluster.keys.service.revoke("gpu-9")
        until(lambda: all(stage.node != "gpu-9" for stage in client.status().stages), "gpu-9 to go", WAIT_S)
        client.submit(job())
        assert [trajectory.outcome for trajectory in client.stream(timeout_s=WAIT_S)] == ["completed"]
    assert process.wait(WAIT_S) == 2
    assert re.search(r"prorl-stage: the key of stage process \S+ was revoked", cluster.log())


def test_no_secret_is_in_any_log(cluster: Cluster) -> None:
    secrets = [path.read_text().split('secret_key = "')[1][:40] for path in cluster.keys["."].glob("*/*.secret")]
    assert len(secrets) > 3
    assert not [secret for secret in secrets if secret in cluster.log()]
