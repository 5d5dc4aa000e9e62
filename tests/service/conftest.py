"""Whole services for tests: in this process, or with stage processes and engine hosts that can be killed."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from needed import usable
from rootfs import root_filesystem
from support import forks
from support.waiting import until

from prorl_zmq import Job, RolloutClient
from prorl_zmq.config import RolloutBrokerSettings, ServiceSettings, Topology
from prorl_zmq.system.run_folder import own_run_dir
from prorl_zmq.testing import BrokerThreads, LocalService

from .scripted import ScriptedHandler

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPTED = str(Path(__file__).with_name("scripted.py"))


class TestService:
    """Brokers in threads, and the processes that a test starts."""

    __test__ = False

    def __init__(self, folder: Path, settings: RolloutBrokerSettings) -> None:
        self.folder = own_run_dir(folder)
        self.brokers = BrokerThreads(Topology(service=ServiceSettings(run_dir=str(folder)), rollout_broker=settings))
        self.front_door = self.topology.endpoint(settings.front_door)
        self.stage_events = self.topology.endpoint(settings.stage_events)
        self.backend_broker = self.topology.endpoint(self.topology.backend_broker.endpoint)
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def topology(self) -> Topology:
        return self.brokers.topology

    def start_brokers(self) -> None:
        self.brokers.start_backend_broker()
        self.brokers.start_rollout_broker()

    def start_stage(self, role: str, slots: int = 8, sandbox: str = "process") -> subprocess.Popen[bytes]:
        return self.start(SCRIPTED, role, str(slots), self.stage_events, str(self.folder), sandbox, image_for(sandbox))

    def start_stages(self, sandbox: str = "process") -> None:
        """Start one stage process per role, and wait for them."""
        for role in ("init", "run", "eval"):
            self.start_stage(role, sandbox=sandbox)
        self.wait_stages(3)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Run `python -P` with these arguments."""
        with (self.folder / "log").open("ab") as log:
            process = forks.start(*arguments, stdout=log, stderr=log)
        self.processes.append(process)
        return process

    def client(self, **options: object) -> RolloutClient:
        return RolloutClient(self.front_door, **options)  # type: ignore[arg-type]

    def wait_stages(self, count: int) -> None:
        with self.client() as client:
            until(lambda: len(client.status().stages) == count, f"{count} stage processes")

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def close(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.brokers.close()


SETTINGS = RolloutBrokerSettings(heartbeat_s=0.2, lease_s=2.0)
IDLE_S = 10.0
"""How long jobs of a test may go on after it."""
SMALL: dict[str, Any] = {"max_jobs": 10, "max_session_share": 1.0, "job_limit_bytes": 4096}


@pytest.fixture
def empty_service() -> Iterator[TestService]:
    """A service whose processes the test starts itself."""
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        service = TestService(Path(folder), SETTINGS)
        try:
            yield service
        finally:
            service.close()


@pytest.fixture
def service(empty_service: TestService) -> TestService:
    """Brokers and one scripted stage process per role, for tests that kill, stop or start processes."""
    empty_service.start_brokers()
    empty_service.start_stages()
    return empty_service


@pytest.fixture
def small_service() -> Iterator[TestService]:
    """Brokers with low limits."""
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        service = TestService(Path(folder), msgspec.structs.replace(SETTINGS, **SMALL))
        service.start_brokers()
        try:
            yield service
        finally:
            service.close()


def in_process(**options: Any) -> LocalService:
    """A service in this process that has the scripted task; `with` starts it."""
    topology = {"service": {"node": "local"}, **options.pop("topology", {})}
    return LocalService(handlers={"scripted": ScriptedHandler}, topology=topology, **options)


@pytest.fixture(scope="session")
def shared_services() -> Iterator[list[LocalService]]:
    """The service that tests share, once one has asked for it."""
    services: list[LocalService] = []
    yield services
    for service in services:
        service.__exit__(None, None, None)


@pytest.fixture
def shared_service(shared_services: list[LocalService]) -> LocalService:
    """One service in this process for all tests, with nothing left to do; tests use sessions and ids of their own.

    A service that does not get free after a test is replaced.
    """
    if shared_services and not is_free(shared_services[-1], IDLE_S):
        with suppress(TimeoutError):  # the test before has failed already
            shared_services.pop().__exit__(None, None, None)
    if not shared_services:
        shared_services.append(in_process().__enter__())
    return shared_services[-1]


def is_free(service: LocalService, wait_s: float) -> bool:
    """Return whether the service has no job under way, at once or within a time."""
    with suppress(AssertionError):
        until(lambda: busy_slots(service) == 0, "the slots to be free", wait_s)
        return True
    return False


@pytest.fixture
def local_service() -> Iterator[LocalService]:
    """A service in this process for one test, which counts all of its jobs, or restarts a broker."""
    with in_process() as service:
        yield service


def busy_slots(service: LocalService | TestService) -> int:
    with service.client() as client:
        return sum(stage.busy for stage in client.status().stages)


@pytest.fixture(params=["apptainer", "bubblewrap", "process"])
def sandbox_kind(request: pytest.FixtureRequest) -> str:
    """Each kind of sandbox that this machine can make."""
    usable(request.param)
    return str(request.param)


def image_for(kind: str) -> str:
    """The default image for sandboxes of a kind."""
    return str(root_filesystem()) if kind == "apptainer" else ""


def scripted(**instance: str) -> Job:
    """A job whose phases do what is said."""
    return Job(task="scripted", instance=instance, stage_wait_s=10.0, backend_wait_s=1.0)
