"""One endpoint of the JSON API: its path, what it takes and returns, and what answers it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..errors import MalformedMessage
from .bodies import Waiting  # noqa: TC001 - msgspec reads annotations at run time

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from aiohttp import web

    from ..security.rights import Sender

    Answer = Callable[["Call"], Awaitable[object]]


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

    @property
    def summary(self) -> str:
        return (self.answer.__doc__ or "").strip()


async def read_call(endpoint: Endpoint, request: web.Request, sender: Sender) -> Call:
    """Read a request.

    Raises:
        MalformedMessage: its body or query is not what the endpoint takes; `field` says where.
        HTTPRequestEntityTooLarge: its body is over the limit.
    """
    body = _decoded(await request.read(), endpoint.takes) if endpoint.takes is not None else None
    try:
        query = msgspec.convert(dict(request.query), endpoint.query, strict=False)
    except msgspec.ValidationError as error:
        raise MalformedMessage(f"query parameters: {error}", field="query") from None
    accepts = endpoint.binary and "application/octet-stream" in request.headers.get("Accept", "")
    return Call(sender, body, request.match_info, query, accepts, request.headers.get("traceparent", ""))


def _decoded(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `")
        raise MalformedMessage(
            str(error), field=place.rstrip("`") or what.partition("field `")[2].rstrip("`")
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"the body is not JSON: {error}", field="$") from None
