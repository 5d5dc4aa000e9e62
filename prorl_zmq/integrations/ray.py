"""Runs a rollout service inside a Ray cluster, next to the trainer: `start` returns it.

Ray places, restarts and ends the processes; all data goes over the service's own sockets, with keys. The brokers are
one actor on the driver's machine. Each node is an actor in a placement group that runs `prorl node` with the needed
parts of the service's folder, which the actor's arguments carry. A program dies with its actor (PR_SET_PDEATHSIG), Ray
restarts an actor whose program died, and all actors end with the driver.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ..client.blocking.client import RolloutClient
from ..errors import ConfigError, RequestTimeout
from ..service.service_folder import MARKER, TOPOLOGY, ServiceFolder
from ..system.packed_folder import pack, unpack
from ..system.processes import ISOLATED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

NODE_PARTS = (MARKER, TOPOLOGY, "keys/node", "keys/client", "brokers")
"""The parts of the service's folder that a node needs."""
USAGE_ERROR = 2
STOP_S = 45.0
"""How long a program may take to exit after its drain."""
ASK_S = 5.0
"""Longest wait for an actor's description; an actor that Ray is restarting gives none."""
CHECK_S = 0.5
LAUNCH = """
import os, signal, sys
from prorl_zmq.system.processes import die_with_parent
die_with_parent(int(sys.argv[1]))
signal.pthread_sigmask(signal.SIG_SETMASK, ())
os.execv(sys.executable, [sys.executable, "-P", "-m", "prorl_zmq.cli", "prorl", *sys.argv[2:]])
"""
"""The child's first code: die with the actor's main thread, and unblock SIGINT, which Ray blocks and sandboxes use to
interrupt cells. Not in the forked child, since Ray's workers have many threads."""
LINES = 5
"""Last lines of a program's output in errors."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node of the service, as its actor describes it."""

    name: str
    """As in `prorl status` and a job's history; a restarted actor has a new one."""
    address: str
    ray_node_id: str
    pid: int
    """Of `prorl node`."""
    problem: str = ""
    """Why it does not work; empty: it does."""


class Program:
    """An actor with a child program, which dies with it; if the child fails, the actor exits, and Ray restarts both."""

    def __init__(self, python: str, name: str, *arguments: str) -> None:
        self._name = name
        self._said: deque[str] = deque(maxlen=LINES)
        self._stopping = False
        self._child = subprocess.Popen(
            (python, *ISOLATED, "-c", LAUNCH, str(os.getpid()), *arguments),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        threading.Thread(target=self._watch, name="prorl-program", daemon=True).start()

    def describe(self) -> RayNode:
        code = self._child.poll()
        problem = "" if code is None else f"it ended with code {code}: {''.join(self._said).strip()}"
        return RayNode(self._name, ray.util.get_node_ip_address(), _machine(), self._child.pid, problem)

    def stop(self, limit_s: float) -> None:
        """End the program in order; kill it after `limit_s` seconds."""
        self._stopping = True
        self._child.terminate()
        try:
            self._child.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._child.kill()

    def _watch(self) -> None:
        for line in self._child.stderr or ():
            sys.stderr.write(line)  # Ray shows it at the driver
            self._said.append(line)
        if self._child.wait() not in (0, USAGE_ERROR) and not self._stopping:
            os._exit(1)


class Node(Program):
    """The actor of one node, with a copy of the service's folder."""

    def __init__(self, python: str, packed: bytes, *flags: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="prorl-ray-node-"))
        unpack(packed, self._folder)
        name = f"ray-{_machine()[:8]}-{os.getpid()}"
        place = ("--service", str(self._folder), "--run-dir", f"{self._folder}/run", "--name", name)
        super().__init__(python, name, "node", *place, "--address", ray.util.get_node_ip_address(), *flags)

    def stop(self, limit_s: float) -> None:
        super().stop(limit_s)
        shutil.rmtree(self._folder, ignore_errors=True)


def _machine() -> str:
    return str(ray.get_runtime_context().get_node_id())


