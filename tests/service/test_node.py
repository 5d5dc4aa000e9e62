"""A service on several nodes by way of its folder: `prorl serve --service` and `prorl node`, as a user runs them.

The nodes are run folders of this machine; brokers and nodes meet over TCP with CURVE.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import tempfile
import time
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest
from command_lines import line_of
from support.commands import complaint, prorl
from support.services import Program, serving, started
from support.waiting import until

from prorl_zmq import Job, RolloutClient
from prorl_zmq.brokers.node.node_broker import LOOK_S
from prorl_zmq.config import load_topology
from prorl_zmq.errors import JobTooLarge, NotAllowed, RequestTimeout
from prorl_zmq.security.keys import KeyFolder
from prorl_zmq.service.node_drain import DrainRequests, drain_nodes
from prorl_zmq.service.node_rows import NodeRow
from prorl_zmq.service.service_folder import BACKENDS, MARKER, Announcement, ServiceFolder
from prorl_zmq.wire.messages.jobs import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator
    from subprocess import CompletedProcess

LATE_S = 3.0
"""How late a loaded machine may notice something."""
TOPOLOGY = """
[service]
rollout_brokers = 2
[sandbox]
kind = "process"
[[stage]]
role = "init"
[[stage]]
role = "run"
[[stage]]
role = "eval"
"""

pytestmark = pytest.mark.xdist_group("services in folders")


class Cluster:
    """A service's folder, and what was started for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path / "service"
        self._opened = ExitStack()

    def start(self, *arguments: str, **variables: str) -> Program:
        """Run a command of `prorl`; variables may be of a module that an interpreter reads as it starts."""
        environment = {**os.environ, **variables}
        words = ("prorl", *arguments, "--service", self.folder)
        return self._opened.enter_context(started(*words, environment=environment, interpreter=bool(variables)))

    def serve(self, *flags: str) -> Program:
        return self.start("serve", "--brokers-only", "--address", "127.0.0.1", "--run-dir", self.run_dir("b"), *flags)

    def node(self, name: str, *flags: str, **environment: str) -> Program:
        place = ["--address", "127.0.0.1", "--run-dir", self.run_dir(name), "--name", name]
        return self.start("node", *place, *flags, **environment)

    @property
    def topology(self) -> Path:
        return self.path / "topology.toml"

    def run_dir(self, name: str) -> str:
        return str(self.path / name)

    def client(self, session: str | None = None) -> RolloutClient:
        return RolloutClient(service=self.folder, session=session, timeout_s=30)

    def close(self) -> None:
        self._opened.close()


@contextmanager
def cluster(more: str = "", brokers: int = 2) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as path:
        made = Cluster(Path(path))
        topology = TOPOLOGY.replace("rollout_brokers = 2", f"rollout_brokers = {brokers}")
        (made.path / "topology.toml").write_text(topology + more)
        ServiceFolder.create(made.folder, made.path / "topology.toml")
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    """Two rollout brokers and a node with an engine, whose clock is an hour slow."""
    with cluster("[rollout_broker]\njob_limit_bytes = 100_000\n") as made:
        slow = (
            f"import time\nnow = time.time\ntime.time = lambda: now() - 3600\nopen('{made.path}/slow', 'w').close()\n"
        )
        (made.path / "sitecustomize.py").write_text(slow)
        made.serve().wait_line("ready; clients and nodes find it")
        made.node("one", PYTHONPATH=str(made.path)).wait_line("ready: one")
        yield made


def job(number: int = 0) -> Job:
    return Job(task="math", instance={"problem": f"{number}", "ground_truth": "1"}, backend_wait_s=20)


def sessions(folder: Path) -> dict[str, str]:
    """One session of each rollout broker."""
    service = ServiceFolder.open(folder)
    found: dict[str, str] = {}
    for number in range(100):
        found.setdefault(service.broker_of(f"session-{number}"), f"session-{number}")
    assert len(found) == 2
    return found


