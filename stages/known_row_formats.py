"""The row formats of this package and of installed handlers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..tasks.row_format import RowFormat, native, unique
from ..tasks.row_formats import ROW_FORMATS
from .handler import AgentHandler, load_handlers

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


def known_row_formats(
    handlers: Mapping[str, AgentHandler[Any]] | None = None, own: Collection[str] = ()
) -> tuple[RowFormat, ...]:
    """Return all row formats, the most specific first; the instances of each task are a format too.

    Args:
        handlers: the installed handlers, if they are loaded already.
        own: tasks among them whose row formats come first.
    """
    handlers = load_handlers() if handlers is None else handlers
    first = {task: handler for task, handler in handlers.items() if task in own}
    others = {task: handler for task, handler in handlers.items() if task not in own}
    return unique((*_formats_of(first), *ROW_FORMATS, *_formats_of(others)))


def _formats_of(handlers: Mapping[str, AgentHandler[Any]]) -> tuple[RowFormat, ...]:
    named = tuple(row_format for handler in handlers.values() for row_format in handler.row_formats)
    return (*named, *(native(task, handler.instance_type) for task, handler in handlers.items()))
