"""Sandboxes without isolation: plain processes of the service's own user in a folder.

For machines without bubblewrap, and only where the operator asked for it by name: a command can read and write whatever
the service can. The environment is still a clean one, and processes are found again by it: a process that leaves its
session still carries its sandbox's name in its environment, unless it cleared that too.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from ..processes import PROC, descendants, kill, process_table, to_the_end
from .base import Sandbox

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MARK = "PRORL_SANDBOX"
KILL_ROUNDS = 20
"""How often the process table is read again for processes that were started while the others were killed."""


class ProcessSandbox(Sandbox):
    """A folder, and processes that start in it."""

    kind = "process"

    @property
    def directory(self) -> str:
        """The path of the workspace, for commands as for the host."""
        return str(self.workspace)

    def environment(self) -> dict[str, str]:
        """Give the whole environment of commands: none of the host's variables."""
        return {**super().environment(), MARK: str(self.path)}

    def argv(self, command: Sequence[str]) -> list[str]:
        """Give `command` itself."""
        return list(command)

    def kill(self, pid: int) -> None:
        """Kill the process, all below it, and all of its session."""

        def find() -> set[int]:
            below = {pid, *descendants(pid)}
            return {entry.pid for entry in process_table() if entry.session == pid or entry.pid in below}

        _kill_all(find)

    def inner_pid(self, pid: int) -> int:
        """Give `pid`: nothing stands between the host and the command."""
        return pid

    async def close(self) -> None:
        """Kill what still runs of the sandbox, as far as it can be found, and remove its folder; may be called again.

        Raises:
            SandboxFailed: see `Sandbox.close`.
        """
        await to_the_end(asyncio.to_thread(_kill_all, self._marked))
        await super().close()

    def _marked(self) -> set[int]:
        mark = f"{MARK}={self.path}".encode()
        found = set()
        for entry in process_table():
            with suppress(OSError):
                if mark in (PROC / str(entry.pid) / "environ").read_bytes().split(b"\0"):
                    found.add(entry.pid)
        return found - {os.getpid()}


def _kill_all(find: Callable[[], set[int]]) -> None:
    killed: set[int] = set()
    for _ in range(KILL_ROUNDS):
        found = find() - killed
        if not found:
            return
        kill(*found)
        killed |= found