def refused(*arguments: object) -> str:
    """Run a command that is refused as a wrong setting, and return what it said."""
    done = prorl(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


def test_each_session_has_its_broker_and_all_share_the_node(shared: Cluster) -> None:
    for session in sessions(shared.folder).values():
        with shared.client(session) as client:
            client.submit(job(number) for number in range(4))
            assert [one.outcome for one in client.stream(timeout_s=60)] == ["completed"] * 4
            status = client.status()
            assert {stage.node for stage in status.stages} == {"one"}
            assert len(status.stages) == 3  # the node speaks for each role once
    assert (shared.path / "slow").exists()  # so is the node's clock, and nothing depends on it


def test_the_brokers_have_the_settings_of_the_folder(shared: Cluster) -> None:
    with shared.client() as client, pytest.raises(JobTooLarge, match="100000"):
        client.submit(Job(task="math", instance={"problem": "x" * 100_000, "ground_truth": "1"}))


def test_commands_find_a_service_in_the_environment(shared: Cluster) -> None:
    done = prorl("status", environment={**os.environ, "PRORL_SERVICE": str(shared.folder)})
    assert done.returncode == 0, done.stderr
    assert "one-engine-0" in done.stdout


def asked(shared: Cluster, *arguments: str) -> CompletedProcess[str]:
    return prorl(*arguments, "--service", shared.folder)


def slots_of(shared: Cluster) -> dict[str, int]:
    """How many slots of each stage its brokers have together: fewer while processes start or slots change hands."""
    done = asked(shared, "status", "--json")
    assert done.returncode == 0, done.stderr
    return {stage["role"]: stage["slots"] for stage in json.loads(done.stdout)["status"]["stages"]}


def test_commands_ask_all_brokers(shared: Cluster) -> None:
    ids = [f"asked-{broker}" for broker in sessions(shared.folder)]
    for session, job_id in zip(sessions(shared.folder).values(), ids, strict=True):
        with shared.client(session) as client:
            client.submit(msgspec.structs.replace(job(), job_id=job_id))
    traces = [asked(shared, "job", job_id, "--json") for job_id in ids]
    cancelled = asked(shared, "cancel", *ids)
    topology = {stage.role: stage.slots for stage in load_topology(shared.topology).stage}
    until(lambda: slots_of(shared) == topology, "all slots of the node are with its brokers")
    nodes = asked(shared, "nodes", "--json")
    for trace, job_id in zip(traces, ids, strict=True):
        assert json.loads(trace.stdout)["job_id"] == job_id
    told = dict(line.split(": ") for line in cancelled.stdout.splitlines())
    assert set(told) == set(ids)
    assert set(told.values()) <= {"cancelled", "finished"}
    (node,) = json.loads(nodes.stdout)["nodes"]
    assert [one.returncode for one in (*traces, cancelled, nodes)] == [0] * 4
    assert node["slots"] == topology
    assert (node["node"], node["state"], node["host"]) == ("one", "ready", socket.gethostname())
    assert node["facts"]["version"] == version("prorl-zmq")
    assert 0 < node["facts"]["memory_free_bytes"] < node["facts"]["memory_total_bytes"]
    assert 0 < node["facts"]["disk_free_bytes"] < node["facts"]["disk_total_bytes"]
    unknown = asked(shared, "job", "no-such-job")
    assert "no-such-job" in unknown.stderr
    assert unknown.returncode == 2


@pytest.mark.proof
def test_a_broker_that_does_not_answer_is_named_and_the_others_are_shown(shared: Cluster) -> None:
    announced = ServiceFolder.open(shared.folder).announcement("rollout-1")
    assert announced is not None
    os.kill(announced.pid, signal.SIGSTOP)
    try:
        status, nodes = asked(shared, "status"), asked(shared, "nodes")
        seen, table = status.stdout, nodes.stdout
    finally:
        os.kill(announced.pid, signal.SIGCONT)
    assert (status.returncode, nodes.returncode) == (1, 1)
    assert "one-engine-0" in seen
    assert "ready" in table
    for text in (seen, table):
        assert "rollout-1 does not answer: no reply from" in text
        assert "rollout-0 does not" not in text


def test_a_second_service_is_refused(shared: Cluster) -> None:
    said = refused("serve", "--service", str(shared.folder), "--run-dir", shared.run_dir("b2"))
    assert "another service runs in" in said
    assert "--take-over" in said


def test_a_second_machine_of_a_name_is_refused(shared: Cluster) -> None:
    other = shared.start("node", "--address", "127.0.0.1", "--run-dir", shared.run_dir("two"), "--name", "one")
    assert other.wait() == 2
    assert "the name one is that of" in other.log
    assert shared.run_dir("one") in other.log
    assert shared.run_dir("two") in other.log
    with shared.client() as client:
        client.submit(job())
        assert [one.outcome for one in client.stream(timeout_s=60)] == ["completed"]


def test_a_node_drains_by_its_name(shared: Cluster) -> None:
    other = shared.node("leaves", "--no-engines")
    other.wait_line("ready: leaves")
    done = prorl("drain", "leaves", "--service", shared.folder)
    assert (done.returncode, done.stdout) == (0, f"leaves on {socket.gethostname()} drains\n"), done.stderr
    assert other.wait() == 0
    assert "asked to drain" in other.log
    with shared.client() as client:
        client.submit(job())
        assert [one.outcome for one in client.stream(timeout_s=60)] == ["completed"]
        assert {stage.node for stage in client.status().stages} == {"one"}
    again = shared.node("leaves", "--no-engines")  # the request is gone
    again.wait_line("ready: leaves")
    again.process.send_signal(signal.SIGTERM)
    assert again.wait() == 0
    assert "there is no node or host nowhere here; nodes: " in refused("drain", "nowhere", "--service", shared.folder)
    assert "Name a node, or --all" in refused("drain", "--service", shared.folder)


@pytest.mark.proof(quick=True)
def test_a_bulk_submission_at_one_broker_leaves_the_others_their_slots() -> None:
    """Jobs wait a second for a backend that never comes, and hold a slot meanwhile: 30 s of work for all slots."""
    with cluster() as made:
        made.serve().wait_line("ready; clients")
        made.node("one", "--no-engines").wait_line("ready: one")
        bulk, other = sessions(made.folder).values()

        def brief(number: int) -> Job:
            return msgspec.structs.replace(job(number), backend_wait_s=1.0, max_attempts=1)

        with made.client(bulk) as crowd, made.client(other) as late:
            crowd.submit(brief(number) for number in range(240))
            until(lambda: crowd.nodes().nodes[0].slots[Phase.RUN] == 8, "the bulk to have all slots")
            before = sum(crowd.status().queued.values())
            late.submit(brief(0))
            assert len(late.collect(1, wait_s=60)) == 1
            after = sum(crowd.status().queued.values())
            assert after > before / 3, (before, after)


def test_a_node_that_takes_no_request_is_named(tmp_path: Path) -> None:
    requests = DrainRequests(tmp_path / "nodes")
    row = NodeRow(node="deaf", host="h", state="ready")
    with pytest.raises(RequestTimeout, match="deaf did not answer within 0 s"):
        drain_nodes(requests, [row], "h", limit_s=0.3)
    assert not requests.is_waiting("deaf")


def test_the_node_of_a_whole_service_drains_and_its_brokers_live_on() -> None:
    """Its jobs end, what waits goes to another node, and `serve` starts no process of the node again."""
    with cluster(brokers=1) as made:
        serve = made.start("serve", "--address", "127.0.0.1", "--run-dir", made.run_dir("a"))
        serve.wait_line("ready; clients and nodes find it")
        with made.client("session-0") as client:
            (own,) = {stage.node for stage in client.status().stages}
            client.submit(msgspec.structs.replace(job(number), max_attempts=1) for number in range(32))
            first = client.collect(1)
            done = prorl("drain", own, "--service", made.folder)
            assert (done.returncode, done.stdout) == (0, f"{own} on {socket.gethostname()} drains\n"), done.stderr
            serve.wait_line("the node has drained and ended; the brokers live on")
            assert client.status().stages == ()
            assert serve.child("backend_broker.json")
            assert serve.child("rollout_broker.json")
            lines = [line_of(child) for child in serve.children()]
            assert not [line for line in lines if re.search(r"stage_\w+\.json|engine\.json|node_broker\.json", line)]
            made.node("two").wait_line("ready: two")
            rest = list(client.stream(timeout_s=60))
            assert len(first) + len(rest) == 32
            assert {each.outcome for each in (*first, *rest)} == {"completed"}
        assert serve.end() == 0


@pytest.mark.proof(quick=True)
def test_the_node_of_a_service_without_a_folder_drains_too() -> None:
    with serving() as service:
        (node,) = {row["node"] for row in json.loads(service.run("nodes", "--json").stdout)["nodes"]}
        with service.client() as client:
            client.submit(job(number) for number in range(8))
            done = prorl("drain", node, "--connect", service.front_door)
            assert (done.returncode, done.stdout) == (0, f"{node} on {socket.gethostname()} drains\n"), done.stderr
            service.wait_line("the node has drained and ended; the brokers live on")
            assert client.backends.list() == ()
            assert client.status().stages == ()
            ended = client.collect(8)
            assert {one.outcome for one in ended} <= {"completed"}
        assert "there is no node or host nowhere here" in refused("drain", "nowhere", "--connect", service.front_door)
    restarts = [line for line in service.lines if "restarting" in line]
    assert restarts == []


def test_wrong_flags_and_folders_are_refused(shared: Cluster, tmp_path: Path) -> None:
    folder = str(shared.folder)
    assert "is not a service's folder" in refused("node", "--service", str(tmp_path))
    assert "is no IPv4 address of this machine" in refused("node", "--service", folder, "--address", "8.8.8.8")
    assert "write ROLE=N" in refused("node", "--service", folder, "--slots", "play=3")
    assert "nothing to do here" in refused(
        *("node", "--service", folder, "--no-engines"),
        *(f"--slots={role}=0" for role in ("init", "run", "eval")),
    )
    assert "cannot be a node's" in refused("node", "--service", folder, "--name", "a b")
    assert "leave out --keys" in refused("serve", "--service", folder, "--keys", folder)
    assert "go with --service" in refused("serve", "--brokers-only")
    assert "without --config" in refused("serve", "--service", folder, "--config", str(shared.path / "topology.toml"))
    (tmp_path / "two.toml").write_text("[service]\nrollout_brokers = 2\n")
    assert "prorl serve --service DIR" in refused("serve", "--config", str(tmp_path / "two.toml"))
    readable = tmp_path / "readable"
    ServiceFolder.create(readable)
    readable.chmod(0o755)
    assert f"chmod 700 {readable}" in refused("node", "--service", str(readable))
    (readable / MARKER).unlink()


def test_a_node_of_another_version_is_refused(tmp_path: Path) -> None:
    folder = ServiceFolder.create(tmp_path / "service")
    folder.announce("backend", BACKENDS, {"endpoint": "tcp://127.0.0.1:1"})
    file = folder.path / "brokers" / f"{BACKENDS}.json"
    one = msgspec.json.decode(file.read_bytes(), type=Announcement)
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(one, version="9.9", protocol=99)))
    said = complaint(prorl("node", "--service", folder.path), 1)
    assert "are of prorl-zmq 9.9 (protocol 99), this is" in said
    assert "install the same version" in said


