"""Sandboxes without isolation: plain processes of the service's own user in a folder.

For machines without namespaces, and only if the operator names the kind: a command can read and write all that the
service can. The environment is still a clean one, and the execution server adopts what leaves its session, so no
process outlives the sandbox.
"""

from __future__ import annotations

import errno
import math
import os

from ...errors import SandboxFailed
from ...system.processes import become_subreaper
from ..containers.container import KILL_LIMIT_S, KILL_ROUNDS, Container
from ..containers.forking import ExecFailed
from ..processes.child import Child
from ..processes.process_tree import children, descendants, kill


class ProcessContainer(Container):
    kind = "process"
    isolated = False
    image_formats = frozenset()
    _others: frozenset[int] = frozenset()
    """Children that this process had before: an execution server has none; a program that embeds one may have."""

    @classmethod
    def problem(cls) -> str | None:
        return None

    @classmethod
    def version(cls) -> str:
        return "works, without any isolation"

    async def start(self) -> None:
        become_subreaper()
        self._others = frozenset(children(os.getpid()))

    async def close(self) -> None:
        for _ in range(KILL_ROUNDS):
            kill(*self.processes())
            await self._reap_spawned()
            await self._reap_adopted()
            if not self.processes():
                return
        raise SandboxFailed("a sandbox's processes start others faster than they can be killed")

    async def _reap_adopted(self) -> None:
        for pid in set(children(os.getpid())) - self._others:
            child = Child(pid)
            try:
                if await child.wait(KILL_LIMIT_S):
                    child.reap()
            finally:
                child.close()

    def processes(self, at_most: float = math.inf) -> list[int]:
        return descendants(os.getpid(), at_most, self._others)

    def _join(self, report: int, *, limited: bool, user: str = "") -> None:
        del report, limited
        if user:
            raise ExecFailed(errno.EPERM, "sandboxes of kind process have no users of their own")
