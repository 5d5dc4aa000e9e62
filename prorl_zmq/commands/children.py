"""Runs the process of a plan, which comes from a command's flags or a file of the supervisor."""

from __future__ import annotations

import gc
import logging
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..config import SERVICE_VARIABLE
from ..errors import ConfigError, EndpointInUse, ProrlError
from ..security.keys import VARIABLE, named_folder
from ..service.broker_topologies import backend_topologies, rollout_topologies
from ..service.process_plans import AnyPlan, BrokerPlan, EnginePlan, HttpPlan, StagePlan, read_plan
from ..service.service_folder import BACKENDS, WAIT_S, ServiceFolder
from ..system.logs import keep_secret, say, start_logging
from ..system.node_name import place_of
from ..system.run_folder import own_run_dir
from ..system.traces import tracing
from ..wire.messages.base import new_id
from ..wire.sockets import endpoint_beside
from .exit_codes import INTERRUPTED, complain_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..brokers.journal.journal import Journal
    from ..config import Topology

Broker = TypeVar("Broker")


def run_child(file: Path) -> int:
    """Run the process of a plan's file; print its errors as a line and return its exit code."""
    program = "prorl"
    try:
        plan = read_plan(file)
        program = plan.program
        run(plan)
    except KeyboardInterrupt:
        return INTERRUPTED
    except ProrlError as error:
        return complain_of(program, error)
    return 0


def run(plan: AnyPlan) -> None:
    """Run a process until it ends."""
    match plan:
        case BrokerPlan():
            {"rollout": _run_rollout_broker, "backend": _run_backend_broker, "node": _run_node_broker}[plan.kind](plan)
        case EnginePlan():
            _run_engine(plan)
        case StagePlan():
            _run_stage(plan)
        case HttpPlan():
            _run_http(plan)


def _run_rollout_broker(plan: BrokerPlan) -> None:
    from ..brokers.journal.journal import Journal
    from ..brokers.rollout.rollout_broker import RolloutBroker

    topology, folder = plan.topology, _folder_of(plan)
    _log_as("rollout-broker", topology)
    own_run_dir(topology.run_dir)
    topologies = [topology]
    if folder is not None:
        topologies = list(rollout_topologies(folder, topology, plan.name, plan.address))

    def serve(journal: Journal) -> None:
        gc.disable()  # it would traverse a hundred thousand jobs many times while they are read
        broker = _first_free(lambda tried: RolloutBroker(tried, journal), topologies)
        gc.freeze()
        gc.enable()
        if folder is not None:
            endpoints = {"front_door": broker.front_door, "stage_events": broker.stage_events}
            folder.announce("rollout", plan.name, endpoints)
        broker.run()

    settings = topologies[0].rollout_broker
    with Journal(topologies[0].journal, settings.journal_limit_bytes, sync=settings.journal_sync) as journal:
        serve(journal)


def _run_backend_broker(plan: BrokerPlan) -> None:
    from ..brokers.backends.backend_broker import BackendBroker
    from ..brokers.backends.backend_journal import BackendJournal

    topology, folder = plan.topology, _folder_of(plan)
    _log_as("backend-broker", topology)
    own_run_dir(topology.run_dir)
    path = topology.run_dir / "backends.journal" if folder is None else folder.journal(BACKENDS)
    topologies = [topology] if folder is None else list(backend_topologies(folder, topology, plan.address))
    with BackendJournal(path) as journal:
        broker = _first_free(lambda tried: BackendBroker(tried, journal), topologies)
        if folder is not None:
            folder.announce("backend", BACKENDS, {"endpoint": broker.endpoint})
        broker.run()


def _run_node_broker(plan: BrokerPlan) -> None:
    from ..brokers.node.node_broker import NodeBroker
    from ..service.broker_places import node_id
    from ..service.child_plans import node_stage_events
    from ..tools.node_facts import NodeFactsReader

    topology, folder = plan.topology, ServiceFolder.open(Path(plan.service))
    _log_as("node-broker", topology)
    folder.wait_for(folder.rollout_brokers, WAIT_S)
    run_dir, sandbox = own_run_dir(topology.run_dir), topology.sandbox
    NodeBroker(
        node=topology.node,
        place=place_of(run_dir),
        node_id=node_id(topology.node, os.environ.get(SERVICE_VARIABLE, new_id())),
        stage_events=node_stage_events(topology),
        bind=f"tcp://{plan.address}:*",
        run_dir=run_dir,
        places=folder.stage_events,
        facts=NodeFactsReader(run_dir, sandbox.image, sandbox.image_folders).read,
        keys=folder.keys("node"),
    ).run()