@dataclass(slots=True, kw_only=True)
class RayService:
    """A service in a Ray cluster, made by `start`; a context that stops it."""

    service: Path
    """The service's folder, on the driver's machine: keys, endpoints, journals."""
    _is_temporary: bool
    _python: str
    _flags: tuple[str, ...]
    """Of `prorl node`."""
    _resources: dict[str, float]
    _strict: bool
    _drain_s: float
    _wait_s: float
    _groups: list[tuple[Any, list[Any]]] = field(default_factory=list, init=False)
    """Placement groups, the oldest first, with the actors of their nodes."""
    _brokers: Any = field(init=False)

    def __post_init__(self) -> None:
        where = NodeAffinitySchedulingStrategy(_machine(), soft=False)
        place = ["--service", str(self.service), "--address", ray.util.get_node_ip_address()]
        if self._is_temporary:
            place += ["--run-dir", f"{self.service}/run"]  # removed with it
        actor = ray.remote(Program).options(num_cpus=0, max_restarts=-1, scheduling_strategy=where)
        self._brokers = actor.remote(self._python, "brokers", "serve", "--brokers-only", *place)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def client(self, *, session: str | None = None, timeout_s: float = 30.0) -> RolloutClient:
        """Return a new client of the service, for use on the driver's machine."""
        return RolloutClient(service=self.service, session=session, timeout_s=timeout_s)

    def nodes(self) -> list[RayNode]:
        """List the running nodes; one whose machine was lost is missing until Ray has replaced it."""
        return _asked(self._actors())

    def scale(self, nodes: int) -> None:
        """Start more nodes, or end the youngest ones, which return what they cannot finish within `drain_s`.

        Raises:
            ConfigError: there are not enough machines; the existing nodes continue.
        """
        _check_number(nodes)
        actors = self._actors()
        if nodes > len(actors):
            self._add(nodes - len(actors))
        else:
            self._end(actors[nodes:])

    def stop(self) -> None:
        """End the nodes and then the brokers. Idempotent."""
        self._end(self._actors())
        _stop([self._brokers], STOP_S)
        if self._is_temporary:
            shutil.rmtree(self.service, ignore_errors=True)

    def _actors(self) -> list[Any]:
        return [actor for _, actors in self._groups for actor in actors]

    def _add(self, number: int) -> None:
        group = self._place(number)
        resources = dict(self._resources)
        own = {"num_cpus": resources.pop("CPU", 0), "num_gpus": resources.pop("GPU", 0), "resources": resources}
        folder = ServiceFolder.open(self.service)
        for _ in self._looks([self._brokers]):
            if len(folder.broker_endpoints()) == len(folder.rollout_brokers) + 1:
                break
        packed = pack(self.service, NODE_PARTS)
        actors = [
            ray.remote(Node)
            .options(**own, max_restarts=-1, scheduling_strategy=PlacementGroupSchedulingStrategy(group, index))
            .remote(self._python, packed, *self._flags)
            for index in range(number)
        ]
        self._groups.append((group, actors))
        try:
            self._wait_for(actors)
        except BaseException:
            self._end(actors[:])
            raise

    def _place(self, number: int) -> Any:
        """Reserve a bundle for each new node, apart from the machines that have a node."""
        strategy = "STRICT_SPREAD" if self._strict else "SPREAD"
        taken = {node.ray_node_id for node in self.nodes()}
        apart = [{"ray.io/node-id": f"!in({','.join(sorted(taken))})"}] * number if self._strict and taken else None
        group = placement_group([self._resources] * number, strategy=strategy, bundle_label_selector=apart)
        if group.wait(self._wait_s):
            return group
        remove_placement_group(group)
        machines = [machine["Resources"] for machine in ray.nodes() if machine["Alive"]]
        fit = sum(all(has.get(name, 0) >= wanted for name, wanted in self._resources.items()) for has in machines)
        where = "each on a machine of its own" if self._strict else "on any machines"
        raise ConfigError(
            f"Ray found no room in {self._wait_s:g} s for {number} nodes with {self._resources}, {where}: it has "
            f"{len(machines)} machines, {fit} of that size, {len(taken)} with a node of ours; ask for fewer nodes or "
            "less `resources`, or let several share a machine with strict=False",
            key="nodes",
        )

    def _end(self, ended: list[Any]) -> None:
        _stop(ended, self._drain_s + STOP_S)
        for entry in self._groups[:]:
            group, actors = entry
            actors[:] = [actor for actor in actors if actor not in ended]
            if not actors:
                remove_placement_group(group)
                self._groups.remove(entry)

    def _wait_for(self, actors: list[Any]) -> None:
        """Wait until all of these nodes have reported to the broker."""
        with self.client(timeout_s=self._wait_s) as client:
            for nodes in self._looks(actors):
                there = {stage.node for stage in client.status().stages}
                if len(nodes) == len(actors) and {node.name for node in nodes} <= there:
                    return

    def _looks(self, actors: list[Any]) -> Iterator[list[RayNode]]:
        """Yield the actors' nodes repeatedly, until the time is up or one cannot work."""
        deadline = time.monotonic() + self._wait_s
        while time.monotonic() < deadline:
            found = _asked(actors)
            if problems := [f"{each.name} on {each.address}: {each.problem}" for each in found if each.problem]:
                raise ConfigError("; ".join(problems), key="ray")
            yield found
            time.sleep(CHECK_S)
        raise RequestTimeout(
            f"the service was not ready within {self._wait_s:g} s (`wait_s`); Ray's logs have what it said"
        )