@pytest.mark.proof
def test_a_drained_node_ends_what_it_has_and_spends_no_attempt() -> None:
    with cluster() as made:
        made.serve().wait_line("ready; clients")
        one = made.node("one", "--drain-s", "30")
        one.wait_line("ready: one")
        with made.client("session-0") as client:
            client.submit(msgspec.structs.replace(job(number), max_attempts=1) for number in range(64))
            first = client.collect(1)
            assert one.end(signal.SIGUSR1) == 0
            assert "draining" in one.log
            made.node("two").wait_line("ready: two")
            rest = list(client.stream(timeout_s=60))
            assert len(first) + len(rest) == 64
            assert {each.outcome for each in (*first, *rest)} == {"completed"}
            assert max(each.result.attempt for each in (*first, *rest)) < 10  # given back once or twice, not for ever


@pytest.mark.proof
def test_a_node_that_hangs_is_lost_after_its_lease_and_its_jobs_go_on_elsewhere() -> None:
    """Its connections stay, and pings between nodes and brokers are far apart: the lease alone judges."""
    with cluster("[rollout_broker]\nheartbeat_s = 0.5\nlease_s = 4.0\n") as made:
        made.serve().wait_line("ready; clients")
        made.node("two").wait_line("ready: two")
        one = made.node("one", "--no-engines")
        one.wait_line("ready: one")
        processes = [psutil.Process(one.process.pid), *one.children()]
        with made.client("session-0") as client:
            client.submit(job(number) for number in range(300))
            until(lambda: held(client, "one") >= 4, "jobs on the node")
            for process in processes:
                process.suspend()
            try:
                stopped = time.monotonic()
                until(lambda: client.nodes().lost, "the node to be lost")
                lost_after_s = time.monotonic() - stopped
                there = list(client.stream(timeout_s=30))
                (lost,) = client.nodes().lost
            finally:
                for process in processes:
                    process.resume()
            until(lambda: client.nodes().lost[0].is_back, "the node to be back")
        assert 3.0 < lost_after_s < 4.0 + LATE_S
        assert {each.outcome for each in there} == {"completed"}
        assert (lost.node, lost.died) == ("one", False)
        assert 4 <= lost.jobs == lost.completed["two"]