def _run_engine(plan: EnginePlan) -> None:
    from ..inference.hosting.builtin_kinds import API_KEY
    from ..inference.hosting.host import HostOptions
    from ..inference.hosting.host_process import run_engine_host
    from ..inference.weights.copy_folder import used_copy

    topology, backend = plan.topology, plan.backend
    _log_as(plan.name, topology)
    (kind,) = backend.check()
    run_dir = own_run_dir(topology.run_dir)
    keep_secret(os.environ.get(API_KEY))
    folder, keys, broker = _folder_of(plan), _keys_of(topology), plan.connect
    if folder is not None:
        folder.wait_for((BACKENDS,), WAIT_S)
        broker, keys = folder.backend_broker(), keys or folder.keys("node")
    copy = Path(backend.weights_dir or run_dir).expanduser().absolute() / "weights" / backend.name
    options = HostOptions(
        endpoint=plan.bind or endpoint_beside(broker, f"{run_dir}/{plan.name}"),
        backend_broker=broker,
        find_backend_broker=folder.backend_broker if folder is not None else None,
        backend_id=plan.name,
        node=topology.node,
        name=backend.name,
        frozen=backend.frozen,
        weight=backend.weight,
        max_in_flight=backend.max_in_flight,
        insecure=topology.service.insecure,
        keys=keys,
        run_dir=run_dir,
        weights=copy,
        copies_all=bool(backend.weights_dir),
        adapters=run_dir / "adapters" / plan.name / os.environ.get(SERVICE_VARIABLE, "none"),
    )
    if backend.cores:
        _use_cores(backend.cores)
    if backend.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, backend.gpus))
    is_used = options.copies_all and not backend.frozen
    with used_copy(copy, backend.model, run_dir) if is_used else nullcontext():
        run_engine_host(partial(kind.start, plan.weight_version), options)


def _run_stage(plan: StagePlan) -> None:
    import uvloop

    from ..stages.own_tasks import all_handlers
    from ..stages.stage_process import StageOptions, StageProcess

    topology = plan.topology
    options = StageOptions(
        role=plan.role,
        slots=plan.slots,
        connect=plan.connect,
        node=topology.node,
        run_dir=own_run_dir(topology.run_dir),
        bind=plan.bind,
        sandbox=topology.sandbox.kind,
        image=topology.sandbox.image,
        image_folders=tuple(map(Path, topology.sandbox.image_folders)),
        mcp_keys={each.url: each.key() for each in topology.mcp},
        insecure=topology.service.insecure,
        keys=_keys_of(topology),
    )
    left_out: list[str] = []
    modules = map(Path, topology.service.task_modules)
    process = StageProcess(options, all_handlers(modules, plan.tasks, left_out.append))
    _log_as(process.stage_id, topology)
    for warning in left_out:
        say(process.stage_id, warning, logging.WARNING)
    with tracing("stage", process.stage_id):
        uvloop.run(process.run())


def _run_http(plan: HttpPlan) -> None:
    import uvloop

    from ..gateway.server import serve
    from ..gateway.settings import GatewayOptions

    topology, folder, dashboard = plan.topology, _folder_of(plan), plan.topology.dashboard
    _log_as(plan.serves, topology)
    keys = _keys_of(topology)
    if folder is not None:
        keys = keys or folder.keys("operator" if plan.serves == "dashboard" else "service")
    key_folder = named_folder(keys)
    os.environ.pop(VARIABLE, None)  # it may hold bearer tokens only, which are not keys for connections of ours
    options = GatewayOptions(
        front_door=plan.front_door or topology.endpoint(topology.rollout_broker.front_door),
        service=folder,
        settings=plan.settings,
        run_dir=own_run_dir(topology.run_dir),
        name=plan.gateway,
        keys=key_folder,
        insecure=topology.service.insecure,
        timeout_s=plan.timeout_s,
        program="dashboard" if plan.serves == "dashboard" else "gateway",
        runs=Path(dashboard.runs) if dashboard.runs else None,
        read_only=plan.serves == "dashboard" and dashboard.read_only,
        metrics_only=plan.serves == "metrics",
    )
    uvloop.run(serve(options))


def _folder_of(plan: AnyPlan) -> ServiceFolder | None:
    return ServiceFolder.open(Path(plan.service)) if plan.service else None


def _keys_of(topology: Topology) -> Path | None:
    return Path(topology.security.keys) if topology.security.keys else None


def _log_as(process: str, topology: Topology) -> None:
    start_logging(process, topology.service.log_format, topology.service.log_level)


def _first_free(make: Callable[[Topology], Broker], topologies: Sequence[Topology]) -> Broker:
    for topology in topologies[:-1]:
        try:
            return make(topology)
        except EndpointInUse as error:
            say("prorl broker", f"{error.message}; taking another port", logging.WARNING)
    return make(topologies[-1])


def _use_cores(cores: Sequence[int]) -> None:
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        there = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
        raise ConfigError(f"cores: this process may use cores {there}, not {[*cores]}", key="cores") from error
