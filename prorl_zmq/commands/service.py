"""`prorl serve` and `prorl broker`."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..config import Topology, own_run_dir
from ..system.logs import say, start_logging
from . import options

if TYPE_CHECKING:
    from ..service.supervisor import Startup

broker = typer.Typer(help="One broker alone, for a service on several nodes.", rich_markup_mode=None)


class StartupLine:
    """What `prorl serve` shows while it starts: a bar on a terminal, plain lines in a pipe."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            columns = (SpinnerColumn(), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress(
                *columns, TextColumn("{task.description}"), console=options.console(stderr=True), transient=True
            )
            self._task = self._progress.add_task("starting", total=None)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def show(self, startup: Startup) -> None:
        text = f"waiting for {startup.missing}"
        if self._progress is not None:
            self._progress.update(self._task, completed=startup.there, total=startup.total, description=text)
        else:
            spent = time.monotonic() - self._started
            say("prorl serve", f"{startup.there} of {startup.total} processes ready after {spent:.0f} s, {text}")

    def close(self) -> None:
        """Take the bar away; a second call does nothing."""
        if self._progress is not None:
            self._progress.stop()


def serve(
    config: options.Config = None,
    run_dir: options.RunDir = None,
    sandbox: options.Sandbox = None,
    image: options.Image = None,
    insecure: options.Insecure = False,
    keys: options.Keys = None,
    log_dir: Annotated[Path | None, typer.Option(help="For one log file per process. [default: stderr]")] = None,
    log_format: options.LogFormatOption = None,
    log_level: options.LogLevelOption = None,
) -> None:
    """Start and supervise all processes of a service on this node, until SIGTERM or Ctrl-C.

    It stays in the foreground, restarts what dies, and ends its processes in order; a second signal kills those that
    are still there. An engine that is never ready is started three times; then this command, `prorl status` and `prorl
    backends list` say why it failed. With systemd (`Type=notify`) it reports when it is ready, what it waits for, and,
    with `WatchdogSec`, that it lives. Exit codes: 0 stopped on request; 1 it could not do its work; 2 a wrong flag,
    file or setting, its own or that of a process that it starts.
    """
    from ..brokers.journal.journal_summary import has_begun, read_summary
    from ..service.supervisor import Supervisor
    from ..tools.sandbox.sandboxes import Sandboxes

    topology = options.topology_of(config, run_dir, insecure, keys, log_format, log_level)
    start_logging("serve", topology.service.log_format, topology.service.log_level)
    named = {name: value for name, value in (("kind", sandbox), ("image", image)) if value is not None}
    topology = msgspec.structs.replace(topology, sandbox=msgspec.structs.replace(topology.sandbox, **named))
    folders = tuple(map(Path, topology.sandbox.image_folders))
    keys_named = Path(topology.security.keys) if topology.security.keys else None
    place = (topology.run_dir / "sandboxes", topology.service.node)
    sandboxes = Sandboxes(topology.sandbox.kind, *place, image_folders=folders, keys=keys_named)
    sandboxes.check()
    if not sandboxes.isolated:
        say("prorl serve", "sandboxes are plain processes: what the model runs is not isolated")
    if topology.journal is not None and has_begun(topology.journal):
        kept = read_summary(topology.journal)
        if kept.jobs or kept.results:
            counts = f"{kept.jobs} jobs and {kept.results} uncollected results"
            say("prorl serve", f"resuming {counts} of {kept.path} (`prorl journal clear` forgets them)")
    door = topology.endpoint(topology.rollout_broker.front_door)

    with StartupLine() as line:

        def on_ready() -> None:
            line.close()
            say("prorl serve", f"ready at {door}")

        asyncio.run(Supervisor(topology, config, log_dir).run(line.show, on_ready))


@broker.command()
@options.taking(options.topology_of)
def rollout(topology: Topology) -> None:
    """The front door, the job table and the stages' events."""
    from ..brokers.journal.disk_journal import DiskJournal
    from ..brokers.journal.journal import MemoryJournal
    from ..brokers.rollout.rollout_broker import RolloutBroker

    start_logging("rollout-broker", topology.service.log_format, topology.service.log_level)
    own_run_dir(topology.run_dir)
    settings = topology.rollout_broker
    if topology.journal is None:
        RolloutBroker(topology, MemoryJournal()).run()
        return
    with DiskJournal(topology.journal, settings.journal_limit_bytes, sync=settings.journal_sync) as journal:
        gc.disable()  # it would go through a hundred thousand jobs many times while they are read
        broker = RolloutBroker(topology, journal)
        gc.freeze()
        gc.enable()
        broker.run()


@broker.command()
@options.taking(options.topology_of)
def backend(topology: Topology) -> None:
    """Which inference backend each job talks to."""
    from ..brokers.backends.backend_broker import BackendBroker
    from ..brokers.backends.backend_journal import BackendJournal

    start_logging("backend-broker", topology.service.log_format, topology.service.log_level)
    own_run_dir(topology.run_dir)
    with BackendJournal(topology.run_dir / "backends.journal") as journal:
        BackendBroker(topology, journal).run()
