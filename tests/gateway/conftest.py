"""HTTP clients of gateways, gateways of services in the test's process, and jobs as JSON."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
from support.later import Later
from support.ports import free_port
from support.waiting import until_async

from prorl_zmq.config import GatewaySettings
from prorl_zmq.gateway.server import Gateway
from prorl_zmq.gateway.settings import GatewayOptions
from prorl_zmq.testing import LocalService, say
from prorl_zmq.wire.messages.base import new_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    import openai
    import pytest
else:
    openai = Later("openai")

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


@asynccontextmanager
async def gateway_of(service: LocalService, folder: Path, **more: Any) -> AsyncIterator[str]:
    """Run a gateway of a service; yield its URL."""
    port = free_port()
    settings = GatewaySettings(bind=f"127.0.0.1:{port}", use_llm_servers=False)
    gateway = Gateway(GatewayOptions(settings=settings, run_dir=folder, front_door=service.front_door, **more))
    running = asyncio.create_task(gateway.run())
    try:
        async with http(f"http://127.0.0.1:{port}") as client:
            await until_async(client.is_up, "the gateway")
        yield f"http://127.0.0.1:{port}"
    finally:
        gateway._stopping.set()
        await running


def asked(
    service: LocalService, folder: Path, body: Callable[[Any], Awaitable[None]], key: str = "-", **more: Any
) -> None:
    """Run a body with OpenAI's client of a gateway."""

    async def main() -> None:
        async with (
            gateway_of(service, folder, **more) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as gpt,
        ):
            await body(gpt)

    asyncio.run(main())


def two_models(**more: Any) -> LocalService:
    return LocalService(engine=say(lambda _: "yes"), models={"teacher": say(lambda _: "no")}, **more)


def noted_ends(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Note the tokens that end each of an engine's generations."""
    ends: list[tuple[int, ...]] = []
    generate = engine.generate

    async def noted(ids: Any, sampling: Any, stop_token_ids: Any, job_id: str) -> Any:
        ends.append(tuple(stop_token_ids))
        return await generate(ids, sampling, stop_token_ids, job_id)

    monkeypatch.setattr(engine, "generate", noted)
    return ends
