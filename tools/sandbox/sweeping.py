"""Ends every sandbox below a folder, when it is known that nobody needs one any more."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from typing import TYPE_CHECKING

from ...errors import ProrlError
from ..execution import messages
from ..execution.client import ExecutionClient
from .sandbox import CLOSE_LIMIT_S, remove_abandoned

if TYPE_CHECKING:
    from pathlib import Path


async def sweep(root: Path) -> None:
    """End the sandboxes below `root`, and remove it with all that is left there."""
    with contextlib.suppress(FileNotFoundError):
        names = await asyncio.to_thread(os.listdir, root)
        await asyncio.gather(*(_end(root / name) for name in names))
        await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)


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
