"""Removes sandboxes: all of them, or those whose maker died before an execution server had them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from typing import TYPE_CHECKING

from ...errors import ProrlError
from ..execution import messages
from ..execution.client import ExecutionClient
from .sandbox import CLOSE_LIMIT_S, MAKER_LOCK, remove_abandoned

if TYPE_CHECKING:
    from pathlib import Path


async def sweep(root: Path) -> None:
    """End the sandboxes below `root`, and remove it with all that is left there."""
    with contextlib.suppress(FileNotFoundError):
        names = await asyncio.to_thread(os.listdir, root)
        await asyncio.gather(*(_end(root / name) for name in names))
        await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)


def sweep_abandoned(root: Path) -> None:
    """Remove what is neither served nor being made: its maker was killed half-way, and its job gets another sandbox."""
    with contextlib.suppress(OSError):
        for name in os.listdir(root):  # noqa: PTH208 - a name is all that is needed
            if not name.startswith(".") or (root / name / MAKER_LOCK).exists():  # without a lock, it is just being made
                with contextlib.suppress(ProrlError, OSError):
                    remove_abandoned(root / name)


async def _end(path: Path) -> None:
    with contextlib.suppress(ProrlError, TimeoutError):
        client = await ExecutionClient.connect(path)
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await client.ask(messages.Close())
        finally:
            client.close()
    with contextlib.suppress(ProrlError):
        await asyncio.to_thread(remove_abandoned, path)
