"""`ProrlApi`: ProRL Agent's REST API, as verl and NeMo Gym use it.

    POST /clear_llm_server /add_llm_server /start /process /cancel /stop     GET /status

- `/process` blocks until its job has ended, and always answers 200: clients treat other statuses as a reward of 0, or
retry for ever. A client that disconnects cancels its job.
- `job_id` is the client's name for its jobs; `/cancel` ends all jobs of that name.
- Each bearer token has its own `/start` and `/stop`, which survive a restart of the gateway. Its jobs do not: clients
retry, and late results are dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec
from aiohttp import web

from ..errors import Busy, ErrorInfo, MalformedMessage, ProrlError
from ..service.rollout_brokers import summed
from ..stages.known_row_formats import known_row_formats
from ..wire.messages.base import KeyRole, new_id
from ..wire.messages.front_door import Status
from ..wire.messages.jobs import Phase
from .connection import check_may
from .endpoint import Endpoint, decoded_body
from .http_errors import json_response
from .llm_servers import SERVERS_LIMIT
from .prorl_answer import answer, failure
from .prorl_bodies import CancelJobs, LlmServerAddress, Process, Processed, ProrlDone, ProrlStatus
from .prorl_instances import job_of
from .tool_schemas import schemas_of

if TYPE_CHECKING:
    from ..data.trajectory import Trajectory
    from ..integrations.single_jobs import SingleJobs
    from ..security.rights import Sender
    from ..tasks.row_format import RowFormat
    from ..wire.messages.jobs import Job
    from .connection import GatewayConnection
    from .llm_servers import LlmServers
    from .message_texts import LoadedTexts, MessageTexts
    from .stored_state import ClientState, StoredState

STOP_S = 20.0
"""How long `/stop` waits for cancelled jobs; clients wait 30 s."""
ADDRESS_LIMIT = 1024
TOKENIZER_LIMIT = 1024
"""Characters of the path or name of a tokenizer."""
ASIDE_TOKENS = 8192
"""Larger answers are encoded in a thread."""
CANCELLED = "the job was cancelled"
IGNORED = "ignored: this service has its own backends (use_llm_servers = false)"

log = logging.getLogger("prorl.gateway")


class ProrlApi:
    def __init__(
        self,
        connection: GatewayConnection,
        jobs: SingleJobs,
        state: StoredState,
        servers: LlmServers | None,
        tokenizer: str,
        texts: LoadedTexts,
    ) -> None:
        self._connection = connection
        self._jobs = jobs
        self._state = state
        self._servers = servers
        """None: the service has its own backends, and named servers are ignored."""
        self._tokenizer = tokenizer
        self._open: dict[str, dict[str | None, set[asyncio.Task[bytes]]]] = defaultdict(lambda: defaultdict(set))
        """Running requests, by token and the client's name for them."""
        self._row_formats: tuple[RowFormat, ...] = ()
        self._texts = texts
        self.endpoints = tuple(
            Endpoint(method, f"/{name}", handler, returns, takes, name=f"prorl_{name}", raw=True)
            for method, name, handler, takes, returns in (
                ("POST", "start", self.start, None, ProrlDone),
                ("POST", "stop", self.stop, None, ProrlDone),
                ("GET", "status", self.status, None, ProrlStatus),
                ("POST", "process", self.process, Process, Processed),
                ("POST", "cancel", self.cancel, CancelJobs, ProrlDone),
                ("POST", "add_llm_server", self.add_llm_server, LlmServerAddress, ProrlDone),
                ("POST", "clear_llm_server", self.clear_llm_server, None, ProrlDone),
            )
        )

    def resume(self) -> None:
        """Restart the engines that were named before a restart of the gateway."""
        if self._servers is not None and self._state.addresses:
            self._servers.add(self._state.addresses)
            self._servers.start(self._tokenizer or self._state.tokenizer)

    async def close(self) -> None:
        await asyncio.gather(*(self._end(name) for name in list(self._open)))
        await self._jobs.close()
        if self._servers is not None:
            await self._servers.keep_only(())

    async def start(self, _request: web.Request, sender: Sender) -> web.Response:
        """Accept jobs of ProRL clients at /process."""
        client = self._client(sender)
        if client.is_running:
            return detail(400, "Server is already running")
        client.is_running = True
        self._state.write()
        return json_response(ProrlDone("Server started"))

    async def stop(self, _request: web.Request, sender: Sender) -> web.Response:
        """Cancel this ProRL client's jobs, and accept no more."""
        client = self._client(sender)
        client.is_running = False
        self._state.write()
        await self._end(sender.name)
        return json_response(ProrlDone("Server stopped"))

    async def status(self, _request: web.Request, sender: Sender) -> web.Response:
        """Return the job counts and engines, for ProRL clients."""
        if not self._client(sender).is_running:
            return detail(503, "Server is not running")
        counts: dict[str, Any] = {}
        with suppress(ProrlError):
            answers = await self._connection.ask_all(sender, Status(new_id()))
            answers.check()
            running = summed(answers.found.values()).running
            counts = {f"{phase}_jobs": running.get(phase, 0) for phase in (Phase.INIT, Phase.RUN, Phase.EVAL)}
        servers = self._servers.status() if self._servers is not None else msgspec.UNSET
        pending = sum(len(tasks) for tasks in self._open[sender.name].values())
        return json_response(ProrlStatus("running", pending, **counts, llm_servers=servers))

    async def add_llm_server(self, request: web.Request, sender: Sender) -> web.Response:
        """Start an engine in front of a ProRL client's server."""
        client = self._server_owner(sender)
        address = (await _body(request)).get("address")
        if not isinstance(address, str) or not address.startswith(("http://", "https://")):
            return detail(400, f"`address` is the URL of a server, such as http://10.0.0.5:8000, not {address!r:.200}")
        if self._servers is None:
            return json_response(ProrlDone(IGNORED))
        address = address.rstrip("/")
        if address in client.addresses:
            return json_response(ProrlDone("the server is known already"))
        if len(self._servers) >= SERVERS_LIMIT or len(address) > ADDRESS_LIMIT:
            return detail(400, f"there may be {SERVERS_LIMIT} servers, with addresses of up to {ADDRESS_LIMIT} letters")
        client.addresses.append(address)
        self._state.write()
        self._servers.add((address,))
        if known := self._tokenizer or self._state.tokenizer:
            self._servers.start(known)
        return json_response(ProrlDone("the server was added"))

    async def clear_llm_server(self, _request: web.Request, sender: Sender) -> web.Response:
        """Remove this ProRL client's servers."""
        client = self._server_owner(sender)
        if self._servers is None:
            return json_response(ProrlDone(IGNORED))
        client.addresses.clear()
        if not self._state.addresses:
            self._state.tokenizer = ""
        self._state.write()
        await self._servers.keep_only(self._state.addresses)
        return json_response(ProrlDone("no servers are left"))

    async def cancel(self, request: web.Request, sender: Sender) -> web.Response:
        """Cancel jobs of /process."""
        self._client(sender)
        job_id = (await _body(request)).get("job_id")
        tasks = set(self._open[sender.name].get(job_id, ())) if isinstance(job_id, str) else set()
        for task in tasks:
            task.cancel()
        return json_response(ProrlDone("cancelled", len(tasks)))

    async def process(self, request: web.Request, sender: Sender) -> web.Response:
        """Run a rollout for a ProRL client; return its messages and reward."""
        if not self._client(sender).is_running:
            return detail(503, "Server is not running; POST /start first")
        body = await _body(request)
        job_id = body.get("job_id")
        name = job_id if isinstance(job_id, str) else None
        work = asyncio.create_task(self._processed(body, name))
        named = self._open[sender.name][name]
        named.add(work)
        work.add_done_callback(partial(self._ended, sender.name, name))
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:  # the client has left
            work.cancel()
            raise
        if work.cancelled():
            return json_response(failure(body.get("instance"), name, CANCELLED, "run"))
        return web.Response(body=work.result(), content_type="application/json")

    def _server_owner(self, sender: Sender) -> ClientState:
        """Return the state of a client that may add servers, which serve the rollouts of all sessions."""
        check_may(sender, KeyRole.OPERATOR)
        return self._state.of(sender.name)

    def _client(self, sender: Sender) -> ClientState:
        check_may(sender, KeyRole.TRAINER)
        return self._state.of(sender.name)

    async def _end(self, name: str) -> None:
        """Cancel a client's requests; return when they have ended, or after `STOP_S`."""
        tasks = {task for named in self._open.pop(name, {}).values() for task in named}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)

    def _ended(self, client: str, name: str | None, work: asyncio.Task[bytes]) -> None:
        named = self._open.get(client, {})
        if (tasks := named.get(name)) is not None:
            tasks.discard(work)
            if not tasks:
                del named[name]

    async def _processed(self, body: dict[str, Any], name: str | None) -> bytes:
        """Run a request's job; return the answer, also for failures."""
        instance: Any = body.get("instance")
        parameters: Any = body.get("sampling_params") or {}
        try:
            job = job_of(instance, parameters, await self._formats())
        except ProrlError as error:
            return msgspec.json.encode(failure(instance, name, error.message, "init"))
        self._start_engines(parameters)
        try:
            trajectory = await self._rolled_out(job)
            texts = await self._texts_for(parameters, job, trajectory)
            return await self._told(instance, name, job, trajectory, texts)
        except ProrlError as error:
            info = error.info()
        except Exception as error:  # a bug must cost only this instance
            log.exception("a fault of prorl_zmq")
            info = ErrorInfo("internal_error", f"{type(error).__name__}: {error}")
        return msgspec.json.encode(failure(instance, name, f"{info.code}: {info.message}", "run"))

    async def _rolled_out(self, job: Job) -> Trajectory:
        while True:
            with suppress(Busy):  # the client has waited for room between its tries
                return await self._jobs.run(job)

    async def _texts_for(self, parameters: Any, job: Job, trajectory: Trajectory) -> MessageTexts | None:
        """Return the reader of the trajectory's tokens; None: the client reads no texts.

        Raises:
            ProrlError: there is no reader, and the client would train on messages without texts.
        """
        if not len(trajectory.token_ids):
            return None
        try:
            return await self._texts.of(trajectory.result.backend, schemas_of(job.instance.get("tools")))
        except ProrlError:
            if parameters.get("token_level_generation") is True:
                return None
            raise

    async def _told(
        self, instance: Any, name: str | None, job: Job, trajectory: Trajectory, texts: MessageTexts | None
    ) -> bytes:
        def written() -> bytes:
            return msgspec.json.encode(answer(instance, name, job, trajectory, texts))

        return await asyncio.to_thread(written) if len(trajectory.token_ids) >= ASIDE_TOKENS else written()

    async def _formats(self) -> tuple[RowFormat, ...]:
        if not self._row_formats:
            self._row_formats = await asyncio.to_thread(known_row_formats)
        return self._row_formats

    def _start_engines(self, parameters: Any) -> None:
        """Start the engines that wait for a tokenizer: without one of the settings, that of the first job with one."""
        if self._servers is None:
            return
        named = parameters.get("custom_tokenizer") if isinstance(parameters, dict) else None
        if not self._tokenizer and not self._state.tokenizer and _is_tokenizer(named):
            self._state.tokenizer = named
            self._state.write()
        self._servers.start(self._tokenizer or self._state.tokenizer)


def _is_tokenizer(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and 0 < len(value) <= TOKENIZER_LIMIT and not value.startswith("-")


def detail(status: int, text: str) -> web.Response:
    """Return an error in the form of ProRL's server, which is FastAPI's."""
    return json_response({"detail": text}, status)


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await decoded_body(request, msgspec.json.decode)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"the body is not JSON: {error}", field="$") from None
    if not isinstance(body, dict):
        raise MalformedMessage("the body must be an object", field="$")
    return body