def held(client: RolloutClient, node: str) -> int:
    return sum(sum(one.busy.values()) for one in client.nodes().nodes if one.node == node)


@pytest.mark.proof
def test_a_killed_node_leaves_nothing_behind_and_comes_back_under_its_name_while_its_leases_run() -> None:
    with cluster() as made:
        made.serve().wait_line("ready; clients")
        one = made.node("one")
        one.wait_line("ready: one")
        children = one.children()
        assert len(children) >= 5
        with made.client("session-0") as client:
            client.submit(job(number) for number in range(100))
            first = client.collect(1)
            one.end(signal.SIGKILL)
            made.node("one").wait_line("ready: one")
            ended = [*first, *client.stream(timeout_s=60)]
        assert sorted(each.outcome for each in ended) == ["completed"] * 100
        assert len({each.job_id for each in ended}) == 100
        until(lambda: not any(is_there(child) for child in children), "its children to end")


def is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.proof
def test_brokers_that_moved_are_found_again() -> None:
    with cluster() as made:
        serve = made.serve()
        serve.wait_line("ready; clients")
        made.node("one").wait_line("ready: one")
        with made.client("session-0") as client:
            client.submit([job(1)])
            assert len(client.collect(1)) == 1
            before = ServiceFolder.open(made.folder).broker_endpoints()
            serve.end(signal.SIGKILL)
            for path in (made.folder / "brokers").iterdir():
                path.unlink()  # so that they take other ports
            made.serve().wait_line("ready; clients")
            after = ServiceFolder.open(made.folder).broker_endpoints()
            assert all(after[name] != before[name] for name in before)
            client.submit(job(number) for number in range(2, 6))
            assert [one.outcome for one in client.stream(timeout_s=60)] == ["completed"] * 4


