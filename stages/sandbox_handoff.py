"""`SandboxHandoff`: the sandboxes that a stage process has handed on and that nobody has attached to yet.

Between two phases a job waits in the broker, and no phase holds its sandbox. The process that handed it on does: it
renews the lease until the next phase attaches, which takes the sandbox away from it. So a sandbox ends soon after the
process that kept it dies, and the job is given a fresh one. What nobody comes for within `HANDOVER_LIMIT_S` is closed:
the broker may have been started anew and have forgotten the job.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ..errors import ProrlError

if TYPE_CHECKING:
    from ..tools.sandbox.sandbox import Sandbox

HANDOVER_LIMIT_S = 3600.0
"""How long a job may wait for its next phase."""

log = logging.getLogger("prorl.stage")


class SandboxHandoff:
    """Holds sandboxes; `release` them at the end."""

    def __init__(self, limit_s: float = HANDOVER_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._kept: dict[Sandbox, asyncio.TimerHandle] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, sandbox: Sandbox) -> None:
        """Hold a sandbox until somebody else does."""
        self._kept[sandbox] = asyncio.get_running_loop().call_later(self._limit_s, self._give_up, sandbox)
        sandbox.when_lost(lambda: self._forget(sandbox))
        if not sandbox.held:
            self._forget(sandbox)

    async def release(self) -> None:
        """Let go of them all: each waits for the next phase as long as its lease lasts."""
        for sandbox in list(self._kept):
            self._forget(sandbox)
            sandbox.release()
        if self._closing:
            await asyncio.wait(self._closing)

    def _forget(self, sandbox: Sandbox) -> None:
        timer = self._kept.pop(sandbox, None)
        if timer is not None:
            timer.cancel()

    def _give_up(self, sandbox: Sandbox) -> None:
        self._forget(sandbox)
        task = asyncio.get_running_loop().create_task(self._close(sandbox))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, sandbox: Sandbox) -> None:
        log.warning("nobody came for the sandbox %s within %g s; closing it", sandbox.path.name, self._limit_s)
        try:
            await sandbox.close()
        except (ProrlError, OSError) as error:
            log.warning("the sandbox %s could not be closed: %s", sandbox.path.name, error)
