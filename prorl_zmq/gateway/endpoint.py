"""One endpoint of the JSON API: its path, what it takes and returns, and what answers it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from ..client.requests import JOBS_PER_REQUEST
from ..errors import MalformedMessage
from ..wire.json_bounds import json_values
from .bodies import Waiting  # noqa: TC001 - msgspec reads annotations at run time

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from aiohttp import web

    from ..security.rights import Sender

    Decoded = TypeVar("Decoded")
    Answer = Callable[["Call"], Awaitable[object]]


VALUES_LIMIT = 1_000_000
"""JSON values of a body: a tenth of a second to decode."""
ASIDE_BYTES = 64 * 1024
"""From so many bytes on, a body is decoded in a thread."""
_DECODERS = ThreadPoolExecutor(2, "prorl-decode")
"""Few, since they share the interpreter with the event loop."""


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request, read and checked."""

    sender: Sender
    body: Any
    """As `Endpoint.takes` says."""
    path: Mapping[str, str]
    query: Any
    """As `Endpoint.query` says."""
    accepts_bytes: bool
    traceparent: str
    """The W3C trace context of the span that asks, as HTTP has it; jobs go on with that trace."""
    origin: str
    """The gateway's address as the client knows it, such as `http://127.0.0.1:8080`."""


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of endpoints that take no query parameters."""


class WaitQuery(NoQuery, frozen=True):
    """How long the answer may be held back."""

    wait_s: Waiting = 0.0
    """Seconds to wait while there is nothing to give."""


class Endpoint(NamedTuple):
    method: str
    path: str
    answer: Answer
    """Returns a Struct, which becomes JSON, or a whole response."""
    returns: type
    takes: Any = None
    query: type[msgspec.Struct] = NoQuery
    binary: bool = False
    """The answer may be asked for as `application/octet-stream`."""
    with_defaults: bool = False
    """The answer has all fields, also those that have their defaults: so the page needs no list of them."""

    @property
    def summary(self) -> str:
        return (self.answer.__doc__ or "").strip()


async def read_call(endpoint: Endpoint, request: web.Request, sender: Sender) -> Call:
    """Read a request.

    Raises:
        MalformedMessage: its body or query is not what the endpoint takes; `field` says where.
        HTTPRequestEntityTooLarge: its body is over the limit.
    """
    body = None
    if endpoint.takes is not None:
        body = await decoded_body(request, lambda data: _decoded(data, endpoint.takes))
    try:
        query = msgspec.convert(dict(request.query), endpoint.query, strict=False)
    except msgspec.ValidationError as error:
        raise MalformedMessage(f"query parameters: {error}", field="query") from None
    accepts = endpoint.binary and "application/octet-stream" in request.headers.get("Accept", "")
    traceparent, origin = request.headers.get("traceparent", ""), f"{request.scheme}://{request.host}"
    return Call(sender, body, request.match_info, query, accepts, traceparent, origin)


async def decoded_body(request: web.Request, decode: Callable[[bytes], Decoded]) -> Decoded:
    """Return what a request's body is decoded to; nothing is decoded that has more values than a body may.

    Raises:
        MalformedMessage: it has; or what `decode` raises.
        HTTPRequestEntityTooLarge: the body is over the limit.
    """
    data = await request.read() or b"{}"
    if len(data) < ASIDE_BYTES:
        return decode(data)
    return await asyncio.get_running_loop().run_in_executor(_DECODERS, _bounded, data, decode)


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
    """Refuse a list of too many jobs before any of them is decoded.

    Raises:
        MalformedMessage: there are more than a request may have.
    """
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
