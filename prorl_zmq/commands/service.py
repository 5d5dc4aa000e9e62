"""`prorl serve`."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ..config import SecuritySettings, Topology
from ..errors import ConfigError, SandboxUnavailable
from ..service.preloading import begun_fork_server
from ..service.run_dir import LOCK
from ..service.service_folder import BACKENDS, NODES, TOPOLOGY, ServiceFolder
from ..service.service_folder import LOCK as SERVICE_LOCK
from ..system.http_address import http_address
from ..system.logs import say, start_logging
from ..system.node_name import short_id
from ..system.run_folder import own_run_dir
from ..system.run_places import shared_run_dir
from . import options
from .earlier_training import Journals, continue_training, training_of
from .option_groups import LogOptions, ProcessOptions, SandboxOptions
from .tables import console

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress

    from ..service.supervisor import Drain, Startup, Supervisor


class StartupLine:
    """A supervisor's progress at start: a bar on a terminal, plain lines in a pipe."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._started = time.monotonic()
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
            self._progress = Progress(*columns, console=console(stderr=True), transient=True)
            self._task = self._progress.add_task("starting", total=None)
            self._progress.start()

    def show(self, startup: Startup) -> None:
        text = f"waiting for {startup.missing}"
        if self._progress is not None:
            self._progress.update(self._task, completed=startup.there, total=startup.total, description=text)
        else:
            spent = time.monotonic() - self._started
            say(self._program, f"{startup.there} of {startup.total} processes ready after {spent:.0f} s, {text}")

    def close(self) -> None:
        """Remove the bar; a second call does nothing."""
        if self._progress is not None:
            self._progress.stop()


def serve(
    process: ProcessOptions,
    sandboxes: SandboxOptions,
    config: options.Config = None,
    name: options.Name = None,
    service: options.ServiceDir = None,
    address: options.Address = "",
    brokers_only: Annotated[
        bool, typer.Option("--brokers-only", help="--service: no stage processes and engines here; see `prorl node`.")
    ] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="--service: also if another one holds the folder, which then ends.")
    ] = False,
    new_training: Annotated[
        bool | None,
        typer.Option(
            "--new-training/--continue-training",
            help="Whether to forget the weight version that an earlier training announced here. [default: ask on a "
            "terminal; else continue it, unless it was of another model]",
        ),
    ] = None,
    drain_s: options.DrainTime = options.DRAIN_S,
    metrics: options.Metrics = None,
    log_dir: options.LogDir = None,
) -> None:
    """Start and supervise all processes of a service on this node, until SIGTERM or Ctrl-C.

    It stays in the foreground, restarts processes that die, and ends them in order; a second signal kills those that
    remain. An engine that is never ready is started three times; then this command, `prorl status` and `prorl backends
    list` report why it failed. It notifies systemd (`Type=notify`, `WatchdogSec`). Exit codes: 0 stopped on request; 1
    it could not do its work; 2 a wrong flag, file or setting, its own or that of a process that it starts.

    With --name NAME, a service has a run folder of its own. Its clients and commands find it by --name NAME,
    `RolloutClient("NAME")` or PRORL_NAME; `prorl services` lists the services of this machine.

    A service that is started again continues the training before it: engines of older weights than were announced load
    them again, or get no jobs. On a terminal this command asks whether it is a new training instead. Elsewhere it ends
    with code 2 if the training was of another model, or, in the run folder that services without a name share, of
    another topology file.

    With --service DIR, the brokers bind free ports, and all other nodes, trainers and commands find them and their keys
    in that folder, which is made if it is missing; --config is then copied into it.
    """
    if service is not None:
        if name is not None:
            raise ConfigError("--service DIR is the service's name; leave out --name", key="name")
        if process.keys is not None or process.insecure:
            raise ConfigError("--service makes keys of its own; leave out --keys and --insecure", key="keys")
        folder = _folder_of(service, config)
        topology = node_topology(folder, process, f"{short_id(str(folder.path))}-brokers")
        topology = with_metrics(sandboxes.applied(topology), metrics)
        rollouts = tuple(map(folder.journal, folder.rollout_brokers))
        journals = Journals(folder.journal(BACKENDS), rollouts, folder.path / SERVICE_LOCK)
        settle = partial(continue_training, journals, training_of(topology), forget=new_training)
        if brokers_only:
            topology = msgspec.structs.replace(topology, stage=(), backends=())
        _serve_folder(folder, topology, settle, address, log_dir, drain_s, take_over=take_over)
        return
    if address or brokers_only or take_over:
        raise ConfigError("--address, --brokers-only and --take-over go with --service DIR", key="service")
    topology = options.named(process.topology(config), name, process.run_dir)
    topology = with_metrics(sandboxes.applied(topology), metrics)
    _serve_alone(topology, config, log_dir, drain_s, new_training=new_training)


def _serve_alone(
    topology: Topology, config: Path | None, log_dir: Path | None, drain_s: float, *, new_training: bool | None
) -> None:
    if topology.service.rollout_brokers > 1:
        raise ConfigError(
            "service.rollout_brokers: more than one find each other by way of a folder: `prorl serve --service DIR`",
            key="service.rollout_brokers",
        )
    start_logging("serve", topology.service.log_format, topology.service.log_level)
    with begun_fork_server() as server:
        from ..service.broker_places import fixed_places
        from ..service.checks import check_connections
        from ..service.child_plans import plan_children
        from ..service.supervisor import Supervisor

        check_sandboxes(topology, "prorl serve")
        check_connections(topology)
        if topology.journal is not None:
            folder = own_run_dir(topology.run_dir)
            journals = Journals(folder / "backends.journal", (topology.journal,), folder / LOCK)
            training = training_of(topology, config if folder == shared_run_dir() else None)
            continue_training(journals, training, forget=new_training)
            _say_resumed(topology.journal)
        door = topology.endpoint(topology.rollout_broker.front_door)
        drain = drain_of(topology, topology.run_dir, drain_s, ends=False)
        plans, places = plan_children(topology), fixed_places(topology)
        supervisor = Supervisor(topology, plans, places, server, log_dir, drain=drain)
        supervise(supervisor, "prorl serve", f"ready at {door}")


