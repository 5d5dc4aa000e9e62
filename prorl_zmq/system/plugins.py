"""What installed packages offer by entry points: classes by group and name, loaded when they are first asked for."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def offered(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in sorted(entry_points(group=group))}


def load_plugin(group: str, name: str, what: str) -> Any:
    """Load one entry point; `what` it is, such as `engine kind`, is for errors.

    Raises:
        ConfigError: no installed package offers the name, or what it names cannot be imported.
    """
    points = offered(group)
    if name not in points:
        raise ConfigError(
            f"{name!r} is not an {what} that an installed package offers; there are {', '.join(points)}", key="kind"
        )
    try:
        return points[name].load()
    except Exception as error:
        raise ConfigError(
            f"the {what} {name} ({points[name].value}) cannot be imported: {type(error).__name__}: {error}", key="kind"
        ) from error
