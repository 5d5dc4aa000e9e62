"""A rollout service inside a Ray cluster, beside the trainer that runs there: `start` returns it.

Ray places the processes, restarts them and ends them; all data goes over the service's own sockets, with keys. The
brokers are one actor on the driver's machine. Each node is an actor in a placement group that runs `prorl node`.
A program dies with its actor (PR_SET_PDEATHSIG), an actor whose program died is started again by Ray, and all actors
end with the driver.

The service's folder is on the driver's machine. No file system has to be shared: a node's actor gets a copy of what a
node needs (its key, the topology, the brokers' endpoints) among the arguments of the actor, so Ray's own connections
carry the key. Whoever can start actors in a Ray cluster can run programs as its user anyway.

When a machine is lost, the broker restarts its jobs on other nodes, and Ray starts the actor on another machine as soon
as one has room. Left out on purpose: brokers that survive the driver's machine, on which the trainer dies too.
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
from dataclasses import dataclass
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
    from collections.abc import Iterator, Mapping, Sequence

NODE_PARTS = (MARKER, TOPOLOGY, "keys/node", "keys/client", "brokers")
"""What a node needs of the service's folder."""
USAGE_ERROR = 2
STOP_S = 45.0
"""How long a program may take to end beyond its drain."""
ASK_S = 5.0
"""Longest wait for what an actor says of itself; one that Ray is restarting says nothing."""
CHECK_S = 0.5
LAUNCH = """
import os, signal, sys
from prorl_zmq.system.processes import die_with_parent
die_with_parent(int(sys.argv[1]))
signal.pthread_sigmask(signal.SIG_SETMASK, ())
os.execv(sys.executable, [sys.executable, "-P", "-m", "prorl_zmq.cli", "prorl", *sys.argv[2:]])
"""
"""What the child does first: it dies with the actor's main thread, and takes SIGINT, which Ray blocks and
sandboxes interrupt cells with. Not in the forked child, as Ray's workers have many threads."""
LINES = 5
"""Of a program's last words, in errors."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node of the service, as its actor describes it."""

    name: str
    """As `prorl status` and a job's history show it; an actor that was restarted has a new one."""
    address: str
    ray_node_id: str
    pid: int
    """Of `prorl node`."""
    problem: str = ""
    """Why it does no work; empty: it does."""


class Program:
    """An actor's child: it dies with the actor, and the actor with it, so that Ray starts both again."""

    def __init__(self, python: str, *arguments: str) -> None:
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

    @property
    def pid(self) -> int:
        return self._child.pid

    def problem(self) -> str:
        """Return how the program ended, if it did and is not to be started again."""
        code = self._child.poll()
        return "" if code is None else f"it ended with code {code}: {''.join(self._said).strip()}"

    def stop(self, limit_s: float) -> None:
        """End the program in good order, or kill it after a while."""
        self._stopping = True
        self._child.terminate()
        try:
            self._child.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._child.kill()

    def _watch(self) -> None:
        assert self._child.stderr is not None
        for line in self._child.stderr:
            sys.stderr.write(line)  # Ray shows it at the driver
            self._said.append(line)
        if self._child.wait() not in (0, USAGE_ERROR) and not self._stopping:
            os._exit(1)


class Brokers:
    """The actor of all brokers, on the driver's machine."""

    def __init__(self, python: str, folder: str) -> None:
        address = ray.util.get_node_ip_address()
        self._program = Program(python, "serve", "--service", folder, "--brokers-only", "--address", address)

    def describe(self) -> RayNode:
        return _described("brokers", self._program)

    def stop(self, limit_s: float) -> None:
        self._program.stop(limit_s)


class Node:
    """The actor of one node, with a copy of the service's folder."""

    def __init__(self, python: str, packed: bytes, flags: Sequence[str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="prorl-ray-node-"))
        unpack(packed, self._folder)
        self._name = f"ray-{ray.get_runtime_context().get_node_id()[:8]}-{os.getpid()}"
        place = ("--name", self._name, "--address", ray.util.get_node_ip_address(), "--run-dir", f"{self._folder}/run")
        self._program = Program(python, "node", "--service", str(self._folder), *place, *flags)

    def describe(self) -> RayNode:
        return _described(self._name, self._program)

    def stop(self, limit_s: float) -> None:
        self._program.stop(limit_s)
        shutil.rmtree(self._folder, ignore_errors=True)


def _described(name: str, program: Program) -> RayNode:
    node_id = ray.get_runtime_context().get_node_id()
    return RayNode(name, ray.util.get_node_ip_address(), node_id, program.pid, program.problem())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    slots: dict[str, int]
    resources: dict[str, float]
    python: str
    strict: bool
    drain_s: float
    wait_s: float


