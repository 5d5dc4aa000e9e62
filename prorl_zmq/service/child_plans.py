"""The processes that `prorl serve` and `prorl node` start. Pure: starts nothing.

Without a folder, a service is one node, whose processes connect in its run folder or at fixed endpoints. With one,
brokers announce free TCP ports there, and a node's stage processes connect to the node's broker in its run folder.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..config import GatewaySettings, SecuritySettings
from .process_plans import BrokerPlan, EnginePlan, HttpPlan, StagePlan, pinned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..config import Topology
    from .process_plans import AnyPlan
    from .service_folder import ServiceFolder


def plan_children(topology: Topology) -> list[AnyPlan]:
    """List the processes of a service without a folder, in starting order."""
    topology = pinned(topology)
    front_door = topology.endpoint(topology.rollout_broker.front_door)
    return [
        BrokerPlan(kind="backend", name="backend-broker", topology=topology),
        BrokerPlan(kind="rollout", name="rollout-broker", topology=topology),
        *_engines(topology, "engine", connect=topology.endpoint(topology.backend_broker.endpoint)),
        *_stages(topology, topology.endpoint(topology.rollout_broker.stage_events)),
        *_http(topology, front_door=front_door),
        *_metrics(topology),
    ]


def plan_brokers(topology: Topology, folder: ServiceFolder, address: str) -> list[AnyPlan]:
    """List the brokers of a service with a folder, its gateway and its dashboard."""
    topology, service = _with_folders_keys(topology), str(folder.path)
    return [
        BrokerPlan(kind="backend", name="backend-broker", topology=topology, service=service, address=address),
        *(
            BrokerPlan(kind="rollout", name=name, topology=topology, service=service, address=address)
            for name in folder.rollout_brokers
        ),
        *_http(topology, service=service),
    ]


def plan_node(topology: Topology, folder: ServiceFolder, address: str) -> list[AnyPlan]:
    """List the processes of one node of a service with a folder."""
    topology, service = pinned(topology), str(folder.path)
    with_keys = replace(topology, security=SecuritySettings(str(folder.keys("node"))))
    plans: list[AnyPlan] = []
    if topology.stage:
        plans.append(BrokerPlan(kind="node", name="node-broker", topology=topology, service=service, address=address))
    plans += _engines(with_keys, f"{topology.node}-engine", service=service, bind=f"tcp://{address}:*")
    plans += _stages(with_keys, node_stage_events(topology))
    return [*plans, *_metrics(_with_folders_keys(topology), service)]


def node_stage_events(topology: Topology) -> str:
    """Return the endpoint of a node's broker for its stage processes."""
    return topology.endpoint("ipc://{run_dir}/stage_events")


def _with_folders_keys(topology: Topology) -> Topology:
    """Return a topology without keys: each process takes the keys of its kind from the service's folder."""
    return replace(pinned(topology), security=SecuritySettings())


def _engines(
    topology: Topology, prefix: str, *, connect: str = "", service: str = "", bind: str = ""
) -> Iterator[EnginePlan]:
    engines = [each for backends in topology.backends for each in backends.each()]
    for number, backend in enumerate(engines):
        name = f"{prefix}-{number}"
        yield EnginePlan(name=name, topology=topology, backend=backend, connect=connect, service=service, bind=bind)


def _stages(topology: Topology, connect: str) -> list[StagePlan]:
    plans: list[StagePlan] = []
    for stage in topology.stage:
        for _ in range(stage.processes):
            name = f"{stage.role}-{sum(plan.role == stage.role for plan in plans)}"
            plans.append(StagePlan(name=name, topology=topology, role=stage.role, slots=stage.slots, connect=connect))
    return plans


def dashboard_settings(topology: Topology) -> GatewaySettings:
    """Return where a dashboard listens, with the gateway's certificate."""
    return GatewaySettings(
        topology.dashboard.bind, topology.gateway.tls_cert, topology.gateway.tls_key, use_llm_servers=False
    )


def _http(topology: Topology, *, front_door: str = "", service: str = "") -> Iterator[HttpPlan]:
    """Plan the gateway and the dashboard, which has the gateway's certificate."""
    gateway, dashboard = topology.gateway, dashboard_settings(topology)
    plan = partial(HttpPlan, topology=topology, service=service, front_door=front_door)
    if gateway.bind:
        yield plan(name="gateway", serves="gateway", settings=gateway)
    if dashboard.bind:
        yield plan(name="dashboard", serves="dashboard", settings=dashboard)


def _metrics(topology: Topology, service: str = "") -> Iterator[HttpPlan]:
    """Plan the server of this run folder's metrics: a gateway with nothing else."""
    bound = topology.metrics
    if bound.bind:
        settings = GatewaySettings(bound.bind, bound.tls_cert, bound.tls_key)
        yield HttpPlan(name="metrics", serves="metrics", topology=topology, service=service, settings=settings)
