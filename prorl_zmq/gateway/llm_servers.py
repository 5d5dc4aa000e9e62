"""`LlmServers`: runs one `prorl-engine` process for each address of `/add_llm_server`.

The processes end with the gateway. One that ends is restarted after a pause, and given up after `MAX_STARTS` ends
within `GROWN_UP_S` of a start. The log has the reason; `/status` does not, since it may contain a server's answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..service.child_output import ChildOutput, reason_of
from ..system.logs import one_line
from ..system.processes import ISOLATED, begin_session
from .prorl_bodies import LlmServerState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

MAX_STARTS = 3
GROWN_UP_S = 30.0
PAUSE_S = 1.0
STOP_S = 10.0
REASON_LENGTH = 500
SERVERS_LIMIT = 64
TEXT_MODE = "/v1"
"""Suffix of chat API addresses; token APIs are elsewhere on the server."""

log = logging.getLogger("prorl.gateway")


@dataclass(slots=True)
class _Server:
    task: asyncio.Task[None] | None = None
    state: str = "named"
    problem: str = ""


class LlmServers:
    """The engine hosts of a gateway.

    Args:
        name: of the gateway.
        flags: returns the common flags of all engines: the backend broker's address and keys.
    """

    def __init__(self, name: str, flags: Callable[[], Awaitable[list[str]]]) -> None:
        self._name = name
        self._flags = flags
        self._servers: dict[str, _Server] = {}

    def __len__(self) -> int:
        return len(self._servers)

    def add(self, addresses: Iterable[str]) -> None:
        """Add addresses; `start` starts their engines."""
        for address in addresses:
            self._servers.setdefault(address, _Server())

    def start(self, tokenizer: str) -> None:
        """Start engines that are not started; an empty `tokenizer`: that of the server's model."""
        for address, server in self._servers.items():
            if server.task is None:
                server.task = asyncio.create_task(self._keep(address, server, tokenizer))

    async def keep_only(self, addresses: Iterable[str]) -> None:
        """End the engines of all other addresses."""
        wanted = set(addresses)
        ending = [self._servers.pop(address) for address in list(self._servers) if address not in wanted]
        for server in ending:
            if server.task is not None:
                server.task.cancel()
        await asyncio.gather(*(one.task for one in ending if one.task is not None), return_exceptions=True)

    def status(self) -> list[LlmServerState]:
        return [LlmServerState(address, server.state, server.problem) for address, server in self._servers.items()]

    async def _keep(self, address: str, server: _Server, tokenizer: str) -> None:
        loop = asyncio.get_running_loop()
        starts = 0
        while starts < MAX_STARTS:
            started = loop.time()
            server.state = "started"
            problem = await self._run(address, tokenizer)
            starts = 1 if loop.time() - started > GROWN_UP_S else starts + 1
            log.warning("the engine host of %s %s", address, problem)
            server.problem = "ended; the gateway's log says why"  # which may hold what the server answered
            await asyncio.sleep(PAUSE_S)
        server.state = "failed"

    async def _run(self, address: str, tokenizer: str) -> str:
        """Run an engine host until it ends; return the reason."""
        # Of this gateway alone, and short: a socket's path has it.
        digest = hashlib.blake2b(f"{self._name} {address}".encode(), digest_size=6).hexdigest()
        engine = ["--engine", "http", "--url", address.removesuffix(TEXT_MODE), "--tokenizer", tokenizer]
        arguments = ["prorl-engine", *engine, "--name", f"llm-{digest}", *await self._flags()]
        output = ChildOutput(None)
        # From here on the child is ours even if this task is cancelled while it starts.
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *(sys.executable, *ISOLATED, "-m", "prorl_zmq.cli", *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.write_end,
                stderr=output.write_end,
                start_new_session=True,
                preexec_fn=partial(begin_session, os.getpid()),
            )
        )
        try:
            child = await asyncio.shield(starting)
            code = await child.wait()
        except OSError as error:
            return f"could not be started: {error.strerror}"
        finally:
            with contextlib.suppress(OSError):
                await _end(await starting)
            output.close()
        reason = reason_of(await asyncio.to_thread(output.tail))
        return f"ended with code {code}: {one_line(reason, REASON_LENGTH)}"


async def _end(child: asyncio.subprocess.Process) -> None:
    """Terminate a child, and kill it after `STOP_S`."""
    if child.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await child.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
