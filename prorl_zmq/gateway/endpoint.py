"""`Endpoint`: one route of a gateway, with its request and answer types. `openapi` describes all of them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import msgspec
from aiohttp import web

from ..client.requests import JOBS_PER_REQUEST
from ..errors import MalformedMessage
from ..wire.json_bounds import json_values
from .bodies import Waiting  # noqa: TC001 - msgspec reads annotations at run time
from .http_errors import json_response, with_defaults
from .open_bodies import take_bytes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from ..client.requests import Received
    from ..data.trajectory import Trajectory
    from ..security.rights import Sender

    Decoded = TypeVar("Decoded")

JSON = "application/json"
ASIDE_TOKENS = 16_384
"""More tokens are encoded in a thread."""
VALUES_LIMIT = 1_000_000
"""JSON values of a body: a tenth of a second to decode."""
BODY_S = 300.0
"""How long a client may take to send a body."""
ASIDE_BYTES = 64 * 1024
"""Larger bodies are decoded in a thread."""
_DECODERS = ThreadPoolExecutor(2, "prorl-decode")
"""Few, since they share the interpreter with the event loop."""


@dataclass(frozen=True, slots=True)
class Call:
    """A checked HTTP request."""

    sender: Sender
    body: Any
    """Of the type `Endpoint.takes`."""
    path: Mapping[str, str]
    query: Any
    """Of the type `Endpoint.query`."""
    accepts_bytes: bool
    traceparent: str
    """The W3C trace context of the request; jobs continue that trace."""
    origin: str
    """The gateway's address as the client knows it, such as `http://127.0.0.1:8080`."""


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of endpoints that take no query parameters."""


class WaitQuery(NoQuery, frozen=True):
    """How long the answer may be held back."""

    wait_s: Waiting = 0.0
    """Seconds to wait while there is nothing to give."""


class Endpoint(NamedTuple):
    """A route. The docstring of `handler` is its description."""

    method: str
    path: str
    handler: Callable[..., Awaitable[object]]
    """Takes a `Call` and returns a Struct, which becomes JSON, or a response; see also `raw`."""
    returns: Any = dict
    """The type of the answer; `dict`: JSON that is not described."""
    takes: Any = None
    query: type[msgspec.Struct] = NoQuery
    name: str = ""
    """The operation's id; empty: the handler's name."""
    content: str = JSON
    binary: bool = False
    """The answer may be requested as `application/octet-stream`."""
    with_defaults: bool = False
    """The answer has all fields, also those that have their defaults."""
    raw: bool = False
    """`handler` takes the request and its sender, and returns a response; `takes` only describes the body."""
    needs: Literal["token", "rollout key", "nothing"] = "token"
    """What a request must show."""

    async def answer(self, request: web.Request, sender: Sender) -> web.StreamResponse:
        """Answer a request.

        Raises:
            MalformedMessage: its body or query is invalid; `field` names the place.
            HTTPRequestEntityTooLarge: its body is over the limit.
        """
        answered = await (
            self.handler(request, sender) if self.raw else self.handler(await self._read(request, sender))
        )
        if isinstance(answered, web.StreamResponse):
            return answered
        return json_response(with_defaults(answered) if self.with_defaults else answered)

    async def _read(self, request: web.Request, sender: Sender) -> Call:
        body = None
        if self.takes is not None:
            body = await decoded_body(request, lambda data: _decoded(data, self.takes))
        try:
            query = msgspec.convert(dict(request.query), self.query, strict=False)
        except msgspec.ValidationError as error:
            raise MalformedMessage(f"query parameters: {error}", field="query") from None
        accepts = self.binary and "application/octet-stream" in request.headers.get("Accept", "")
        traceparent, origin = request.headers.get("traceparent", ""), f"{request.scheme}://{request.host}"
        return Call(sender, body, request.match_info, query, accepts, traceparent, origin)


async def decoded_body(request: web.Request, decode: Callable[[bytes], Decoded]) -> Decoded:
    """Return the decoded body of a request.

    Raises:
        MalformedMessage: it has more values than the limit; or what `decode` raises.
        Busy: the bodies of this token's open requests take too much memory.
        HTTPRequestEntityTooLarge: it is over the size limit.
        HTTPRequestTimeout: it did not come within `BODY_S`.
    """
    try:
        async with asyncio.timeout(BODY_S):
            data = await _read(request) or b"{}"
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body did not come within {BODY_S:g} s") from None
    if len(data) < ASIDE_BYTES:
        return decode(data)
    return await asyncio.get_running_loop().run_in_executor(_DECODERS, _bounded, data, decode)


async def _read(request: web.Request) -> bytes:
    parts, size = [], 0
    async for part in request.content.iter_any():
        size += len(part)
        if size > request.client_max_size:
            raise web.HTTPRequestEntityTooLarge(request.client_max_size, size)
        take_bytes(len(part))
        parts.append(part)
    return b"".join(parts)


def _bounded(data: bytes, decode: Callable[[bytes], Decoded]) -> Decoded:
    if json_values(data, VALUES_LIMIT) > VALUES_LIMIT:
        message = (
            f"the body has more than {VALUES_LIMIT} values, which is the most that is taken; send several requests"
        )
        raise MalformedMessage(message, field="$")
    return decode(data)


class _Prompts(msgspec.Struct):
    prompts: list[msgspec.Raw] = []


def _count_jobs(body: bytes) -> None:
    """Raise `MalformedMessage` for a list of too many jobs, before any of them is decoded."""
    is_list = body[:64].lstrip().startswith(b"[")
    try:
        if is_list:
            count = len(msgspec.json.decode(body, type=list[msgspec.Raw]))
        else:
            count = len(msgspec.json.decode(body, type=_Prompts).prompts)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return  # decoding says what is wrong
    if count > JOBS_PER_REQUEST:
        message = f"there are {count} jobs; a request may have {JOBS_PER_REQUEST}: send several"
        raise MalformedMessage(message, field="$" if is_list else "$.prompts")


def _decoded(body: bytes, kind: Any) -> Any:
    _count_jobs(body)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `")
        raise MalformedMessage(
            str(error), field=place.rstrip("`") or what.partition("field `")[2].rstrip("`")
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"the body is not JSON: {error}", field="$") from None


async def json_of(trajectories: Sequence[Trajectory], make: Callable[[], object]) -> web.Response:
    """Return the result of `make` as JSON."""

    def written() -> bytes:
        return msgspec.json.encode(make())

    many = sum(len(one.token_ids) for one in trajectories) >= ASIDE_TOKENS
    body = await asyncio.to_thread(written) if many else written()
    return web.Response(body=body, content_type="application/json")


def binary(trajectory: Trajectory, block: Received) -> web.Response:
    """Return a trajectory's block; two headers have the numbers that define its layout."""
    result = trajectory.result
    headers = {"Prorl-Tokens": str(result.tokens), "Prorl-Turns": str(result.turns), "Prorl-Outcome": result.outcome}
    if result.reward is not None:
        headers["Prorl-Reward"] = repr(result.reward)
    body = block if isinstance(block, bytes) else block.bytes
    return web.Response(body=body, headers=headers, content_type="application/octet-stream")
