"""A template's own form of tool calls, which something other than this project reads (see `ChatSettings.parser_url`).

The template describes the tools and writes the calls, so a turn is only text here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from .call import ToolCallFormat
from .fenced import FencedFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .call import MalformedCall, ToolCall


class ForeignFormat(ToolCallFormat):
    """A form that is not read."""

    name: ClassVar = "foreign"
    example: ClassVar = FencedFormat.example

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> list[ToolCall | MalformedCall]:  # noqa: ARG002 - it has no calls that we read
        """Return no calls."""
        return []

    def before_calls(self, text: str) -> str:
        """Return all of it."""
        return text

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return a call in the plain form; the template writes those that it is given."""
        return FencedFormat().write(name, arguments)
