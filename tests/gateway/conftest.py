"""One service with the embedded engine for all tests of the gateway, and gateways of their own beside its own one."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from support import waiting

from prorl_zmq import AsyncRolloutClient, Job, RolloutClient, Sampling
from prorl_zmq.wire.messages.backends import ListBackends
from prorl_zmq.wire.messages.base import new_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

WAIT_S = 30.0
PRORL = (sys.executable, "-P", "-m", "prorl_zmq.cli", "prorl")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def problem(text: str = "1", **more: Any) -> dict[str, Any]:
    """A job as JSON."""
    return {
        "task": "math",
        "instance": {"problem": text, "ground_truth": "1"},
        "sampling": {"max_tokens": 6},
        "job_id": new_id(),
        **more,
    }


async def until(condition: Callable[[], Awaitable[object]], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not await condition():
        assert time.monotonic() < deadline, f"waited {WAIT_S:g} s for {what}"
        await asyncio.sleep(0.02)


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


class Served:
    """A service with a gateway that uses the service's own engine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.front_door = f"ipc://{self.run_dir}/front_door"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        topology = folder / "topology.toml"
        topology.write_text(f'[gateway]\nbind = "127.0.0.1:{port}"\nuse_llm_servers = false\n')
        self.log = (folder / "log").open("wb")
        self.environment = {**os.environ, "PRORL_RUN_DIR": str(self.run_dir)}
        self.process = self.start("serve", "--sandbox", "process", "--config", str(topology))

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        environment = {**self.environment, **variables}
        return subprocess.Popen([*PRORL, *arguments], env=environment, stderr=self.log, stdin=subprocess.DEVNULL)

    @contextmanager
    def gateway(self, *flags: str, port: int = 0, **variables: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
        """A further gateway, and its URL."""
        bind = f"127.0.0.1:{port or free_port()}"
        process = self.start("gateway", "--bind", bind, *flags, **variables)
        try:
            yield process, f"http{'s' if '--tls-cert' in flags else ''}://{bind}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)

    @asynccontextmanager
    async def without_engine(self) -> AsyncIterator[AsyncRolloutClient]:
        """Jobs wait while this is open: no backend takes any."""
        async with AsyncRolloutClient(self.front_door) as client:
            (status,) = [one for one in await client.backends.list() if one.backend.backend_id == "engine-0"]
            await client.backends.drain("engine-0")
            try:
                yield client
            finally:
                await client.backends.add(status.backend)

    @staticmethod
    async def waiting(client: AsyncRolloutClient) -> int:
        """How many jobs wait for a backend."""
        waiting: int = (await client.backends.ask(ListBackends(new_id()))).waiting
        return waiting


def listens(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=10):
        return True
    return False


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        served = Served(Path(folder))
        try:
            with RolloutClient(served.front_door, timeout_s=90) as client:
                client.submit(
                    Job(task="math", instance={"problem": "1", "ground_truth": "1"}, sampling=Sampling(max_tokens=4))
                )
                assert [trajectory.outcome for trajectory in client.stream()] == ["completed"]
            waiting.until(lambda: listens(served.url), "the gateway to listen")
            yield served
        finally:
            served.process.send_signal(signal.SIGTERM)
            served.process.wait(40)
            served.log.close()
