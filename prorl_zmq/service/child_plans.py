"""Which processes `prorl serve` and `prorl node` start, with all their flags. Pure: nothing is started here.

A service without a folder is one node, whose processes meet in its run folder or at fixed endpoints. With a folder, the
brokers take free TCP ports and announce them there; a node's stage processes meet its own broker in the run folder.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from .service_folder import TOPOLOGY

if TYPE_CHECKING:
    from pathlib import Path

    from ..config import BackendSettings, GatewaySettings, MetricsSettings, Topology
    from .service_folder import ServiceFolder

BROKER_RANK, ENGINE_RANK, STAGE_RANK = 0, 1, 2
NODE_BROKER = "node-broker"
FORKED_KINDS = ("embedded", "http")
"""Kinds of engines whose hosts import nothing that a fork could not use."""


@dataclass(frozen=True, slots=True)
class ChildPlan:
    name: str
    arguments: tuple[str, ...]
    """Of `python -m prorl_zmq.cli`."""
    rank: int
    """Children end in descending order of rank: first those that work, last the brokers."""
    python: str = sys.executable
    role: str = ""
    """A stage process's."""
    serves_http: bool = False
    forked: bool = True
    """It may be a fork of a process that has imported this package; else it is a fresh interpreter."""

    @property
    def of_node(self) -> bool:
        """Whether it works for the node alone, and ends with it."""
        return bool(self.role) or self.rank == ENGINE_RANK or self.name == NODE_BROKER

    @property
    def process(self) -> str:
        """What kind of process it is, as metrics name it."""
        if self.role:
            return f"stage_{self.role}"
        if self.rank == ENGINE_RANK:
            return "engine"
        return f"{self.arguments[2]}_broker" if self.arguments[1] == "broker" else self.name


def plan_children(topology: Topology, config: Path | None) -> list[ChildPlan]:
    """List the processes of a service without a folder, in the order in which they start."""
    keys = ["--keys", topology.security.keys] if topology.security.keys else []
    shared = [*_shared(topology), *keys, *(["--insecure"] if topology.service.insecure else [])]
    broker = [*(["--config", str(config)] if config is not None else []), *shared]
    stage_events = topology.endpoint(topology.rollout_broker.stage_events)
    backend_broker = topology.endpoint(topology.backend_broker.endpoint)
    plans = [
        ChildPlan("backend-broker", ("prorl", "broker", "backend", *broker), BROKER_RANK),
        ChildPlan("rollout-broker", ("prorl", "broker", "rollout", *broker), BROKER_RANK),
        *_engines(topology, ["--connect", backend_broker, *shared], "engine"),
        *_stages(topology, ["--connect", stage_events, *shared]),
    ]
    if topology.gateway.bind:
        front_door = topology.endpoint(topology.rollout_broker.front_door)
        plans.append(_gateway(topology, ["--front-door", front_door, *shared]))
    if topology.dashboard.bind:
        place = ["--connect", topology.endpoint(topology.rollout_broker.front_door), *shared]
        plans.append(_dashboard(topology, place))
    return plans + _metrics(topology.metrics, shared)


def plan_brokers(topology: Topology, folder: ServiceFolder, address: str) -> list[ChildPlan]:
    """List the brokers of a service with a folder, its gateway and its dashboard."""
    place = ["--service", str(folder.path), "--address", address, *_shared(topology)]
    settings = ["--config", str(folder.path / TOPOLOGY), *place]
    brokers = [ChildPlan("backend-broker", ("prorl", "broker", "backend", *settings), BROKER_RANK)]
    brokers += [
        ChildPlan(name, ("prorl", "broker", "rollout", "--name", name, *settings), BROKER_RANK)
        for name in folder.rollout_brokers
    ]
    if topology.gateway.bind:
        brokers.append(_gateway(topology, ["--service", str(folder.path), *_shared(topology)]))
    if topology.dashboard.bind:
        brokers.append(_dashboard(topology, ["--service", str(folder.path), *_shared(topology)]))
    return brokers


def plan_node(topology: Topology, folder: ServiceFolder, address: str) -> list[ChildPlan]:
    """List the processes of one node of a service with a folder."""
    keys = ["--keys", str(folder.keys("node")), *_shared(topology)]
    plans = []
    if topology.stage:
        place = ["--service", str(folder.path), "--address", address, "--node", topology.node, *_shared(topology)]
        plans.append(ChildPlan(NODE_BROKER, ("prorl", "broker", "node", *place), BROKER_RANK))
    engine = ["--service", str(folder.path), "--bind", f"tcp://{address}:*", *keys]
    plans += _engines(topology, engine, f"{topology.node}-engine")
    plans += _stages(topology, ["--connect", node_stage_events(topology), *keys])
    return plans + _metrics(topology.metrics, ["--service", str(folder.path), *_shared(topology)])


