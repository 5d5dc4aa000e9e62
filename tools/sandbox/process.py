"""The container that is none: plain processes of the service's own user in a folder.

For machines without namespaces, and only where the operator asked for it by name: a command can read and write whatever
the service can. The environment is still a clean one, and the execution server adopts whatever leaves its session, so
nothing outlives the sandbox.
"""

from __future__ import annotations

import math
import os

from ...errors import SandboxFailed
from ..processes import Child, children, descendants, kill
from . import namespaces
from .container import KILL_LIMIT_S, KILL_ROUNDS, Container


class ProcessContainer(Container):
    """A folder, and processes that start in it."""

    kind = "process"

    @property
    def home(self) -> str:
        """The workspace, for commands as for the host."""
        return str(self.workspace)

    @property
    def root(self) -> str:
        """The workspace: file calls are not to reach the host's other files."""
        return str(self.workspace)

    async def start(self) -> None:
        """Adopt the orphans to come; there is nothing to start (see `Container.start`)."""
        namespaces.become_subreaper()

    async def living(self) -> None:
        """Do nothing: it cannot end."""

    async def renew(self, number: int) -> None:
        """Do nothing, either."""

    async def close(self) -> None:
        """Kill all commands and what they left (see `Container.close`).

        Raises:
            SandboxFailed: new ones are started faster than they can be killed.
        """
        for _ in range(KILL_ROUNDS):
            kill(*self.processes())
            await self._reap_spawned()
            await self._reap_adopted()
            if not self.processes():
                return
        raise SandboxFailed("a sandbox's processes start others faster than they can be killed")

    async def _reap_adopted(self) -> None:
        for pid in children(os.getpid()):
            child = Child(pid)
            try:
                if await child.wait(KILL_LIMIT_S):
                    child.reap()
            finally:
                child.close()

    def processes(self, at_most: float = math.inf) -> list[int]:
        """Give all living processes below this one."""
        return descendants(os.getpid(), at_most)

    def _join(self, report: int, *, limited: bool) -> None:
        del report, limited
