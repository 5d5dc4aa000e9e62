"""The interface of an HTTP API for the server: how to read a request, and how to write each kind of answer.

`Routes` maps paths to dialects. Base URLs differ (`/v1`, `/s/NAME/v1`, none), so the end of a path decides.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .calls import CallRefused, ModelReply, ModelRequest

KEEP_ALIVE_S = 15.0
"""How often a stream says that it is alive, in an event of the API's own: comments are not counted by all harnesses."""


Purpose = Literal["create", "stream", "count", "websocket"]
"""What a route is for: a reply; a reply that is streamed whatever the body says; the prompt's tokens; an upgrade."""


class Route(NamedTuple):
    """A path of an API, as a harness writes it behind its base URL."""

    method: str
    path: str
    """How a request's path ends, whatever the base URL; with places, such as `{model}`."""
    purpose: Purpose
    count_field: str = ""
    """Of `count`: the field of the answer that holds the tokens."""


class EventStream(Protocol):
    """The events of one streamed reply, each as bytes that go out as they are.

    `waiting` and `fail` may come before `begin`: a call may wait long before it is taken.
    """

    def begin(self, turn_id: str, prompt_tokens: int) -> bytes:
        """Return what comes first: at once, before anything is generated."""

    def waiting(self) -> bytes:
        """Return an event that says nothing but that the reply is still coming."""

    def end(self, reply: ModelReply) -> bytes:
        """Return all the rest."""

    def fail(self, error: CallRefused, refusal_status: int) -> bytes:
        """Return what ends a stream that has begun and cannot be finished."""


class Dialect(Protocol):
    """One HTTP API."""

    routes: tuple[Route, ...]

    def read(self, body: dict[str, Any], headers: Mapping[str, str]) -> ModelRequest:
        """Read a request; fields that are not known are left alone.

        Args:
            body: the decoded JSON, and what stood in the path's places (`model`).
            headers: with names in lower case.

        Raises:
            CallRefused: it is wrong (`Problem.INVALID`), with the name of the field.
        """

    def write(self, request: ModelRequest, reply: ModelReply, model: str) -> dict[str, Any]:
        """Return a whole reply as JSON data."""

    def stream(self, request: ModelRequest, model: str) -> EventStream:
        """Return the stream of a reply."""

    def error(self, error: CallRefused, refusal_status: int) -> tuple[int, dict[str, Any]]:
        """Return the status and the JSON data of an error in this API's form."""


class Match(NamedTuple):
    """A route that a request asks for."""

    dialect: Dialect
    route: Route
    places: Mapping[str, str]
    """What stands in the path's places."""


class Routes:
    """The routes of all dialects."""

    def __init__(self, dialects: Iterable[Dialect]) -> None:
        self._routes = [
            (re.compile(_pattern(route.path)), dialect, route) for dialect in dialects for route in dialect.routes
        ]

    def matches(self, path: str) -> list[Match]:
        """Return the routes of a path, whatever their method."""
        found = ((pattern.search(path.rstrip("/")), dialect, route) for pattern, dialect, route in self._routes)
        return [Match(dialect, route, match.groupdict()) for match, dialect, route in found if match]

    def paths(self) -> str:
        """Return all that there is, for people."""
        return ", ".join(f"{route.method} {route.path}" for _, _, route in self._routes)


def _pattern(path: str) -> str:
    return re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^:]+)", re.escape(path)) + "$"
