"""Functions that a framework's configuration names."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..errors import ConfigError


def load_function(path: str) -> Any:
    """Return what `package.module.name` names.

    Raises:
        ConfigError: it cannot be imported.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, ValueError, AttributeError) as error:
        raise ConfigError(f"there is no {path}: {error}", key=path) from error
