"""`SandboxHandoff`: sandboxes of this stage process that await their next phase.

The process of the last phase renews a sandbox's lease until the next phase attaches and takes the lease over. A sandbox
that no phase attaches to within `HANDOFF_LIMIT_S` is closed: a restarted broker may have forgotten the job.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ..errors import ProrlError

if TYPE_CHECKING:
    from ..tools.sandbox.sandbox import Sandbox

HANDOFF_LIMIT_S = 3600.0
"""Longest wait of a job for its next phase, in seconds."""

log = logging.getLogger("prorl.stage")


class SandboxHandoff:
    def __init__(self, limit_s: float = HANDOFF_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._timers: dict[Sandbox, asyncio.TimerHandle] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._timers)

    def hold(self, sandbox: Sandbox) -> None:
        """Keep a sandbox until another process takes its lease."""
        self._timers[sandbox] = asyncio.get_running_loop().call_later(self._limit_s, self._expire, sandbox)
        sandbox.when_lost(lambda: self._forget(sandbox))
        if not sandbox.held:
            self._forget(sandbox)

    async def release(self) -> None:
        """Stop renewing all leases; each sandbox waits for the next phase until its lease expires."""
        for sandbox in list(self._timers):
            self._forget(sandbox)
            sandbox.release()
        if self._closing:
            await asyncio.wait(self._closing)

    def _forget(self, sandbox: Sandbox) -> None:
        timer = self._timers.pop(sandbox, None)
        if timer is not None:
            timer.cancel()

    def _expire(self, sandbox: Sandbox) -> None:
        self._forget(sandbox)
        task = asyncio.get_running_loop().create_task(self._close(sandbox))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, sandbox: Sandbox) -> None:
        log.warning("no phase attached to the sandbox %s within %g s; closing it", sandbox.path.name, self._limit_s)
        try:
            await sandbox.close()
        except (ProrlError, OSError) as error:
            log.warning("the sandbox %s could not be closed: %s", sandbox.path.name, error)
