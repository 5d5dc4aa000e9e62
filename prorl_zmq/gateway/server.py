"""`Gateway`: the HTTP server of `prorl gateway`, `prorl dashboard` and `prorl metrics`.

    any HTTP client  ──▶  gateway  ──▶  front doors, backend broker

Jobs and trajectories belong to the brokers. The request of a client that disconnects is cancelled. A request ends with
503 if a front door does not answer within `timeout_s`. Any number of gateways with different names may run.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections import Counter
from functools import cached_property, partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from ..client.asynchronous.client import AsyncRolloutClient
from ..errors import Busy, EndpointInUse, InternalError, InvalidEndpoint, NotAllowed, ProrlError
from ..integrations.single_jobs import SingleJobs
from ..security.rights import ANYBODY
from ..service.rollout_brokers import clients_of
from ..system.logs import say
from ..system.open_files import raise_open_files
from ..system.processes import stop_signals
from ..watching.watcher import Watcher
from ..wire.sockets import is_loopback_host
from .connection import GatewayConnection
from .dashboard.dashboard_api import DashboardApi
from .dashboard.job_views import JobViews
from .dashboard.page_files import HEADERS, PLACE, add_page
from .dashboard.run_list import RunList
from .dashboard.watch_stream import WatchStreams
from .endpoint import Endpoint
from .http_errors import error_response, http_error_response, is_for_the_log
from .json_api import JsonApi
from .llm_servers import LlmServers
from .message_texts import LoadedTexts
from .metrics import RequestMetrics, answer_metrics
from .open_bodies import OpenBodies
from .openai_api import OpenAiApi
from .openapi import DOCS, DOCUMENT, docs_html, openapi_document
from .page_token import PageToken
from .prorl_api import ProrlApi
from .samples import Samples
from .stored_state import StoredState
from .tinker_api import TinkerApi

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..security.bearer_list import BearerList
    from ..security.rights import Sender
    from .settings import GatewayOptions

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

BODY_LIMIT_BYTES = 64 * 2**20
TINKER = "/api/v1/"
TINKER_PREFIX = "tml-"
"""Tinker's client wants its key to begin with this; a token may do so by itself."""
TEXT, EVENTS = "text/plain", "text/event-stream"
READING = ("GET", "HEAD")
REQUESTS_LIMIT = 8192
"""Most concurrent requests; further ones are answered 429."""
STOP_S = 5.0
"""How long open requests may take after a stop."""
STARTING_S = 120.0
"""How long the service may take to start before an engine host does."""

log = logging.getLogger("prorl.gateway")


