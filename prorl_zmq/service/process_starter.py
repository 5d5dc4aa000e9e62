"""Starts a supervisor's processes: forks where possible, else fresh interpreters.

A fork that is restarted runs the code that is installed at that time.
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
    """A child of this process, reaped when it exits."""

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
        """Return its exit code once it has exited; negative: the signal that ended it."""
        return await asyncio.shield(self._ended)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._ended.set_result(self._process.wait())


class ProcessStarter:
    """Starts processes, and keeps the last one of each plan by name; a context.

    Args:
        environment: of all processes.
        server: the fork server, which this closes.
    """

    def __init__(self, environment: Mapping[str, str], server: ForkServer) -> None:
        self.processes: dict[str, ServiceProcess] = {}
        self._environment = environment
        self._server = server
        self._ordering = asyncio.Lock()
        """Serializes orders for forks, in the order of the plans."""
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self, plan: AnyPlan, output: int | None) -> ServiceProcess:
        """Start a process whose output goes to a descriptor; None: to this process's.

        The process is owned from the call on, also if the caller is cancelled.

        Raises:
            OSError: it cannot be started, or its plan cannot be written.
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
        """Start no more processes; running ones continue."""
        self._closed = True
        await run_aside(self._server.close)

    async def _start(self, plan: AnyPlan, output: int | None) -> ServiceProcess:
        plan.write()
        process = await self._fork(plan, output) if plan.forked else None
        if process is None:
            process = self._execute(plan, output)
        try:
            self.processes[plan.name] = ServiceProcess(process)
        except OSError:  # no free descriptor to watch it
            process.kill()
            process.wait()
            raise
        return self.processes[plan.name]

    async def _fork(self, plan: AnyPlan, output: int | None) -> subprocess.Popen[Any] | None:
        """Return None if there is no fork server, or it must not be used."""
        restarted = plan.name in self.processes
        if restarted and plan.rank == BROKER_RANK:
            return None  # a task's modules must not delay or enter a restarted broker
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
                # A newly installed package must not end a running service.
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
        # In this thread: a child ends with the thread that starts it.
        return subprocess.Popen(
            [plan.python, *ISOLATED, *plan.arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=self._environment,
            start_new_session=True,
            preexec_fn=partial(begin_session, os.getpid()),  # noqa: PLW1509 - it only asks the kernel
        )
