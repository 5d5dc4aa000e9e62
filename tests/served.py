"""Sandboxes with execution servers of their own, for tests."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from typing import TYPE_CHECKING

from prorl_zmq.tools.execution.messages import SOCKET

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from prorl_zmq.tools.containers.specification import SandboxSpec
    from prorl_zmq.tools.sandbox.sandbox import Sandbox
    from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

LIMIT_S = 30.0


def use(sandboxes: Sandboxes, body: Callable[[Sandbox], Awaitable[None]], spec: SandboxSpec | None = None) -> None:
    async def main() -> None:
        sandbox = await sandboxes.create("one", spec)
        try:
            await body(sandbox)
        finally:
            await sandbox.close()
        assert list(sandboxes.root.iterdir()) == []

    asyncio.run(main())


async def gone(path: Path) -> bool:
    deadline = time.monotonic() + 20
    while await asyncio.to_thread(path.exists):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


def server_pid(sandbox: Sandbox) -> int:
    """Ask the kernel who is at the other end of the sandbox's socket."""
    with socket.socket(socket.AF_UNIX) as line:
        folder = os.open(sandbox.path, os.O_PATH)
        try:
            line.connect(f"/proc/self/fd/{folder}/{SOCKET}")
        finally:
            os.close(folder)
        return int.from_bytes(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)
