"""The HTTP server of one rollout's model: requests of a harness, in all dialects, become calls of a `Model`.

It listens on a given socket, which identifies the rollout. If other programs can reach that socket, each call must
present a key. A stream gets a status within `keep_alive_s`, even if the model has not accepted the call by then; later
errors are events. A harness that disconnects cancels its call. `Model` and the pending calls always learn whether a
reply was delivered.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import secrets
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ..wire.json_bounds import json_values
from ..wire.messages.jobs import MAIN
from .calls import CallRefused, Problem
from .dialect import KEEP_ALIVE_S, Routes
from .dialects.chat_completions import ChatCompletions
from .dialects.common import invalid
from .dialects.gemini import Gemini
from .dialects.messages import Messages
from .dialects.responses import Responses
from .event_writer import EventWriter, finished

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from .calls import Model, ModelRequest
    from .dialect import Dialect, Match

log = logging.getLogger(__name__)

BODY_LIMIT_BYTES: Final = 4 * 2**20
"""Of a request, decompressed. The largest that harnesses were seen to send is below one."""
VALUES_LIMIT: Final = 200_000
"""JSON values of a request: those of a history with as many pieces as a conversation may have."""
VALUE_COST: Final = 64
"""What a value costs besides its bytes, in bytes of text that take as long to decode."""
ASIDE_COST: Final = 64 * 1024
"""From this cost on, a body is decoded and read in a thread."""
BODIES, BODY_S = 4, 30.0
"""How many bodies of a rollout are read at a time, and how long one may take: all that is held of what is unread."""
LOGGED_FAILURES: Final = 3
"""Failures of the proxy that are logged for a rollout, which may make as many as it likes."""
CONNECTIONS: Final = 64
"""Of one rollout at a time: a program may open what it likes, and each takes a descriptor of this process."""
_RETRY_AFTER_S: Final = 1
HTTP_ERRORS: Final = {401: "authentication_error", 404: "not_found_error", 503: "api_error"}
CONVERSATION_HEADER: Final = "X-Prorl-Conversation"
_CONVERSATION_PATH: Final = re.compile(r"/c/([^/]+)/")
_CHAT: Final = ChatCompletions()
_ROUTES: Final = Routes([_CHAT, Responses(), Messages(), Gemini()])


class ModelServer:
    """Serves a model to one rollout's harness, at a socket of its own (`start`) or behind another server (`handle`).

    Args:
        model: what answers.
        key: what each call must show; empty: nothing.
        key_sha256: SHA-256 of that key, in hexadecimal digits, for who does not have it.
        keep_alive_s: how often a stream says that it is alive.
        body_limit_bytes: of a request.
        named: calls may name their conversations, by the header or by `/c/NAME` in the path.
    """

    def __init__(
        self,
        model: Model,
        *,
        key: str = "",
        key_sha256: str = "",
        keep_alive_s: float = KEEP_ALIVE_S,
        body_limit_bytes: int = BODY_LIMIT_BYTES,
        named: bool = False,
    ) -> None:
        self._model = model
        self._key_sha256 = key_sha256 or (_sha256(key) if key else "")
        self._keep_alive_s = keep_alive_s
        self._body_limit_bytes = body_limit_bytes
        self._named = named
        self._bodies = asyncio.Semaphore(BODIES)
        self._failures = 0
        self._handling: set[asyncio.Task[Any]] = set()
        self._web: web.Server | None = None
        self._listener: asyncio.Server | None = None

    async def start(self, sock: socket.socket) -> None:
        """Serve on a listening socket, which is the server's from here on."""
        self._web = web.Server(self.handle, handler_cancellation=True, access_log=None, logger=log)
        self._listener = await asyncio.get_running_loop().create_server(self._protocol, sock=sock)

    async def close(self, timeout_s: float) -> None:
        """Take no more calls; those under way are cancelled when they have not ended by the timeout."""
        if self._web is not None and self._listener is not None:
            self._listener.close()
            self._web.pre_shutdown()
        if self._handling:
            await asyncio.wait(self._handling, timeout=timeout_s)
        for task in tuple(self._handling):
            task.cancel()
        if self._handling:
            await asyncio.wait(self._handling)
        if self._web is not None:
            await self._web.shutdown(0)

    def _protocol(self) -> asyncio.BaseProtocol:
        assert self._web is not None
        return self._web() if len(self._web.connections) < CONNECTIONS else _Refusing()

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer a request."""
        task = asyncio.current_task()
        assert task is not None
        self._handling.add(task)
        try:
            return await self._answer(http)
        finally:
            self._handling.discard(task)

    async def _answer(self, http: web.BaseRequest) -> web.StreamResponse:
        if http.method == "HEAD":  # Claude Code asks whether anybody is here
            return web.Response()
        if not self.is_shown_the_key(http):
            return self.refuse_key(http)
        matches = _ROUTES.matches(http.path)
        if http.method == "GET" and http.path.rstrip("/").endswith("/models"):
            return _json_response(200, _models(self._model.name))
        match = next((match for match in matches if match.route.method == http.method), None)
        if match is None or match.route.purpose == "websocket":
            return self._no_route(http, matches, match)
        try:
            return await self._call(http, match)
        except Exception as error:  # noqa: BLE001 - logged, unless it is a refusal
            return self._refusal(match.dialect, self._refused(error))

    def is_shown_the_key(self, http: web.BaseRequest) -> bool:
        """Return whether a call shows the rollout's key, if there is one."""
        return not self._key_sha256 or _shows(http, self._key_sha256)

    def refuse_key(self, http: web.BaseRequest) -> web.Response:
        """Return the answer to a call that does not show the key."""
        matches = _ROUTES.matches(http.path)
        refused = CallRefused(Problem.NOT_ALLOWED, "the call does not show the key of this rollout")
        return self._refusal(matches[0].dialect if matches else _CHAT, refused)

    async def _call(self, http: web.BaseRequest, match: Match) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in http.headers.items()}
        request = await self._request(http, lambda body: match.dialect.read({**body, **match.places}, headers))
        if self._named:
            in_path = _CONVERSATION_PATH.search(http.path)
            name = http.headers.get(CONVERSATION_HEADER) or (in_path[1] if in_path is not None else MAIN)
            request = replace(request, conversation=name)
        if match.route.purpose == "count":
            return _json_response(200, {match.route.count_field: await self._model.count_tokens(request)})
        if match.route.purpose == "stream":
            request = replace(request, stream=True)
        reply = self._stream if request.stream else self._whole
        return await reply(http, match.dialect, request)

    async def _whole(self, http: web.BaseRequest, dialect: Dialect, request: ModelRequest) -> web.StreamResponse:
        call = await self._model.open(request)
        delivered = False
        try:
            response = _json_response(200, dialect.write(request, await call.reply(), self._model.name))
            delivered = await finished(http, response)
        finally:
            call.close(delivered=delivered)
        return response

    async def _stream(self, http: web.BaseRequest, dialect: Dialect, request: ModelRequest) -> web.StreamResponse:
        events = dialect.stream(request, self._model.name)
        writer = EventWriter(http, self._keep_alive_s)
        call = None
        delivered = False
        try:
            async with writer.kept_alive(events.waiting):
                call = await self._model.open(request)
                writer.write_later(events.begin(call.turn_id, call.prompt_tokens))
                reply = await call.reply()
            delivered = await writer.finish(events.end(reply))
        except Exception as error:  # of any kind: the stream has begun, so only its last event can report it
            if not writer.begun:
                raise
            await writer.finish(events.fail(self._refused(error), self._model.refusal_status))
        finally:
            if call is not None:
                call.close(delivered=delivered)
        return writer.response

    async def _request(self, http: web.BaseRequest, read: Callable[[dict[str, Any]], ModelRequest]) -> ModelRequest:
        """Return what is asked, once the rollout was charged for it.

        Raises:
            CallRefused: the body is too large, no JSON object or no request of the API, or the rollout is over.
        """
        async with self._bodies:
            data = await self._body(http)
            values = json_values(data, VALUES_LIMIT)
            cost = len(data) + VALUE_COST * values
            self._model.charge(cost)
            if values > VALUES_LIMIT:
                message = f"the body has more than {VALUES_LIMIT} values, which is the most that is taken"
                raise CallRefused(Problem.TOO_LARGE, message)
            if cost < ASIDE_COST:
                return _read(data, read)
            return await asyncio.to_thread(_read, data, read)

    async def _body(self, http: web.BaseRequest) -> bytearray:
        """Return a request's body.

        Raises:
            CallRefused: it is too large, or does not come.
        """
        too_large = CallRefused(
            Problem.TOO_LARGE, f"the body has more than {self._body_limit_bytes} bytes, which is the most that is taken"
        )
        if (http.content_length or 0) > self._body_limit_bytes:
            raise too_large
        data = bytearray()  # with `http.read` each open connection would keep its last body
        whole = False
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in http.content.iter_any():
                    data += chunk
                    if len(data) > self._body_limit_bytes:
                        raise too_large
            whole = True
        except TimeoutError:
            raise invalid(f"the body did not come within {BODY_S:g} s") from None
        except (HttpProcessingError, web.RequestPayloadError) as error:
            raise invalid(f"the body cannot be read: {error}") from None
        finally:
            if data and not whole:  # also of a client that has left: the next call is refused
                with suppress(CallRefused):
                    self._model.charge(len(data))
        return data

    def _no_route(self, http: web.BaseRequest, matches: list[Match], match: Match | None) -> web.Response:
        """Answer what no dialect answers, in the form of the nearest."""
        dialect = matches[0].dialect if matches else _CHAT
        if match is not None:
            status, words = 426, "this path is not served over WebSocket; use POST"
        elif matches:
            allowed = ", ".join(found.route.method for found in matches)
            status, words = 405, f"{http.path} takes {allowed}, not {http.method}"
        else:
            status, words = 404, f"there is no {http.path}; behind any prefix there are GET /models, {_ROUTES.paths()}"
        _, data = dialect.error(CallRefused(Problem.NOT_FOUND, words), self._model.refusal_status)
        return _json_response(status, data)

    def _refusal(self, dialect: Dialect, refused: CallRefused) -> web.Response:
        status, data = dialect.error(refused, self._model.refusal_status)
        response = _json_response(status, data)
        if refused.problem == Problem.BUSY:
            response.headers["Retry-After"] = str(_RETRY_AFTER_S)
        return response

    def _refused(self, error: Exception) -> CallRefused:
        """Return what to tell a harness of an error."""
        if isinstance(error, CallRefused):
            return error
        self._failures += 1
        if self._failures <= LOGGED_FAILURES:
            more = "; further failures of this rollout are not logged" if self._failures == LOGGED_FAILURES else ""
            log.error("a call of the model failed in the proxy%s", more, exc_info=error)
        return CallRefused(Problem.INTERNAL, "the model proxy failed; its log says why")


