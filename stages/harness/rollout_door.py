"""The HTTP server of a RUN process for programs outside: one port for all rollouts that they lead.

    program outside  ──HTTP──▶  http://HOST:PORT/rollouts/JOB_ID/…  ──▶  the rollout (`outside_rollout`)
    gateway          ──HTTP──▶

The host is loopback, or the host of the process's own inbox if the service may use plaintext TCP (`--insecure`). An
ended rollout is remembered for a while, so that its program gets a clear answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import socket
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from ...model_proxy.server import json_answer, shown_keys
from ...system.node_name import loopback_id
from ...wire.sockets import is_loopback_host
from .outside_rollout import Finish, ended_answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from .outside_rollout import OutsideRollout

CONNECTIONS = 8192
"""Of all programs together."""
CALLS = 64
"""Requests of one rollout at a time; of these 16 calls of the model are answered at once."""
BACKLOG = 1024
ENDED = 1024
"""Rollouts that are remembered."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Ended:
    key_sha256: str
    finished: bool
    reward: float | None


class RolloutDoor:
    """The rollouts of this process that programs outside lead.

    Args:
        host: where to listen.
        changed: called when a rollout has got an address.
    """

    def __init__(self, host: str, changed: Callable[[], None]) -> None:
        self.addresses: dict[str, str] = {}
        """Of the open rollouts, by job."""
        self._host = host
        self._changed = changed
        self._open: dict[str, OutsideRollout] = {}
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        self._requests: dict[str, int] = {}
        self._web: web.Server | None = None
        self._listener: asyncio.Server | None = None
        self._url = ""

    async def open(self, rollout: OutsideRollout) -> None:
        """Take calls of a rollout."""
        if self._listener is None:
            await self._listen()
        job_id = rollout.job.job_id
        self._open[job_id] = rollout
        loopback = f"#{loopback_id()}" if is_loopback_host(self._host) else ""
        self.addresses[job_id] = f"{self._url}/rollouts/{job_id}{loopback}"
        self._changed()

    def shut(self, rollout: OutsideRollout) -> None:
        """Take no more calls of a rollout."""
        job_id, outside = rollout.job.job_id, rollout.job.outside
        assert outside is not None
        if self._open.get(job_id) is rollout:
            del self._open[job_id]
            self.addresses.pop(job_id, None)
            self._ended[job_id] = _Ended(outside.key_sha256, rollout.finished, rollout.reward)
            while len(self._ended) > ENDED:
                self._ended.popitem(last=False)

    async def close(self) -> None:
        """Close all connections."""
        if self._listener is not None:
            self._listener.close()
        if self._web is not None:
            await self._web.shutdown(0)

    async def _listen(self) -> None:
        host = self._host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        shown = f"[{host}]" if ":" in host else host
        self._url = f"http://{shown}:{sock.getsockname()[1]}"
        self._web = web.Server(self._answer, handler_cancellation=True, access_log=None, logger=log)
        self._listener = await asyncio.get_running_loop().create_server(self._protocol, sock=sock, backlog=BACKLOG)

    def _protocol(self) -> asyncio.BaseProtocol:
        assert self._web is not None
        return self._web() if len(self._web.connections) < CONNECTIONS else _Refusing()

    async def _answer(self, http: web.BaseRequest) -> web.StreamResponse:
        _, first, job_id, *rest = [*http.path.split("/", 3), "", ""]
        rollout = self._open.get(job_id) if first == "rollouts" and rest[0] else None
        if rollout is None:
            return await self._answer_none(http, job_id)
        if self._requests.get(job_id, 0) >= CALLS:
            answer = json_answer(429, f"{CALLS} requests of this rollout are open; try again later")
            answer.headers["Retry-After"] = "1"
            return answer
        self._requests[job_id] = self._requests.get(job_id, 0) + 1
        try:
            return await rollout.answer(http)
        finally:
            self._requests[job_id] -= 1
            if not self._requests[job_id]:
                del self._requests[job_id]

    async def _answer_none(self, http: web.BaseRequest, job_id: str) -> web.StreamResponse:
        ended = self._ended.get(job_id)
        if ended is None:
            return json_answer(410, "no rollout of this address is open: it has ended, or its process was restarted")
        shown = (hashlib.sha256(one.encode(errors="replace")).hexdigest() for one in shown_keys(http))
        if not any(secrets.compare_digest(one, ended.key_sha256) for one in shown):
            return json_answer(401, "the call does not show the key of this rollout")
        if ended.finished and http.method == "POST" and http.path.endswith("/finish"):
            try:  # it is asked again where the first answer was lost
                asked = msgspec.json.decode(await http.content.read(4096) or b"{}", type=Finish)
                return ended_answer(job_id, ended.reward, asked.reward)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                return json_answer(400, f'finish takes {{"reward": number}} or {{}}: {error}')
        return json_answer(410, f"the rollout {job_id} has ended; its trajectory is with who opened it")


class _Refusing(asyncio.Protocol):
    """Closes its connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
