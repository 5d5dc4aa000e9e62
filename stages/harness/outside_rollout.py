"""Rollouts led by programs outside of the service, and the HTTP server of a RUN process that takes their calls.

    program outside  ──HTTP──▶  http://HOST:PORT/rollouts/JOB_ID/…  ──▶  `OutsideRollout`
    gateway          ──HTTP──▶

One port serves all rollouts of the process; each call shows its rollout's key. The program ends its rollout with
`POST {address}/finish`, whose body is `{"reward": number}`, or `{}` where the task judges. A program that makes no call
for `Outside.idle_s` is considered dead; time in which a call is being answered is not idle.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import socket
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from ...data.conversations import finite_reward
from ...errors import PhaseTimeout
from ...model_proxy.server import ModelServer, json_answer, shown_keys
from ...system.node_name import loopback_id
from ...wire.sockets import is_loopback_host
from ..episode import StopReason
from .harness_model import HarnessModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...inference.chat import ChatMessage
    from ..episode import JobPolicy

CLOSE_S = 1.0
"""Seconds in which calls under way must end once the program has ended the rollout."""
FINISH_BYTES = 4096
"""Largest body of `finish`."""
FINISH_TAKES = 'finish takes {"reward": number} or {}'
CONNECTIONS = 8192
"""Most connections of all programs together."""
CALLS = 64
"""Requests of one rollout at a time; of these 16 model calls are answered at once."""
BACKLOG = 1024
ENDED = 1024
"""Ended rollouts that are remembered, so that their programs get a clear answer."""

log = logging.getLogger(__name__)


class Finish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `finish`."""

    reward: float | None = None
    """None: the task judges."""


