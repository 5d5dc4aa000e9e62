"""`ClusterService`: a service on a cluster, for `prorl up`, `nodes`, `scale`, `drain` and `down`.

All state is in the service's folder and in Slurm, so each command may run on any host that has both.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..client.blocking.client import RolloutClient
from ..errors import ConfigError, EndpointInUse, ProrlError, RequestTimeout, SlurmFailed
from ..service.service_folder import TOPOLOGY, ServiceFolder
from ..system.processes import ISOLATED
from .cluster_folder import ClusterFolder
from .fleet import LOOK_S, Fleet
from .job_script import GROUPS, log_name
from .keeper import LEAVE_S, STOP_S
from .node_table import raw_id
from .slurm import Slurm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..service.node_rows import NodeRow
    from .cluster_file import ClusterFile
    from .slurm import Allocation

BROKERS_S = 60.0
"""How long brokers on this host may take to announce themselves."""
TAIL_BYTES = 2000
"""Of a log, in an error."""
SQUEUE_S = 2.0
"""Interval at which a waiting `prorl up` queries Slurm."""


class ClusterService:
    """A service that was started with `prorl up`."""

    def __init__(self, service: Path) -> None:
        self.folder = ServiceFolder.open(service)
        self.fleet = Fleet(self.folder.path)
        self._log = self.folder.path / "slurm" / "logs" / "keeper.log"

    @classmethod
    def start(cls, service: Path, cluster: ClusterFile, *, take_over: bool = False) -> ClusterService:
        """Submit the jobs and start the brokers; adopt the jobs of an earlier `prorl up` whose keeper has exited.

        Raises:
            EndpointInUse: the service is running.
            SlurmFailed: sbatch refused a script; nothing was started.
            ConfigError: the folder or the cluster file is invalid, or the brokers did not start.
        """
        slurm = Slurm()
        topology = Path(cluster.topology) if cluster.topology else None
        if ServiceFolder.is_made(service):
            path = ServiceFolder.open(service).path
            if topology is not None:
                (path / TOPOLOGY).write_bytes(topology.read_bytes())
        else:
            path = ServiceFolder.create(service, topology).path
        if not take_over and (path / "slurm").exists():
            _check_free(path, slurm)
        ClusterFolder(path).begin(cluster)
        started = cls(path)
        try:
            started.fleet.look()
            if cluster.brokers == "job":
                started.fleet.submit_brokers()
            else:
                started._start_keeper(take_over=take_over)
        except BaseException:
            started.fleet.end((*GROUPS, "brokers"), LEAVE_S)
            raise
        return started

    def _start_keeper(self, *, take_over: bool) -> None:
        command = [sys.executable, *ISOLATED, "-m", "prorl_zmq.cli", "prorl", "keep"]
        command += ["--service", str(self.folder.path), *(["--take-over"] if take_over else [])]
        for name in self.folder.broker_endpoints():  # of an earlier life
            (self.folder.path / "brokers" / f"{name}.json").unlink(missing_ok=True)
        with self._log.open("ab") as log:
            keeper = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
            )
        until = time.monotonic() + BROKERS_S
        while True:
            with suppress(RequestTimeout):
                self.folder.wait_for_brokers(LOOK_S)
                return
            if keeper.poll() is not None or time.monotonic() > until:
                keeper.terminate()
                keeper.wait(STOP_S)
                raise ConfigError(f"the brokers did not start; {self._log} says why:\n{_tail(self._log)}")

    # While it runs ----------------------------------------------------------------------------------------------------

    def wait_joined(self, say: Callable[[str], None], limit_s: float) -> int:
        """Wait until a node has joined; return how many have. `say` is called with the state of the jobs.

        Raises:
            SlurmFailed: all jobs that were submitted first have ended; the message has the end of a log.
            RequestTimeout: none has joined in time. The service continues.
        """
        until, first = time.monotonic() + limit_s, set[str]()
        with RolloutClient(service=self.folder.path, timeout_s=SQUEUE_S) as client:
            while True:
                found = self.fleet.allocations()["nodes"]
                first = first or {one.name for one in found}
                asked = time.monotonic() + SQUEUE_S
                while time.monotonic() < asked:
                    with suppress(ProrlError):  # the brokers' job may be queued
                        if joined := {stage.node for stage in client.status().stages}:
                            return len(joined)
                    time.sleep(LOOK_S)
                if first.isdisjoint(one.name for one in found if not one.is_ending):
                    raise SlurmFailed(self._why_gone())
                if time.monotonic() > until:
                    raise RequestTimeout(
                        f"no node has joined within {limit_s:.0f} s ({waiting_text(found)}); the service continues: "
                        "`prorl nodes` shows it, `prorl down` ends it",
                        timeout_s=limit_s,
                    )
                say(waiting_text(found))

    def _why_gone(self) -> str:
        logs = self.folder.path / "slurm" / "logs"
        jobs = [job_id for job_id, kind in self.fleet.folder.jobs().items() if kind == "nodes"]
        for path in (path for job_id in jobs for path in sorted(logs.glob(log_name("nodes", f"{job_id}_*")))):
            if tail := _tail(path):
                return f"the nodes' jobs have ended, and none joined; {path} ends with:\n{tail}"
        return (
            f"the nodes' jobs ({', '.join(jobs)}) have ended without a log in {logs}: do the hosts see this folder? It "
            "must be on a file system that all share (`sacct -j` may say more)"
        )

    def scale(self, nodes: int, engines: int | None = None) -> None:
        """Change the number of nodes or engine hosts; the keeper submits or drains them."""
        for kind, count in (("nodes", nodes), ("engines", engines)):
            limit = self.fleet.cluster.nodes.limit if kind == "nodes" else self.fleet.cluster.engines.limit
            if count is not None and count > limit:
                raise ConfigError(f"{kind}.max_nodes is {limit} in the cluster file of this service: not {count}")
        counts = {"nodes": nodes} if engines is None else {"nodes": nodes, "engines": engines}
        self.fleet.folder.change(lambda wanted: msgspec.structs.replace(wanted, **counts))

    def drain(self, name: str | None, rows: Iterable[NodeRow] = ()) -> list[Allocation]:
        """Drain a node for good; return the jobs that leave.

        Args:
            name: of the node, its host or its job; None: all nodes and engine hosts.
            rows: the brokers' nodes, to find a job by its node's name.

        Raises:
            ConfigError: no node, host or job has that name.
        """
        wanted = self.fleet.folder.wanted()
        by_kind = self.fleet.allocations()
        jobs = {raw_id(row) for row in rows if row.node == name and row.allocation}
        leaving: list[Allocation] = []
        counts = {}
        for kind in GROUPS:
            living = [one for one in by_kind[kind] if not one.is_ending and one.name not in wanted.leaving]
            chosen = [one for one in living if name in (None, one.name, one.host) or one.raw_id in jobs]
            counts[kind] = max(0, wanted.count(kind) - len(chosen)) if name is not None else 0
            leaving += chosen
        if name is not None and not leaving:
            raise ConfigError(f"there is no node, host or job {name} here: `prorl nodes` lists them")
        self.fleet.send_away(leaving, **counts)
        return leaving

    def down(self) -> None:
        """End all jobs and then the brokers; the journal stays for the next `prorl up`.

        Raises:
            SlurmFailed: jobs have not ended in time.
            ConfigError: the brokers' process does not exit, and is on another host.
        """
        fleet = self.fleet
        fleet.slurm.forbid_requeue(one.name for one in fleet.allocations(["brokers"])["brokers"])
        fleet.folder.change(lambda wanted: msgspec.structs.replace(wanted, nodes=0, engines=0, stop=True))
        until = time.monotonic() + LEAVE_S + STOP_S
        while (keeper := fleet.folder.keeper()) and time.monotonic() < until:
            time.sleep(LOOK_S)
        if keeper and fleet.cluster.brokers == "here":
            raise ConfigError(f"{keeper}, which runs the brokers, does not end; kill it")
        fleet.end((*GROUPS, "brokers"), LEAVE_S)


def _check_free(service: Path, slurm: Slurm) -> None:
    folder = ClusterFolder(service)
    brokers = [job_id for job_id, kind in folder.jobs().items() if kind == "brokers"]
    if any(not one.is_ending for one in slurm.allocations(brokers)):
        where, cure = f"job {brokers[-1]}", "`scancel` it if it hangs"
    elif where := folder.keeper():
        cure = "if that host is dead, `prorl up --take-over`"
    else:
        return
    raise EndpointInUse(
        f"the service in {service} is up ({where}): see `prorl nodes`, change it with `prorl scale N`, end it with "
        f"`prorl down`; {cure}",
        endpoint=str(service),
    )


def waiting_text(found: list[Allocation]) -> str:
    """Describe what jobs wait for, in squeue's words."""
    running = sum(one.is_running for one in found)
    reasons = sorted({one.reason for one in found if one.state == "PENDING"})
    waiting = sum(one.state == "PENDING" for one in found)
    parts = [f"{running} of {len(found)} started"] + ([f"{waiting} queued: {', '.join(reasons)}"] if waiting else [])
    return ", ".join(parts)


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace").strip()