class _Refusing(asyncio.Protocol):
    """Closes its connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def shown_keys(http: web.BaseRequest) -> tuple[str, ...]:
    """Return what a call shows as its key, in the ways that the APIs have."""
    bearer = http.headers.get("Authorization", "").removeprefix("Bearer ")
    return (
        bearer,
        *(http.headers.get(name, "") for name in ("x-api-key", "x-goog-api-key")),
        http.query.get("key", ""),
    )


def _shows(http: web.BaseRequest, key_sha256: str) -> bool:
    return any(secrets.compare_digest(_sha256(one), key_sha256) for one in shown_keys(http))


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def _read(data: bytearray, read: Callable[[dict[str, Any]], ModelRequest]) -> ModelRequest:
    body = _decoded(data)
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object")
    try:
        return read(body)
    except RecursionError:
        raise invalid("the body is nested too deeply") from None


def _decoded(data: bytearray) -> Any:
    """Decode JSON. JavaScript cuts texts within a character, and JSON of that takes a second look.

    Raises:
        CallRefused: it is no JSON.
    """
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if b"\\ud" not in data.lower():  # no half of a pair
            raise invalid(f"the body is not JSON: {error}") from None
    try:
        text = json.dumps(json.loads(data), ensure_ascii=False)
        return msgspec.json.decode(text.encode(errors="replace"))
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}") from None


def _json_response(status: int, data: dict[str, Any]) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(data), content_type="application/json")


def json_answer(status: int, message: str) -> web.Response:
    """Return an error in a form that the clients of all APIs find its message in."""
    error = {"type": HTTP_ERRORS.get(status, "invalid_request_error"), "code": None, "param": None, "message": message}
    return _json_response(status, {"type": "error", "error": error})


def _models(name: str) -> dict[str, Any]:
    """Return the list of models, as OpenAI and Anthropic have it."""
    model = {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "prorl",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }
    return {"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name}
