"""Modules that a test file imports at the first use: each worker imports all test files, and runs a third of them."""

from __future__ import annotations

import importlib
from typing import Any


class Later:
    """A module that is imported where an attribute of it is read.

    Write the import itself under `if TYPE_CHECKING:`, and this under `else:`.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pytest looks for those in each name of a test file
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)
