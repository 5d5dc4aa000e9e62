"""The kinds of sandbox, by name.

An installed package adds a kind with one file, and one line of its entry points, as this one does:

    prorl_zmq.sandboxes =
        my-kind = my_package.my_sandbox:MyContainer

The class is a `Container` whose `kind` is that name.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from ...errors import ConfigError
from ...system.plugins import load_plugin, offered

if TYPE_CHECKING:
    from .container import Container

ENTRY_POINT_GROUP = "prorl_zmq.sandboxes"


def known_kinds() -> list[str]:
    return list(offered(ENTRY_POINT_GROUP))


@cache
def container_class(kind: str) -> type[Container]:
    """Import the class of a kind.

    Raises:
        ConfigError: no installed package registers the kind, or its entry point names no such `Container`.
    """
    from .container import Container

    base = f"{Container.__module__}:{Container.__qualname__}"
    loaded: type[Container] = load_plugin(ENTRY_POINT_GROUP, kind, "sandbox", key="sandbox.kind", base=base)
    if loaded.kind != kind:
        subject = f"the sandbox kind {kind} ({loaded.__module__}:{loaded.__qualname__})"
        raise ConfigError(f"{subject} has kind = {loaded.kind!r}; write {kind!r}", key="sandbox.kind")
    return loaded


def problem_with(kind: str) -> str | None:
    return container_class(kind).problem()
