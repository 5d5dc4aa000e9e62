"""Entry points of installed packages: classes and functions by group and name, loaded on first use."""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def offered(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in sorted(all_offered(group))}


def all_offered(group: str, *, fresh: bool = False) -> list[EntryPoint]:
    """Return the entry points of a group, including equal names; `fresh` reads the installed packages again."""
    if fresh:
        _installed.cache_clear()
    return list(_installed(*sys.path).select(group=group))


def package_of(point: EntryPoint) -> str:
    """Return the name of an entry point's package."""
    return point.dist.name if point.dist is not None else "an unknown package"


def load_plugin(group: str, name: str, what: str, *, key: str = "kind", base: str = "") -> Any:
    """Load one entry point; errors name `what` kind of thing it is, such as `engine`, and the option `key`.

    `base` is its required base class as `module:name`, since this file imports none of them.

    Raises:
        ConfigError: no installed package offers the name, several do, it cannot be imported, or its base is wrong.
    """
    points = {point.value: point for point in _installed(*sys.path).select(group=group, name=name)}
    if not points:
        raise ConfigError(f"{name!r} is not a kind of {what}; installed are: {', '.join(offered(group))}", key=key)
    if len(points) > 1:
        several = " and ".join(f"{value} (of {package_of(point)})" for value, point in points.items())
        raise ConfigError(f"the {what} kind {name} is offered by {several}; uninstall all but one", key=key)
    ((value, point),) = points.items()
    subject = f"the {what} kind {name} ({value}, of {package_of(point)})"
    try:
        loaded = point.load()
    except Exception as error:
        raise ConfigError(f"{subject} cannot be imported: {type(error).__name__}: {error}", key=key) from error
    if base and base not in (f"{each.__module__}:{each.__qualname__}" for each in getattr(loaded, "__mro__", ())):
        raise ConfigError(f"{subject} is not a subclass of {base.partition(':')[2]}", key=key)
    return loaded


@cache
def _installed(*path: str) -> Any:  # noqa: ARG001 - the cache's key
    """Return the `EntryPoints` of all packages (Python 3.11 has another class for all), reading a file of each."""
    from importlib.metadata import entry_points  # later: a slow import

    return entry_points()
