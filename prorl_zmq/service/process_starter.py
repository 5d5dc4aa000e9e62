"""How a supervisor starts its processes: those of this package as forks, others as fresh interpreters.

A fork that is started again, after its process ended, takes the code that is installed then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from ..errors import ConfigError
from ..system.fork_server import ServerLost
from ..system.processes import ISOLATED, begin_session
from ..system.threads import run_aside
from .preloading import preloaded_for
from .process_plans import BROKER_RANK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..system.fork_server import ForkServer
    from .process_plans import AnyPlan

log = logging.getLogger("prorl.serve")


class ServiceProcess:
    """A child of this process, reaped as it ends."""

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfd, self._on_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    async def wait(self) -> int:
        """Return its exit code once it has ended; negative: that of the signal that ended it."""
        return await asyncio.shield(self._ended)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._ended.set_result(self._process.wait())


class ProcessStarter:
    """Starts processes, and has those that it started last, by the names of their plans; a context.

    Args:
        environment: of all processes.
        server: the fork server, which this closes.
    """

    def __init__(self, environment: Mapping[str, str], server: ForkServer) -> None:
        self.processes: dict[str, ServiceProcess] = {}
        self._environment = environment
        self._server = server
        self._ordering = asyncio.Lock()
        """Held by the order for a fork: they are given in the order of the plans."""
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self, plan: AnyPlan, output: int | None) -> ServiceProcess:
        """Start a process whose output goes to a descriptor; None: to ours.

        From the call on it is ours, even if the caller is cancelled.

        Raises:
            OSError: it cannot be started, or its plan not written.
            ConfigError: a task's module cannot be used by a fork.
        """
        starting = asyncio.ensure_future(self._start(plan, output))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await starting
            raise

    async def close(self) -> None:
        """Start nothing more; running processes keep running."""
        self._closed = True
        await run_aside(self._server.close)

    async def _start(self, plan: AnyPlan, output: int | None) -> ServiceProcess:
        plan.write()
        process = await self._fork(plan, output) if plan.forked else None
        if process is None:
            process = self._execute(plan, output)
        try:
            self.processes[plan.name] = ServiceProcess(process)
        except OSError:  # no descriptor is left to watch it with
            process.kill()
            process.wait()
            raise
        return self.processes[plan.name]

    async def _fork(self, plan: AnyPlan, output: int | None) -> subprocess.Popen[Any] | None:
        """Return None if there is no fork server, or it is not to be used."""
        restarted = plan.name in self.processes
        if restarted and plan.rank == BROKER_RANK:
            return None  # no module of a task may delay the restart of a broker, or be in it
        async with self._ordering:
            try:
                return await run_aside(self._order, plan, output)
            except ServerLost as error:
                if self._closed:
                    raise
                log.warning("%s; starting a fresh interpreter for %s", error, plan.name)
                return None
            except ConfigError as error:
                if not restarted:
                    raise
                # A package that was installed meanwhile must not end a service that runs.
                log.warning("%s; starting a fresh interpreter for %s", error, plan.name)
                return None

    def _order(self, plan: AnyPlan, output: int | None) -> subprocess.Popen[Any]:
        """Order a fork, in a thread."""
        if plan.name in self.processes:
            for change in self._server.renew_if_changed():
                log.warning("%s: processes that are started from now on run the new code", change)
        self._server.preload(preloaded_for(plan))
        return self._server.start(
            plan.arguments,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )

    def _execute(self, plan: AnyPlan, output: int | None) -> subprocess.Popen[Any]:
        # In this thread: what starts in another one would end with that.
        return subprocess.Popen(
            [plan.python, *ISOLATED, *plan.arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=self._environment,
            start_new_session=True,
            preexec_fn=partial(begin_session, os.getpid()),  # noqa: PLW1509 - it only asks the kernel
        )
