"""`/v1/rollouts`: rollouts whose programs cannot reach the RUN processes.

    program  ──HTTP(S)──▶  gateway  ──HTTP──▶  RUN process of the rollout (`stages.harness.outside_rollout`)

Opening, reading and cancelling need the opener's token. Model calls and `finish` need the rollout's key, which the RUN
process checks; the gateway stores neither keys nor rollouts. A call waits until a RUN process has the rollout. A client
that disconnects ends its call there too.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING
from urllib.parse import quote

import aiohttp
from aiohttp import web

from ..client.outside_calls import reached_at, with_key
from ..client.requests import check_job_ids, pack_job
from ..errors import Busy, EndpointFailed
from ..wire.messages.base import new_id
from ..wire.messages.front_door import Cancelled, Submit
from .bodies import NewRollout, OpenedRollout, RolloutState
from .connection import session_of
from .endpoint import Endpoint
from .http_errors import json_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..security.rights import Sender
    from .connection import GatewayConnection
    from .endpoint import Call

PLACE = "/v1/rollouts"
CALLS = f"{PLACE}/{{job_id}}/{{path:.+}}"
OPEN_S = 60.0
"""How long a call waits for a RUN process to take its rollout before it is answered 503; clients retry."""
LOOK_S = 10.0
"""How long one request for an address is held."""
LOOKUPS = 2048
WAITING = 64
"""Most calls of one rollout that wait for its address: as many as its RUN process takes."""
ADDRESSES = 8192
CONNECT_S = 5.0
RETRY_AFTER = "2"
_OF_ONE_CONNECTION = (
    "connection host keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding"
)
NOT_PASSED_ON = frozenset((*_OF_ONE_CONNECTION.split(), "upgrade"))
"""Headers of one connection, in lower case."""


class RolloutsApi:
    """The endpoints of outside rollouts.

    Args:
        connection: to the brokers.
        cancel: cancels the job of a call.
    """

    def __init__(self, connection: GatewayConnection, cancel: Callable[[Call], Awaitable[Cancelled]]) -> None:
        self._connection = connection
        self._addresses: OrderedDict[str, str] = OrderedDict()
        self._lookups: dict[str, asyncio.Task[str | web.Response]] = {}
        self._waiting: Counter[str] = Counter()
        """Calls that wait for an address, by job."""
        self._http: aiohttp.ClientSession | None = None
        rollout = f"{PLACE}/{{job_id}}"
        self.endpoints = (
            Endpoint("POST", PLACE, self.open_rollout, OpenedRollout, NewRollout),
            Endpoint("GET", rollout, self.rollout_state, RolloutState),
            Endpoint("DELETE", rollout, cancel, Cancelled, name="cancel_rollout"),
            Endpoint("POST", CALLS, self.pass_on, name="rollout_call", raw=True, needs="rollout key"),
            Endpoint("GET", CALLS, self.pass_on, name="rollout_models", raw=True, needs="rollout key"),
        )

    async def open_rollout(self, call: Call) -> OpenedRollout:
        """Open a rollout for your program, which calls the model at `base_url` with `api_key`.

        The key is returned once. The program ends the rollout with `POST {base_url}/finish` and the key. Its trajectory
        is then at `/v1/jobs/{job_id}/trajectory`. If this answer is lost, open another one.
        """
        body: NewRollout = call.body
        job, key = with_key(body.job, body.idle_s, body.train_on)
        limit_bytes = (await self._connection.hello(call.sender)).job_limit_bytes
        await self._connection.ask(call.sender, Submit(new_id(), session_of(call.sender)), [pack_job(job, limit_bytes)])
        return OpenedRollout(job_id=job.job_id, base_url=f"{call.origin}{PLACE}/{job.job_id}", api_key=key)

    async def rollout_state(self, call: Call) -> RolloutState:
        """Return the state of a rollout; it is `open` while its program may call the model."""
        trace = await self._connection.trace(call.sender, call.path["job_id"])
        return RolloutState.of(trace, f"{call.origin}{PLACE}/{trace.job_id}")

    async def pass_on(self, request: web.Request, _sender: Sender) -> web.StreamResponse:
        """Call the model of a rollout, with the rollout's key.

        The path is that of an API, such as `chat/completions`, `responses` or `v1/messages`; or `finish`, which ends
        the rollout and takes `{"reward": number}`, or `{}` where the task judges.
        """
        job_id = request.match_info["job_id"]
        check_job_ids((job_id,))
        if not {".", ".."}.isdisjoint(request.match_info["path"].split("/")):
            return refused(404, "the path of a call has no parts . and ..")
        known = self._addresses.get(job_id)
        if known is not None:
            answered = await self._passed_on(request, known, may_fail=True)
            if answered is not None:
                return answered
            self._addresses.pop(job_id, None)
        address = await self._address(job_id)
        if isinstance(address, web.Response):
            return address
        self._addresses[job_id] = address
        while len(self._addresses) > ADDRESSES:
            self._addresses.popitem(last=False)
        answered = await self._passed_on(request, address, may_fail=False)
        assert answered is not None, "it says what failed"
        return answered

    async def close(self) -> None:
        for task in self._lookups.values():
            task.cancel()
        if self._http is not None:
            await self._http.close()

    async def _address(self, job_id: str) -> str | web.Response:
        """Return the address of a rollout's process, or the error answer. Calls of one rollout share one lookup."""
        task = self._lookups.get(job_id)
        if task is None:
            if len(self._lookups) >= LOOKUPS:
                raise Busy(f"{LOOKUPS} rollouts wait at this gateway for a RUN process", retry_after_s=1.0)
            task = self._lookups[job_id] = asyncio.create_task(self._looked_up(job_id))
            task.add_done_callback(lambda _: self._lookups.pop(job_id, None))
        if self._waiting[job_id] >= WAITING:
            raise Busy(f"{WAITING} calls of the rollout {job_id} wait for its RUN process", retry_after_s=1.0)
        self._waiting[job_id] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._waiting[job_id] -= 1
            if not self._waiting[job_id]:
                del self._waiting[job_id]

    async def _looked_up(self, job_id: str) -> str | web.Response:
        loop = asyncio.get_running_loop()
        until = loop.time() + OPEN_S
        while (left_s := until - loop.time()) > 0:
            trace = await self._connection.address_of(job_id, min(left_s, LOOK_S))
            if trace.address:
                try:
                    return reached_at(trace)
                except EndpointFailed as error:
                    return refused(502, error.message)
            if trace.outcome is not None or any(span.phase in ("eval", "score") for span in trace.spans):
                return refused(410, f"the rollout {job_id} has ended; its trajectory is with who opened it")
        return refused(503, f"the rollout {job_id} has not begun within {OPEN_S:g} s: all slots of RUN are taken")

    async def _passed_on(self, request: web.Request, address: str, *, may_fail: bool) -> web.StreamResponse | None:
        """Return the rollout's answer, forwarded; None: its process cannot be reached, which `may_fail`."""
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                auto_decompress=False,
                trust_env=False,
            )
        query = request.rel_url.raw_query_string
        url = f"{address}/{quote(request.match_info['path'])}{'?' if query else ''}{query}"
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in NOT_PASSED_ON]
        body = request.content if request.body_exists else None
        response: web.StreamResponse | None = None
        try:
            async with self._http.request(
                request.method, url, headers=headers, data=body, allow_redirects=False
            ) as answer:
                response = web.StreamResponse(status=answer.status, headers=_passed_back(answer))
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
        except aiohttp.ClientConnectorError as error:
            if may_fail:
                return None
            return refused(503, f"the rollout's process cannot be reached from the gateway: {error}")
        except (aiohttp.ClientError, ConnectionError):
            if response is None or not response.prepared:
                return refused(503, "the rollout's process ended while it answered; ask again")
            if request.transport is not None:
                request.transport.abort()  # the client must not take a part for the whole
        return response


def refused(status: int, message: str) -> web.Response:
    """Return an error in the form that clients of all APIs parse."""
    error = {"type": "gone" if status == 410 else "api_error", "code": None, "param": None, "message": message}
    headers = {"Retry-After": RETRY_AFTER} if status == 503 else None
    return json_response({"type": "error", "error": error}, status, headers)


def _passed_back(answer: aiohttp.ClientResponse) -> list[tuple[str, str]]:
    return [(name, value) for name, value in answer.headers.items() if name.lower() not in NOT_PASSED_ON]
