"""The kinds of sandbox, by name.

An installed package adds a kind with one file, and one line of its entry points, as this one does:

    prorl_zmq.sandboxes =
        my-kind = my_package.my_sandbox:MyContainer

The class is a `Container` whose `kind` is that name.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from ...errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from .container import Container
    from .specification import SandboxSpec

ENTRY_POINT_GROUP = "prorl_zmq.sandboxes"


def known_kinds() -> list[str]:
    return sorted(entry_points(group=ENTRY_POINT_GROUP).names)


@cache
def container_class(kind: str) -> type[Container]:
    """Import the class of a kind.

    Raises:
        ConfigError: no installed package registers the kind, or its entry point names no such `Container`.
    """
    from .container import Container

    registered = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if kind not in registered:
        known = ", ".join(sorted(registered))
        raise ConfigError(f"{kind!r} is not a kind of sandbox; installed are: {known}", key="sandbox.kind")
    target = registered[kind].value
    try:
        loaded = registered[kind].load()
    except Exception as error:
        message = f"the sandbox kind {kind} ({target}) cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(message, key="sandbox.kind") from error
    if not (isinstance(loaded, type) and issubclass(loaded, Container)) or loaded.kind != kind:
        raise ConfigError(f"{target} is not a subclass of Container with kind = {kind!r}", key="sandbox.kind")
    return loaded


def make_container(kind: str, path: Path, spec: SandboxSpec) -> Container:
    return container_class(kind)(path, spec)


def problem_with(kind: str) -> str | None:
    return container_class(kind).problem()
