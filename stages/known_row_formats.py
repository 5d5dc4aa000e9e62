"""The row formats that an installation knows: those of this package and those of installed handlers."""

from __future__ import annotations

from ..tasks.row_format import RowFormat, native, unique
from ..tasks.row_formats import ROW_FORMATS
from .handler import load_handlers


def known_row_formats() -> tuple[RowFormat, ...]:
    """Return all row formats, the most special ones first; the instances of each task are one."""
    handlers = load_handlers()
    of_handlers = tuple(row_format for handler in handlers.values() for row_format in handler.row_formats)
    instances = tuple(native(task, handler.instance_type) for task, handler in handlers.items())
    return unique((*ROW_FORMATS, *of_handlers, *instances))
