"""What installed packages offer by entry points: classes by group and name, loaded when they are first asked for."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def offered(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in sorted(entry_points(group=group))}


def load_plugin(group: str, name: str, what: str, *, key: str = "kind") -> Any:
    """Load one entry point; `what` it is a kind of, such as `engine`, and `key`, the option, are for errors.

    Raises:
        ConfigError: no installed package offers the name, or what it names cannot be imported.
    """
    points = offered(group)
    if name not in points:
        raise ConfigError(f"{name!r} is not a kind of {what}; installed are: {', '.join(points)}", key=key)
    try:
        return points[name].load()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"the {what} kind {name} ({points[name].value}) cannot be imported: {problem}", key=key
        ) from error