class Gateway:
    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        settings = options.settings
        self._tls = options.tls()
        self._bearers: BearerList | PageToken = options.bearers()
        self._keyring = options.keyring()
        name = f"gateway-{options.own_name}"
        # All that may be refused is checked: what is opened from here on is closed by `run`.
        self._connection = GatewayConnection(options, self._keyring)
        self._json_api = JsonApi(self._connection)
        texts = LoadedTexts(self._connection)
        self._clients = self._broker_clients()
        watcher = Watcher(self._clients)
        self._streams = WatchStreams(watcher)
        dashboard = DashboardApi(
            self._clients, watcher, JobViews(texts), RunList(options.runs), read_only=options.read_only
        )
        servers = LlmServers(name, self._engine_flags) if settings.use_llm_servers else None
        state = StoredState(options.run_dir / f"{name}.json")
        self._prorl_api = ProrlApi(
            self._connection, SingleJobs(partial(self._client, name)), state, servers, settings.tokenizer, texts
        )
        self._samples = Samples(self._connection, self._client, name)
        self._tinker_api = TinkerApi(self._samples)
        self.endpoints = [Endpoint("GET", "/metrics", self._read_metrics, str, name="metrics", content=TEXT, raw=True)]
        if not options.metrics_only:
            self.endpoints += [
                *(*self._json_api.endpoints, *dashboard.endpoints, *self._prorl_api.endpoints),
                *(*OpenAiApi(self._samples).endpoints, *self._tinker_api.endpoints),
                Endpoint("GET", "/v1/watch", self._watch, str, name="watch", content=EVENTS, raw=True),
                Endpoint("GET", DOCUMENT, self._document, name="openapi", raw=True, needs="nothing"),
            ]
        self._requests: Counter[str] = Counter()
        """Open requests by token; those with the keys of rollouts have no name."""
        self._bodies = OpenBodies(shared=options.keys is not None)
        self._metrics = RequestMetrics(options.run_dir, "metrics" if options.metrics_only else "gateway")
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        options = self._options
        if options.runs is not None and not options.runs.is_dir():
            log.warning("%s is not a folder: no evaluation is shown until `prorl eval --out` makes it", options.runs)
        if options.keys is not None and not len(self._bearers):
            log.warning("no bearer token is allowed yet: make one with `prorl keys bearer NAME --role trainer`")
        logging.getLogger("aiohttp.server").addFilter(is_for_the_log)
        runner = web.AppRunner(
            self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=STOP_S, keepalive_timeout=75
        )
        await runner.setup()
        self._metrics.start()
        raise_open_files()
        try:
            with stop_signals(self._stopping.set):
                await self._listen(runner)
                if not options.metrics_only:
                    self._prorl_api.resume()
                self._say_ready()
                await self._stopping.wait()
        finally:
            self._metrics.close()
            self._streams.end()
            await self._json_api.rollouts.close()
            await self._prorl_api.close()
            await self._tinker_api.close()
            await self._samples.close()
            await runner.cleanup()
            await self.close()

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
        self._connection.close()

    def _say_ready(self) -> None:
        options = self._options
        if options.metrics_only:
            say("prorl metrics", f"ready at {options.url}/metrics")
        elif options.program == "gateway":
            say("prorl gateway", f"ready at {options.url}; its dashboard is at {options.url}{PLACE}")
        else:
            key = f"#key={self._bearers.token}" if isinstance(self._bearers, PageToken) else ""
            say("prorl dashboard", f"open {options.url}{PLACE}{key}")

    async def _listen(self, runner: web.AppRunner) -> None:
        options = self._options
        site = web.TCPSite(runner, options.host.strip("[]"), options.port, ssl_context=self._tls, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise EndpointInUse(
                    f"{options.settings.bind} is in use; name another with --bind, or as `bind` in the topology file",
                    endpoint=options.settings.bind,
                ) from None
            raise InvalidEndpoint(
                f"{options.settings.bind} cannot be bound: {error.strerror}", endpoint=options.settings.bind
            ) from None

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_LIMIT_BYTES, middlewares=[self._metrics.counted, _refused])
        for endpoint in self.endpoints:
            handle = self._healthy(endpoint) if endpoint.needs == "nothing" else self._guarded(endpoint)
            app.router.add_route(endpoint.method, endpoint.path, handle)
            if endpoint.method == "GET":
                app.router.add_route("HEAD", endpoint.path, handle)
        if not self._options.metrics_only:
            add_page(app)
            app.router.add_get(DOCS, self._docs)
        return app

    def _guarded(self, endpoint: Endpoint) -> Handler:
        """Return a handler for allowed requests only; a rollout's key is checked by the rollout's process."""
        by_rollout_key = endpoint.needs == "rollout key"

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                sender = ANYBODY if by_rollout_key else self._sender(request)
            except NotAllowed as error:
                return error_response(error, 401)
            if self._is_full(sender.name):
                return error_response(Busy("too many requests are open at this gateway", retry_after_s=1.0))
            self._requests[sender.name] += 1
            try:
                if self._is_open_to(sender) and (self._options.keys is None or not by_rollout_key):
                    self._check_origin(request)
                if self._options.read_only and request.method not in READING:
                    raise NotAllowed("this dashboard was started with --read-only: it shows, and changes nothing")
                # Of several such headers, aiohttp decompresses by the last.
                if {each.lower() for each in request.headers.getall("Content-Encoding", ())} - {"identity"}:
                    raise web.HTTPUnsupportedMediaType(text="a body must not be compressed: send it as it is")
                with self._bodies.of(sender.name):
                    return await endpoint.answer(request, sender)
            except ProrlError as error:
                return error_response(error)
            except web.HTTPException:
                raise
            except Exception as error:  # a bug must cost only this request
                log.exception("%s %s failed", request.method, request.path)
                return error_response(InternalError(f"{type(error).__name__}: {error}"))
            finally:
                self._requests[sender.name] -= 1

        return handle

    def _is_full(self, name: str) -> bool:
        """Return whether a token may open no further request: with keys, each may have half of what others leave."""
        total, own = self._requests.total(), self._requests[name]
        return total >= REQUESTS_LIMIT or (self._options.keys is not None and 2 * own >= REQUESTS_LIMIT - (total - own))

    def _healthy(self, endpoint: Endpoint) -> Handler:
        """Return a handler without a key, which answers any error with 503."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await endpoint.answer(request, ANYBODY)
            except ProrlError as error:
                return error_response(error, 503)

        return handle

    def _is_open_to(self, sender: Sender) -> bool:
        """Return whether a request needed no key, so that a page of another origin could have sent it."""
        return sender.role is None and not isinstance(self._bearers, PageToken)

    def _check_origin(self, request: web.Request) -> None:
        """Raise `NotAllowed` if a web page of another origin may have sent the request."""
        if self._is_foreign_page(request):
            raise NotAllowed("a web page of another origin may not use a gateway that asks for no keys")
        if not self._is_named(request):
            raise NotAllowed(
                f"{request.host[:80]!r} is not a name of this machine; a gateway that asks for no keys answers to no "
                "other: use its address or its host name, or start it with --keys"
            )

    def _is_named(self, request: web.Request) -> bool:
        """Return whether a request was for this address, not for a name that an attacker's DNS points here."""
        host = _host_of(request)
        if self._options.insecure:
            return self._is_own_host(host)
        return is_loopback_host(host) or host == self._options.host

    def _is_foreign_page(self, request: web.Request) -> bool:
        """Return whether a browser sent this for a page of another origin; other programs send no such headers.

        A DNS name that an attacker points here would make its pages same-origin, so only names that cannot be are
        trusted.
        """
        origin = request.headers.get("Origin")
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return True
        return origin is not None and not (
            origin == f"{request.scheme}://{request.host}" and self._is_own_host(_host_of(request))
        )

    def _is_own_host(self, host: str) -> bool:
        try:
            ip_address(host.strip("[]"))
        except ValueError:
            return is_loopback_host(host) or host.lower() in self._own_names
        return True

    @cached_property
    def _own_names(self) -> frozenset[str]:
        """The names of this machine; cached, since the lookup may use DNS."""
        return frozenset(name.lower() for name in (self._options.host, socket.gethostname(), socket.getfqdn()))

    async def _watch(self, request: web.Request, sender: Sender) -> web.StreamResponse:
        """Stream the service's changes as server-sent events, for the dashboard."""
        return await self._streams.answer(request, sender, self._sender)

    async def _read_metrics(self, _request: web.Request, sender: Sender) -> web.Response:
        """Return the metrics of this run folder, for Prometheus."""
        return await answer_metrics(self._options.run_dir, sender)

    async def _document(self, _request: web.Request, _sender: Sender) -> web.Response:
        """Return this document."""
        return web.Response(body=self._encoded_document, content_type="application/json")

    async def _docs(self, _request: web.Request) -> web.Response:
        return web.Response(text=self._page, content_type="text/html", charset="utf-8", headers=HEADERS)

    @cached_property
    def _described(self) -> dict[str, Any]:
        return openapi_document(self.endpoints)

    @cached_property
    def _encoded_document(self) -> bytes:
        return msgspec.json.encode(self._described)

    @cached_property
    def _page(self) -> str:
        return docs_html(self._described)

    def _sender(self, request: web.Request) -> Sender:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            token = request.headers.get("x-api-key", "")
        token = token.strip()
        return self._bearers.sender(token.removeprefix(TINKER_PREFIX) if request.path.startswith(TINKER) else token)

    def _broker_clients(self) -> dict[str, AsyncRolloutClient]:
        """Return the dashboard's clients of all rollout brokers, by name; the first viewer connects them."""
        options = self._options
        if options.metrics_only:
            return {}
        if options.service is not None:
            return clients_of(options.service.path, options.timeout_s, options.service.keys("operator"))
        keys = options.keys if self._keyring is not None else None
        return {"rollout broker": AsyncRolloutClient(options.front_door, timeout_s=options.timeout_s, keys=keys)}

    def _client(self, session: str) -> AsyncRolloutClient:
        """Open a client for jobs of the gateway's own."""
        options = self._options
        return AsyncRolloutClient(
            options.front_door if options.service is None else None,
            session=session,
            timeout_s=options.timeout_s,
            keys=options.keys if self._keyring is not None else None,
            service=options.service.path if options.service is not None else None,
        )

    async def _engine_flags(self) -> list[str]:
        options = self._options
        if options.service is not None:
            return ["--service", str(options.service.path), "--run-dir", str(options.run_dir)]
        broker = (await self._connection.hello(timeout_s=STARTING_S)).backend_broker
        keys = ["--keys", str(options.keys)] if options.keys is not None and self._keyring is not None else []
        return [
            *("--connect", broker, "--run-dir", str(options.run_dir), *keys),
            *(["--insecure"] if options.insecure else []),
        ]


def _host_of(request: web.Request) -> str:
    return request.host.rpartition(":")[0] if request.host.rpartition(":")[2].isdecimal() else request.host


@web.middleware
async def _refused(request: web.Request, handler: Any) -> web.StreamResponse:
    """Convert aiohttp's own errors: unknown paths, other methods, bodies over the limit."""
    try:
        answered: web.StreamResponse = await handler(request)
    except web.HTTPException as error:
        return http_error_response(error)
    return answered


async def serve(options: GatewayOptions) -> None:
    """Run a gateway until a signal ends it."""
    await Gateway(options).run()