def _serve_folder(
    folder: ServiceFolder,
    topology: Topology,
    settle: Callable[[], None],
    address: str,
    log_dir: Path | None,
    drain_s: float,
    *,
    take_over: bool,
) -> None:
    start_logging("serve", topology.service.log_format, topology.service.log_level)
    address = options.checked_address(address)
    if topology.stage:
        check_sandboxes(topology, "prorl serve")
    settle()
    with folder.held(take_over=take_over) as lock, begun_fork_server() as server:
        from ..service.broker_places import announced_places
        from ..service.child_plans import plan_brokers, plan_node
        from ..service.supervisor import Supervisor

        for name in folder.rollout_brokers:
            _say_resumed(folder.journal(name))
        plans = [*plan_brokers(topology, folder, address), *plan_node(topology, folder, address)]
        places = announced_places(folder, topology.node, of_ours=True)
        drain = drain_of(topology, folder.path / NODES, drain_s, ends=False)
        supervisor = Supervisor(topology, plans, places, server, log_dir, is_lost=lock.is_lost, drain=drain)
        supervise(supervisor, "prorl serve", f"ready; clients and nodes find it with --service {folder.path}")


def drain_of(topology: Topology, folder: Path, limit_s: float, *, ends: bool) -> Drain | None:
    """Return how `prorl drain` reaches this command's node, by files in a folder; None: it has no node."""
    from ..service.node_drain import DrainRequests
    from ..service.supervisor import Drain

    if not topology.stage and not topology.backends:
        return None
    is_asked = partial(DrainRequests(folder).withdraw, topology.node)
    is_asked()  # of an earlier run
    return Drain(is_asked, limit_s, ends)


def _folder_of(path: Path, config: Path | None) -> ServiceFolder:
    """Open a service's folder, or make one."""
    if not ServiceFolder.is_made(path):
        folder = ServiceFolder.create(path, config)
        say("prorl serve", f"made {folder.path} and its keys")
        return folder
    folder = ServiceFolder.open(path)
    if config is not None and not (config.exists() and config.samefile(folder.path / TOPOLOGY)):
        raise ConfigError(f"this service has its topology in {folder.path / TOPOLOGY}: change that, without --config")
    return folder


def node_topology(folder: ServiceFolder, process: LogOptions, name: str) -> Topology:
    """Return the topology of a service's folder for one node, whose run folder has its own name by default."""
    place = process.run_dir or Path(tempfile.gettempdir(), f"prorl-{os.getuid()}-{name}")
    topology = replace(process, run_dir=place).applied(folder.topology())
    return msgspec.structs.replace(topology, security=SecuritySettings(str(folder.keys("node"))))


def with_metrics(topology: Topology, bind: str | None) -> Topology:
    """Apply `--metrics`.

    Raises:
        ConfigError: it is not HOST:PORT.
    """
    if bind is None:
        return topology
    if bind:
        http_address(bind, "--metrics ", key="metrics")
    return msgspec.structs.replace(topology, metrics=msgspec.structs.replace(topology.metrics, bind=bind))


def check_sandboxes(topology: Topology, program: str) -> None:
    """Raise `SandboxUnavailable` unless this machine can make the topology's sandboxes."""
    from ..tools.containers.kinds import container_class

    kind = topology.sandbox.kind
    if not (topology.sandbox.image or topology.sandbox.image_folders):
        container = container_class(kind)
        if (problem := container.problem()) is not None:
            raise SandboxUnavailable(problem, kind=kind)
        _say_isolation(program, isolated=container.isolated)
        return
    from ..tools.sandbox.sandboxes import Sandboxes

    folders = tuple(map(Path, topology.sandbox.image_folders))
    keys_named = Path(topology.security.keys) if topology.security.keys else None
    place = (topology.run_dir / "sandboxes", topology.node)
    sandboxes = Sandboxes(kind, *place, topology.sandbox.image, image_folders=folders, keys=keys_named)
    sandboxes.check()
    _say_isolation(program, isolated=sandboxes.isolated)


def _say_isolation(program: str, *, isolated: bool) -> None:
    if not isolated:
        say(program, "sandboxes are plain processes: what the model runs is not isolated")


def _say_resumed(journal: Path) -> None:
    from ..brokers.journal.journal_summary import has_begun, read_summary

    if has_begun(journal):
        kept = read_summary(journal)
        if kept.jobs or kept.results:
            counts = f"{kept.jobs} jobs and {kept.results} uncollected results"
            say("prorl serve", f"resuming {counts} of {kept.path} (`prorl journal clear` forgets them)")


def supervise(supervisor: Supervisor, program: str, ready: str) -> None:
    """Run a supervisor, and show the progress of its start."""
    with closing(StartupLine(program)) as line:

        def on_ready() -> None:
            line.close()
            say(program, ready)

        asyncio.run(supervisor.run(line.show, on_ready))
