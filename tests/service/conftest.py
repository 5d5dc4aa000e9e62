"""Whole services for tests: brokers in threads over one journal, stage processes and engine hosts in real processes."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from needed import usable
from rootfs import root_filesystem
from support import forks
from support.waiting import until

from prorl_zmq import Job, RolloutClient
from prorl_zmq.brokers.backends.backend_broker import BackendBroker
from prorl_zmq.brokers.journal.journal import MemoryJournal
from prorl_zmq.brokers.rollout.rollout_broker import RolloutBroker
from prorl_zmq.config import RolloutBrokerSettings, ServiceSettings, Topology, own_run_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_zmq.brokers.backends.backend_journal import BackendJournal

SCRIPTED = str(Path(__file__).with_name("scripted.py"))


class TestService:
    """Brokers, and the processes that a test starts."""

    __test__ = False

    def __init__(self, folder: Path, settings: RolloutBrokerSettings) -> None:
        self.folder = own_run_dir(folder)
        self.topology = Topology(service=ServiceSettings(run_dir=str(folder)), rollout_broker=settings)
        self.journal = MemoryJournal()
        self.front_door = self.topology.endpoint(settings.front_door)
        self.stage_events = self.topology.endpoint(settings.stage_events)
        self.backend_broker = self.topology.endpoint(self.topology.backend_broker.endpoint)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._brokers: dict[str, tuple[RolloutBroker | BackendBroker, threading.Thread]] = {}

    def start_rollout_broker(self) -> None:
        self._start_broker("rollout", RolloutBroker(self.topology, self.journal))

    def start_backend_broker(self, journal: BackendJournal | None = None) -> None:
        self._start_broker("backend", BackendBroker(self.topology, journal))

    def stop_broker(self, name: str) -> None:
        broker, thread = self._brokers.pop(name)
        broker.stop()
        thread.join(10)
        assert not thread.is_alive()

    def start_stage(self, role: str, slots: int = 8, sandbox: str = "process") -> subprocess.Popen[bytes]:
        image = str(root_filesystem()) if sandbox == "apptainer" else ""
        return self.start(SCRIPTED, role, str(slots), self.stage_events, str(self.folder), sandbox, image)

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
        for name in tuple(self._brokers):
            self.stop_broker(name)

    def _start_broker(self, name: str, broker: RolloutBroker | BackendBroker) -> None:
        thread = threading.Thread(target=broker.run, name=f"{name}-broker")
        thread.start()
        self._brokers[name] = (broker, thread)


SETTINGS = RolloutBrokerSettings(heartbeat_s=0.2, lease_s=2.0)


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
    """Brokers and one scripted stage process per role."""
    empty_service.start_backend_broker()
    empty_service.start_rollout_broker()
    empty_service.start_stages()
    return empty_service


@pytest.fixture
def small_service() -> Iterator[TestService]:
    """Brokers with low limits."""
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        service = TestService(
            Path(folder), msgspec.structs.replace(SETTINGS, max_jobs=10, max_session_share=1.0, job_limit_bytes=4096)
        )
        service.start_backend_broker()
        service.start_rollout_broker()
        try:
            yield service
        finally:
            service.close()


@pytest.fixture(params=["apptainer", "bubblewrap", "process"])
def sandbox_kind(request: pytest.FixtureRequest) -> str:
    """Each kind of sandbox that this machine can make."""
    usable(request.param)
    return str(request.param)


def scripted(**instance: str) -> Job:
    """A job whose phases do what is said."""
    return Job(task="scripted", instance=instance, stage_wait_s=10.0, backend_wait_s=1.0)
