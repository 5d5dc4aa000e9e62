"""The forms of data that an installation knows: those of the package, and of the handlers that other packages bring."""

from __future__ import annotations

from ..tasks.row_format import RowFormat, native, unique
from ..tasks.row_formats import FORMS
from .handler import load_handlers


def known_forms() -> tuple[RowFormat, ...]:
    """Give all forms, the most special ones first; each task has its own instances as one.

    Raises:
        ConfigError: an installed handler cannot be made.
    """
    handlers = load_handlers()
    brought = tuple(form for handler in handlers.values() for form in handler.forms)
    instances = tuple(native(task, handler.instance_type) for task, handler in handlers.items())
    return unique((*FORMS, *brought, *instances))