class RayService:
    """A service in a Ray cluster; as a context it stops at the end. `start` makes one."""

    def __init__(self, folder: ServiceFolder, options: _Options, *, temporary: bool) -> None:
        self.service = folder.path
        """The service's folder, on the driver's machine: keys, endpoints, journals."""
        self._folder = folder
        self._options = options
        self._temporary = temporary
        self._groups: list[tuple[Any, list[Any]]] = []
        """Placement groups, the oldest first, and the actors of nodes in each."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._brokers = (
            ray.remote(Brokers)
            .options(num_cpus=0, max_restarts=-1, scheduling_strategy=here)
            .remote(options.python, str(folder.path))
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def client(self, *, session: str | None = None, timeout_s: float = 30.0) -> RolloutClient:
        """Return a new client of the service, for use on the driver's machine."""
        return RolloutClient(service=self.service, session=session, timeout_s=timeout_s)

    def nodes(self) -> list[RayNode]:
        """List the nodes that run now; one whose machine was lost is missing until Ray has another for it."""
        return _asked(self._actors())

    def scale(self, nodes: int) -> None:
        """Start further nodes, or end the youngest ones, which give back what they cannot end in `drain_s`.

        Raises:
            ConfigError: there are no machines for them; those that were there before go on.
        """
        _check_number(nodes)
        actors = self._actors()
        if nodes > len(actors):
            self._add(nodes - len(actors))
        else:
            self._end(actors[nodes:])

    def stop(self) -> None:
        """End the nodes and then the brokers; a second call does nothing."""
        self._end(self._actors())
        _stop([self._brokers], STOP_S)
        if self._temporary:
            shutil.rmtree(self.service, ignore_errors=True)

    def _wait_for_brokers(self) -> None:
        for _ in self._looks([self._brokers]):
            if len(self._folder.broker_endpoints()) == len(self._folder.rollout_brokers) + 1:
                return

    def _actors(self) -> list[Any]:
        return [actor for _, actors in self._groups for actor in actors]

    def _add(self, number: int) -> None:
        options = self._options
        group = _place(number, options, {node.ray_node_id for node in self.nodes()})
        self._wait_for_brokers()
        resources = dict(options.resources)
        own = {"num_cpus": resources.pop("CPU", 0), "num_gpus": resources.pop("GPU", 0), "resources": resources}
        flags = [part for role, slots in options.slots.items() for part in ("--slots", f"{role}={slots}")]
        packed = pack(self.service, NODE_PARTS)
        actors = [
            ray.remote(Node)
            .options(**own, max_restarts=-1, scheduling_strategy=PlacementGroupSchedulingStrategy(group, index))
            .remote(options.python, packed, (*flags, "--drain-s", str(options.drain_s)))
            for index in range(number)
        ]
        self._groups.append((group, actors))
        try:
            self._wait_for(actors)
        except BaseException:
            self._end(actors[:])
            raise

    def _end(self, ended: list[Any]) -> None:
        _stop(ended, self._options.drain_s + STOP_S)
        for entry in self._groups[:]:
            group, actors = entry
            actors[:] = [actor for actor in actors if actor not in ended]
            if not actors:
                remove_placement_group(group)
                self._groups.remove(entry)

    def _wait_for(self, actors: list[Any]) -> None:
        """Wait until the broker has heard from all of these nodes."""
        with self.client() as client:
            for nodes in self._looks(actors):
                there = {stage.node for stage in client.status().stages}
                if len(nodes) == len(actors) and {node.name for node in nodes} <= there:
                    return

    def _looks(self, actors: list[Any]) -> Iterator[list[RayNode]]:
        """Look at actors again and again until the time is up or one of them cannot work."""
        deadline = time.monotonic() + self._options.wait_s
        while time.monotonic() < deadline:
            found = _asked(actors)
            if problems := [f"{each.name} on {each.address}: {each.problem}" for each in found if each.problem]:
                raise ConfigError("; ".join(problems), key="ray")
            yield found
            time.sleep(CHECK_S)
        raise RequestTimeout(
            f"the service was not ready within {self._options.wait_s:g} s (`wait_s`); Ray's logs have what it said"
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
        slots: jobs at a time per role (`init`, `run`, `eval`) of a node; None: as the topology says.
        resources: what Ray reserves for each node; None: `{"CPU": 1}`.
        topology: a topology file, which says what one node runs; None: that of `prorl init`.
        service_dir: the service's folder on this machine, for a service that is continued after its driver has ended;
            None: a new one, which is removed by `stop`.
        python: the interpreter that has `prorl-zmq[server]`, on every machine at this path. This process needs only
            the base package.
        strict: each node on a machine of its own; False: spread as far as there are machines.
        drain_s: how long a node that ends waits for its jobs.
        wait_s: longest wait for Ray to place the nodes, and for them to report.

    Raises:
        ConfigError: Ray is not connected, there are no machines for so many nodes, or a program refused its settings.
        RequestTimeout: the service did not start in time.
    """
    _check_number(nodes)
    if not ray.is_initialized():
        raise ConfigError("this process is not connected to Ray; call ray.init(address='auto') first", key="ray")
    folder = _folder(service_dir, topology)
    options = _Options(
        slots=dict(slots or {}),
        resources=dict(resources or {"CPU": 1}),
        python=python,
        strict=strict,
        drain_s=drain_s,
        wait_s=wait_s,
    )
    service = RayService(folder, options, temporary=service_dir is None)
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


def _place(number: int, options: _Options, taken: set[str]) -> Any:
    """Reserve a bundle for each of a number of nodes, apart from the machines that have one already."""
    strategy = "STRICT_SPREAD" if options.strict else "SPREAD"
    apart = [{"ray.io/node-id": f"!in({','.join(sorted(taken))})"}] * number if options.strict and taken else None
    group = placement_group([options.resources] * number, strategy=strategy, bundle_label_selector=apart)
    if group.wait(options.wait_s):
        return group
    remove_placement_group(group)
    machines = [machine["Resources"] for machine in ray.nodes() if machine["Alive"]]
    fit = sum(all(has.get(name, 0) >= wanted for name, wanted in options.resources.items()) for has in machines)
    where = "each on a machine of its own" if options.strict else "on any machines"
    raise ConfigError(
        f"Ray found no room in {options.wait_s:g} s for {number} nodes with {options.resources}, {where}: it has "
        f"{len(machines)} machines, {fit} of that size, {len(taken)} with a node of ours; ask for fewer nodes or "
        "less `resources`, or let several share a machine with strict=False",
        key="nodes",
    )


def _asked(actors: list[Any]) -> list[RayNode]:
    """Return what those actors say that run now."""
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
