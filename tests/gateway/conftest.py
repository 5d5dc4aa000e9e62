"""HTTP clients of gateways, and jobs as JSON."""

from __future__ import annotations

import io
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp

from prorl_zmq.wire.messages.base import new_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

WAIT_S = 30.0


def problem(text: str = "1", **more: Any) -> dict[str, Any]:
    """A job as JSON."""
    return {
        "task": "math",
        "instance": {"problem": text, "ground_truth": "1"},
        "sampling": {"max_tokens": 6},
        "job_id": new_id(),
        **more,
    }


class Http:
    """A client of one gateway, which answers with the status and the decoded JSON."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def __call__(self, method: str, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
        # What is large would otherwise be warned of.
        data = io.BytesIO(json.dumps(body).encode()) if body is not None else None
        async with self.session.request(method, path, data=data, **more) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
        return await self("POST", path, body, **more)

    async def get(self, path: str, **more: Any) -> tuple[int, Any]:
        return await self("GET", path, **more)

    async def is_up(self) -> bool:
        try:
            return (await self.get("/healthz"))[0] == 200
        except aiohttp.ClientError:
            return False


@asynccontextmanager
async def http(url: str, **more: Any) -> AsyncIterator[Http]:
    connector = aiohttp.TCPConnector(limit=0, ssl=more.pop("ssl", True))
    timeout = aiohttp.ClientTimeout(WAIT_S)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout, **more) as session:
        yield Http(session)