class OutsideRollout:
    """One rollout.

    Args:
        policy: its job has an `outside`.
        messages: the task's own; a call with the user's text belongs to the main conversation.
        grades: whether the task can judge without a reported reward.
    """

    def __init__(self, policy: JobPolicy, messages: Sequence[ChatMessage], *, grades: bool = True) -> None:
        assert policy.job.outside is not None, "a program outside leads it"
        self.job = policy.job
        self.reward: float | None = None
        """The reward that the program reported."""
        self.finished = False
        """Whether the program has ended the rollout."""
        self._outside = policy.job.outside
        self._episode = policy.episode
        self._grades = grades
        self._model = HarnessModel(policy, messages)
        self._server = ModelServer(self._model, key_sha256=self._outside.key_sha256, named=True)
        self._under_way = 0
        self._idle_from = time.monotonic()
        self._changed = asyncio.Event()
        """Set when a call begins or ends, and at the end."""

    async def lead(self, door: RolloutDoor) -> None:
        """Serve the program until it ends the rollout; write the sampled turns to the episode in every case.

        Raises:
            PhaseTimeout: the program made no call for too long.
            EngineFailed: the program ended the rollout, and the engine had answered no call.
        """
        self._episode.notes["harness"] = "a program outside of the service"
        await door.open(self)
        try:
            await self._end()
        finally:
            door.shut(self)
            await self._server.close(CLOSE_S if self.finished else 0.0)
            await self._model.finish(self._outside.train_on)
        if self._model.failure is not None and not self._model.answered:
            raise self._model.failure
        if self._episode.stop_reason is None:
            self._episode.stop_reason = StopReason.DONE
        if self.reward is not None:
            self._episode.metrics["reward_reported"] = 1

    def add_time(self, seconds: float) -> None:
        """Extend the program's idle limit by a pause of this process."""
        self._idle_from += seconds
        self._changed.set()

    async def answer(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer a request of the program. Requests without its key get a 401 and do not count."""
        if not self._server.is_shown_the_key(http):
            return self._server.refuse_key(http)
        self._under_way += 1
        self._changed.set()
        try:
            if http.path.endswith("/finish"):
                return await self._finish(http)
            return await self._server.handle(http)
        finally:
            self._under_way -= 1
            self._idle_from = time.monotonic()
            self._changed.set()

    async def _end(self) -> None:
        idle_s = self._outside.idle_s
        while not self.finished:
            self._changed.clear()
            left_s = None if self._under_way else self._idle_from + idle_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise PhaseTimeout(
                    f"the program outside made no call for {idle_s:g} s and did not end its rollout",
                    phase="run",
                    limit_s=idle_s,
                )
            try:
                await asyncio.wait_for(self._changed.wait(), left_s)
            except TimeoutError:
                continue

    async def _finish(self, http: web.BaseRequest) -> web.StreamResponse:
        if http.method != "POST":
            return json_answer(405, f"finish takes POST, not {http.method}")
        try:
            asked = await _asked(http)
        except ValueError as error:
            return json_answer(400, str(error))
        if asked.reward is not None and finite_reward(asked.reward) is None:
            return json_answer(400, "the reward must be a finite number")
        if self.finished:
            return ended_answer(self.job.job_id, self.reward, asked.reward)
        if asked.reward is None and not self._grades:
            return json_answer(400, f"the task {self.job.task} does not judge: finish with a reward")
        if not self._model.answered and self._model.failure is None:
            return json_answer(
                409, "no call of the model was answered, so there is nothing to learn from: cancel the rollout instead"
            )
        self.finished, self.reward = True, asked.reward
        return finished_answer(self.reward)


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
        """The addresses of open rollouts, by job."""
        self._host = host
        self._changed = changed
        self._open: dict[str, OutsideRollout] = {}
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        self._requests: Counter[str] = Counter()
        self._web: web.Server | None = None
        self._listener: asyncio.Server | None = None
        self._url = ""

    async def open(self, rollout: OutsideRollout) -> None:
        if self._listener is None:
            await self._listen()
        job_id = rollout.job.job_id
        self._open[job_id] = rollout
        loopback = f"#{loopback_id()}" if is_loopback_host(self._host) else ""
        self.addresses[job_id] = f"{self._url}/rollouts/{job_id}{loopback}"
        self._changed()

    def shut(self, rollout: OutsideRollout) -> None:
        """Reject further calls of a rollout."""
        job_id, outside = rollout.job.job_id, rollout.job.outside
        assert outside is not None
        if self._open.get(job_id) is rollout:
            del self._open[job_id]
            self.addresses.pop(job_id, None)
            self._ended[job_id] = _Ended(outside.key_sha256, rollout.finished, rollout.reward)
            while len(self._ended) > ENDED:
                self._ended.popitem(last=False)

    async def close(self) -> None:
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
        if self._requests[job_id] >= CALLS:
            answer = json_answer(429, f"{CALLS} requests of this rollout are open; try again later")
            answer.headers["Retry-After"] = "1"
            return answer
        self._requests[job_id] += 1
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
            try:  # a lost first answer is requested again
                return ended_answer(job_id, ended.reward, (await _asked(http)).reward)
            except ValueError as error:
                return json_answer(400, str(error))
        return json_answer(410, f"the rollout {job_id} has ended; its trajectory is with who opened it")


class _Refusing(asyncio.Protocol):
    """Closes its connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def finished_answer(reward: float | None) -> web.Response:
    """Return the answer to a `finish` that has ended its rollout."""
    body = msgspec.json.encode({"status": "finished", "reward": reward})
    return web.Response(body=body, content_type="application/json")


def ended_answer(job_id: str, reward: float | None, asked: float | None) -> web.Response:
    """Return the answer to a further `finish`: the same request gets the same answer."""
    if asked == reward:
        return finished_answer(reward)
    how = "the task's judgement" if reward is None else f"reward {reward:g}"
    return json_answer(409, f"the rollout {job_id} was ended before, with {how}, which stays")


async def _asked(http: web.BaseRequest) -> Finish:
    """Parse the body of a `finish`; raise `ValueError` if it is invalid."""
    data = bytearray()
    async for chunk in http.content.iter_any():
        data += chunk
        if len(data) > FINISH_BYTES:
            raise ValueError(f"{FINISH_TAKES}: the body has more than {FINISH_BYTES} bytes")
    try:
        return msgspec.json.decode(data or b"{}", type=Finish)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{FINISH_TAKES}: {error}") from error
