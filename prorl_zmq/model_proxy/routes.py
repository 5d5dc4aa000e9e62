"""Map paths to dialects. Base URLs differ (`/v1`, `/s/NAME/v1`, none), so the end of a path decides."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .dialect import Dialect, Route


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