@pytest.mark.proof
def test_brokers_come_back_where_they_were_or_beside_who_took_their_port() -> None:
    with cluster() as made:
        serve = made.serve()
        serve.wait_line("ready; clients")
        before = ServiceFolder.open(made.folder).broker_endpoints()
        serve.end()
        host, _, port = before["rollout-0"]["front_door"].removeprefix("tcp://").partition(":")
        with socket.create_server((host, int(port))):
            serve = made.serve()
            serve.wait_line("ready; clients")
            serve.end()
        after = ServiceFolder.open(made.folder).broker_endpoints()
        assert "taking another port" in serve.log
        assert {name for name in before if after[name] != before[name]} == {"rollout-0"}


@pytest.mark.proof
def test_a_service_that_was_taken_over_ends() -> None:
    with cluster() as made:
        first = made.serve()
        first.wait_line("ready; clients")
        second = made.start(
            *("serve", "--brokers-only", "--take-over", "--address", "127.0.0.1", "--run-dir", made.run_dir("c"))
        )
        assert first.wait() == 2
        assert "has taken this service's folder over" in first.log
        second.wait_line("ready; clients")


@pytest.mark.proof
def test_a_revoked_key_is_said() -> None:
    with cluster() as made:
        made.serve().wait_line("ready; clients")
        KeyFolder(made.folder / "keys" / "service").revoke("client")
        time.sleep(1.1)  # the list is read again each second
        with made.client() as client, pytest.raises(NotAllowed, match="refused the key client"):
            client.status()
        KeyFolder(made.folder / "keys" / "service").revoke("node")
        one = made.node("one", "--no-engines")
        one.wait_line("refused the key node (stage)")
        time.sleep(3 * LOOK_S)
        assert one.log.count("refused the key node (stage)") == 2  # each broker's refusal once