def node_stage_events(topology: Topology) -> str:
    """Return where a node's broker is, for its stage processes."""
    return topology.endpoint("ipc://{run_dir}/stage_events")


def _shared(topology: Topology) -> list[str]:
    service = topology.service
    logs = ["--log-format", service.log_format, "--log-level", service.log_level]
    return ["--run-dir", str(topology.run_dir), *logs]


def _engines(topology: Topology, place: list[str], prefix: str) -> list[ChildPlan]:
    plans: list[ChildPlan] = []
    for backends in topology.backends:
        for index in range(backends.engines):
            name = f"{prefix}-{len(plans)}"
            flags = ["--name", name, "--node", topology.node, *place, *_engine_arguments(backends, index)]
            python = backends.python or sys.executable
            forked = python == sys.executable and backends.kind in FORKED_KINDS
            plans.append(ChildPlan(name, ("prorl-engine", *flags), ENGINE_RANK, python, forked=forked))
    return plans


def _stages(topology: Topology, place: list[str]) -> list[ChildPlan]:
    plans: list[ChildPlan] = []
    sandbox = ["--sandbox", topology.sandbox.kind, "--image", topology.sandbox.image]
    folders = [part for folder in topology.sandbox.image_folders for part in ("--image-folder", folder)]
    modules = [part for file in topology.service.task_modules for part in ("--task-module", file)]
    for stage in topology.stage:
        for _ in range(stage.processes):
            name = f"{stage.role}-{sum(plan.role == stage.role for plan in plans)}"
            work = ["--role", stage.role, "--slots", str(stage.slots), "--node", topology.node]
            arguments = ("prorl-stage", *work, *sandbox, *folders, *modules, *place)
            plans.append(ChildPlan(name, arguments, STAGE_RANK, role=stage.role))
    return plans


def _gateway(topology: Topology, place: list[str]) -> ChildPlan:
    settings = topology.gateway
    flags = _given({"--tokenizer": settings.tokenizer, "--runs": topology.dashboard.runs})
    more = [] if settings.use_llm_servers else ["--no-llm-servers"]
    arguments = ("prorl", "gateway", *_listening(settings), *flags, *more, *place)
    return ChildPlan("gateway", arguments, STAGE_RANK, serves_http=True)


def _metrics(settings: MetricsSettings, place: list[str]) -> list[ChildPlan]:
    """Return what serves the metrics of this run folder alone: a gateway that knows nothing else."""
    if not settings.bind:
        return []
    arguments = ("prorl", "gateway", "--metrics-only", *_listening(settings), *place)
    return [ChildPlan("metrics", arguments, STAGE_RANK, serves_http=True)]


def _dashboard(topology: Topology, place: list[str]) -> ChildPlan:
    settings = replace(topology.gateway, bind=topology.dashboard.bind)
    flags = _given({"--runs": topology.dashboard.runs})
    flags += ["--read-only"] if topology.dashboard.read_only else []
    arguments = ("prorl", "dashboard", *_listening(settings), *flags, *place)
    return ChildPlan("dashboard", arguments, STAGE_RANK, serves_http=True)


def _listening(settings: GatewaySettings | MetricsSettings) -> list[str]:
    return _given({"--bind": settings.bind, "--tls-cert": settings.tls_cert, "--tls-key": settings.tls_key})


def _given(flags: dict[str, str]) -> list[str]:
    return [part for flag, value in flags.items() if value for part in (flag, value)]


def _engine_arguments(backends: BackendSettings, index: int) -> list[str]:
    """Return the flags of `prorl-engine` for one engine of a kind."""
    flags = {
        "--engine": backends.kind,
        "--model": backends.model,
        "--url": backends.urls[index] if backends.urls else "",
        "--api": backends.api,
        "--tokenizer": backends.tokenizer,
        "--tool-calls": backends.tool_calls,
        "--history": backends.history,
        "--parser-url": backends.parser_url,
        "--gpus": ",".join(map(str, backends.share(backends.gpus, index))),
        "--cores": ",".join(map(str, backends.share(backends.cores, index))),
        "--weight": str(backends.weight),
        "--max-in-flight": str(backends.max_in_flight),
        "--context-tokens": str(backends.context_tokens),
    }
    given = _given(flags)
    for flag, values in (("--template-argument", backends.template_arguments), ("--option", backends.options)):
        given += [part for name, value in values.items() for part in (flag, f"{name}={json.dumps(value)}")]
    return [*given, *(["--", *backends.arguments] if backends.arguments else [])]
