"""`Keeper`: the process that `prorl up` leaves running. It runs the brokers and keeps the wanted jobs in Slurm.

Every `poll_s`, and when `wanted.json` changes, it compares that with squeue (`Fleet`). It owns nothing outside of the
service's folder: if it is killed, the brokers die with it, the nodes wait, and `prorl up` on the same folder resumes.
SIGTERM, SIGINT and SIGUSR1 end it with the brokers and leave the nodes to the next keeper. `prorl down`, and brokers
that exit by themselves, end the nodes first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING

from ..errors import ProrlError
from ..system.processes import ISOLATED, begin_session, stop_signals
from .fleet import LOOK_S, Fleet
from .job_script import GROUPS

if TYPE_CHECKING:
    from pathlib import Path

    from ..system.held_file import HeldFile

STOP_S = 60.0
"""How long the brokers may take to exit."""
LEAVE_S = 180.0
"""How long jobs may take to end after scancel; Slurm kills them after its KillWait."""

log = logging.getLogger("prorl.keep")


class Keeper:
    """Keeps one service."""

    def __init__(self, service: Path, *, take_over: bool = False) -> None:
        self._fleet = Fleet(service)
        self._folder = self._fleet.folder
        self._poll_s = self._fleet.cluster.poll_s
        self._command = [sys.executable, *ISOLATED, "-m", "prorl_zmq.cli", "prorl", "serve", "--brokers-only"]
        self._command += ["--service", str(service), *(["--take-over"] if take_over else [])]
        self._command += ["--address", self._fleet.cluster.address] if self._fleet.cluster.address else []
        self._take_over = take_over
        self._stopping = asyncio.Event()

    async def run(self) -> bool:
        """Run the service until a stop is requested; return False if the brokers exited by themselves."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._stopping.set)
        with self._folder.kept(take_over=self._take_over) as held, stop_signals(self._stopping.set):
            brokers = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=partial(begin_session, os.getpid()),
            )
            ended = asyncio.create_task(brokers.wait())
            try:
                return await self._keep(ended, held)
            finally:
                if not ended.done():
                    brokers.terminate()
                    await asyncio.wait({ended}, timeout=STOP_S)
                if not ended.done():
                    brokers.kill()
                    await ended

    async def _keep(self, ended: asyncio.Task[int], held: HeldFile) -> bool:
        while not (self._stopping.is_set() or ended.done() or self._folder.wanted().stop):
            try:
                await asyncio.to_thread(self._fleet.look)
            except (ProrlError, OSError) as error:
                log.warning("%s; trying again in %g s", error, self._poll_s)
            await self._wait(ended)
        if held.is_lost():
            log.error("another keeper has taken this service over; this one ends, and leaves the nodes to it")
            return False
        failed = ended.done()
        if failed:
            log.error("the brokers ended with code %d; ending the nodes", ended.result())
        if failed or self._folder.wanted().stop:
            await asyncio.to_thread(self._fleet.end, GROUPS, LEAVE_S)
        return not failed

    async def _wait(self, ended: asyncio.Task[int]) -> None:
        """Wait until `poll_s` has passed, the wanted state changes, the brokers exit or a stop is requested."""
        loop = asyncio.get_running_loop()
        until, state = loop.time() + self._poll_s, self._folder.wanted_changed_at()
        stopping = asyncio.create_task(self._stopping.wait())
        done: set[asyncio.Task[int] | asyncio.Task[bool]] = set()
        while not done and loop.time() < until and self._folder.wanted_changed_at() == state:
            done, _ = await asyncio.wait((ended, stopping), timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