def start(
    nodes: int = 1,
    *,
    slots: Mapping[str, int] | None = None,
    resources: Mapping[str, float] | None = None,
    topology: Path | str | None = None,
    service_dir: Path | str | None = None,
    python: str = sys.executable,
    strict: bool = True,
    drain_s: float = 30.0,
    wait_s: float = 120.0,
) -> RayService:
    """Start a service in the Ray cluster that this process is connected to; it ends with this process at the latest.

    Args:
        nodes: how many nodes to run, each an actor in a placement group.
        slots: a node's concurrent jobs per role (`init`, `run`, `eval`); None: from the topology.
        resources: what Ray reserves for each node; None: `{"CPU": 1}`.
        topology: a topology file for what one node runs; None: that of `prorl init`.
        service_dir: the service's folder on this machine, which a later driver can reuse; None: a new one, which `stop`
            removes.
        python: the interpreter with the extra `server`, at this path on every machine; this process only needs the base
            package.
        strict: each node on its own machine; False: spread over the available machines.
        drain_s: how long an ending node waits for its jobs, in seconds.
        wait_s: longest wait in seconds for Ray to place the nodes, and for them to report.

    Raises:
        ConfigError: Ray is not connected, there are not enough machines, or a program rejected its settings.
        RequestTimeout: the service did not start in time.
    """
    _check_number(nodes)
    if not ray.is_initialized():
        raise ConfigError("this process is not connected to Ray; call ray.init(address='auto') first", key="ray")
    flags = [part for role, number in (slots or {}).items() for part in ("--slots", f"{role}={number}")]
    service = RayService(
        service=_folder(service_dir, topology).path,
        _is_temporary=service_dir is None,
        _python=python,
        _flags=(*flags, "--drain-s", str(drain_s)),
        _resources=dict(resources or {"CPU": 1}),
        _strict=strict,
        _drain_s=drain_s,
        _wait_s=wait_s,
    )
    try:
        service.scale(nodes)
    except BaseException:
        service.stop()
        raise
    return service


def _folder(path: Path | str | None, topology: Path | str | None) -> ServiceFolder:
    place = Path(path if path is not None else tempfile.mkdtemp(prefix="prorl-ray-"))
    if not ServiceFolder.is_made(place):
        return ServiceFolder.create(place, Path(topology) if topology is not None else None)
    if topology is not None:
        raise ConfigError(f"the service has its topology in {place / TOPOLOGY}: change that, without `topology`")
    return ServiceFolder.open(place)


def _check_number(nodes: int) -> None:
    if nodes < 1:
        raise ConfigError(f"a service has at least one node, not {nodes}; `stop` ends all", key="nodes")


def _asked(actors: list[Any]) -> list[RayNode]:
    """Return the descriptions of the actors that run now."""
    asked = [actor.describe.remote() for actor in actors]
    ready, _ = ray.wait(asked, num_returns=len(asked), timeout=ASK_S) if asked else ([], [])
    nodes = []
    for ref in ready:
        with suppress(RayError):
            nodes.append(ray.get(ref))
    return nodes


def _stop(actors: list[Any], limit_s: float) -> None:
    if actors and ray.is_initialized():
        ray.wait([actor.stop.remote(limit_s) for actor in actors], num_returns=len(actors), timeout=limit_s + ASK_S)
        for actor in actors:
            ray.kill(actor)
