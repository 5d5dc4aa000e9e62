"""The nodes of bench/chaos.py, `hub` and `far`, and those of bench/chaos_cluster.py; and their links, which can be cut.

`NamespaceNodes` are network namespaces joined by a bridge in that of `hub`: a cut drops all traffic between a node and
the others, in both directions, silently. It needs root. `ProxyNodes` are on loopback, and traffic from `far` to the
brokers passes a proxy that stops forwarding: a cut affects one direction, which a broker cannot distinguish from a
process that hangs. Both end with this process in every case.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from functools import partial
from typing import TYPE_CHECKING, Protocol

from service import free_port

from prorl_zmq.system.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Sequence

NETWORK = "10.213.7"
HUB_HOST, FAR_HOST = f"{NETWORK}.1", f"{NETWORK}.2"
EVENTS_PORT, BACKENDS_PORT, ENGINE_PORT = 5561, 5562, 5563
CHUNK_BYTES = 65_536


class Nodes(Protocol):
    """Where the pieces of each node run, and how they reach each other."""

    stage_events: str
    """Where the rollout broker binds."""
    backend_broker: str
    far_stage_events: str
    """Where far's stage processes connect."""
    far_backend_broker: str
    far_bind: str
    """Where far's stage processes bind; empty: they choose."""
    far_engine: str
    """Where far's engine binds, in each of its lives."""

    async def start(self) -> None:
        """Make them."""

    def prefix(self, node: str) -> Sequence[str]:
        """Give what to put before a command to run it on a node."""

    async def cut(self, node: str) -> None:
        """Have nothing pass a node's link."""

    async def mend(self, node: str) -> None:
        """Undo `cut`."""

    async def close(self) -> None:
        """End what `start` made."""


class NamespaceNodes:
    """Network namespaces: that of `hub`, and those of the named nodes."""

    stage_events = far_stage_events = f"tcp://{HUB_HOST}:{EVENTS_PORT}"
    backend_broker = far_backend_broker = f"tcp://{HUB_HOST}:{BACKENDS_PORT}"
    far_bind = f"tcp://{FAR_HOST}:*"
    far_engine = f"tcp://{FAR_HOST}:{ENGINE_PORT}"

    def __init__(self, names: Sequence[str] = ("far",)) -> None:
        self.hosts = {name: f"{NETWORK}.{number}" for number, name in enumerate(("hub", *names), 1)}
        """Their addresses."""
        self._holders: dict[str, asyncio.subprocess.Process] = {}

    async def start(self) -> None:
        """Make them.

        Raises:
            OSError, subprocess.CalledProcessError: this machine does not allow it.
        """
        for node in self.hosts:
            holder = await asyncio.create_subprocess_exec(
                *("unshare", "--net", "sh", "-c", "echo; exec sleep infinity"),
                stdout=asyncio.subprocess.PIPE,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
            self._holders[node] = holder
            assert holder.stdout is not None
            if await holder.stdout.readline() != b"\n":
                raise OSError("no network namespace can be made")
        await self._ip("hub", "link", "add", "net", "type", "bridge")
        for node, host in self.hosts.items():
            if node != "hub":
                pid = str(self._holders[node].pid)
                await self._ip("hub", "link", "add", f"to_{node}", "type", "veth", "peer", "name", "net", "netns", pid)
                await self._ip("hub", "link", "set", f"to_{node}", "master", "net", "up")
            await self._ip(node, "link", "set", "lo", "up")
            await self._ip(node, "address", "add", f"{host}/24", "dev", "net")
            await self._ip(node, "link", "set", "net", "up")

    def prefix(self, node: str) -> Sequence[str]:
        """Give the command that enters a node's namespace."""
        return ("nsenter", f"--net=/proc/{self._holders[node].pid}/ns/net", "--")

    async def cut(self, node: str) -> None:
        """Take a node's link down: what others send it goes nowhere."""
        await self._ip("hub", "link", "set", f"to_{node}", "down")

    async def mend(self, node: str) -> None:
        """Take it up again."""
        await self._ip("hub", "link", "set", f"to_{node}", "up")

    async def close(self) -> None:
        """End the namespaces, with the last process in them."""
        for holder in self._holders.values():
            holder.kill()
            await holder.wait()

    async def _ip(self, node: str, *arguments: str) -> None:
        ip = await asyncio.create_subprocess_exec(*self.prefix(node), "ip", *arguments)
        if await ip.wait():
            raise subprocess.CalledProcessError(ip.returncode or 1, ["ip", *arguments])


class Proxy:
    """Forwards TCP connections on loopback, unless it is held."""

    def __init__(self, target_port: int) -> None:
        self.port = free_port()
        self._target_port = target_port
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)

    def hold(self) -> None:
        """Forward nothing more; connections stay open."""
        self._open.clear()

    def release(self) -> None:
        """Forward again, first what was held."""
        self._open.set()

    async def close(self) -> None:
        """Close all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, asyncio.CancelledError), contextlib.closing(writer):
            await self._open.wait()
            back, forth = await asyncio.open_connection("127.0.0.1", self._target_port)
            with contextlib.closing(forth):
                pumps = [asyncio.create_task(self._pump(*way)) for way in ((reader, forth), (back, writer))]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            await self._open.wait()
            writer.write(data)
            await writer.drain()


class ProxyNodes:
    """Both nodes on loopback."""

    far_bind = ""

    def __init__(self) -> None:
        ports = free_port(), free_port()
        self.far_engine = f"tcp://127.0.0.1:{free_port()}"
        self._proxies = [Proxy(port) for port in ports]
        self.stage_events, self.backend_broker = (f"tcp://127.0.0.1:{port}" for port in ports)
        self.far_stage_events, self.far_backend_broker = (f"tcp://127.0.0.1:{proxy.port}" for proxy in self._proxies)

    async def start(self) -> None:
        """Listen."""
        for proxy in self._proxies:
            await proxy.start()

    def prefix(self, node: str) -> Sequence[str]:
        """Give nothing."""
        del node
        return ()

    async def cut(self, node: str) -> None:
        """Hold what far says."""
        del node
        for proxy in self._proxies:
            proxy.hold()

    async def mend(self, node: str) -> None:
        """Forward it."""
        del node
        for proxy in self._proxies:
            proxy.release()

    async def close(self) -> None:
        """Close the proxies."""
        for proxy in self._proxies:
            await proxy.close()


async def make_nodes(link: str) -> Nodes:
    """Give nodes by how they are joined: `namespaces`, `proxy`, or empty for the former where this machine allows it.

    Raises:
        OSError, subprocess.CalledProcessError: this machine allows no network namespaces.
    """
    if link != "proxy" and (link or (os.geteuid() == 0 and all(map(shutil.which, ("unshare", "nsenter", "ip"))))):
        nodes = NamespaceNodes()
        try:
            await nodes.start()
        except (OSError, subprocess.CalledProcessError):
            await nodes.close()
            if link:
                raise
        else:
            return nodes
    proxies = ProxyNodes()
    await proxies.start()
    return proxies
