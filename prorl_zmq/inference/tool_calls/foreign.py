"""A template's own form of tool calls, which something else than this project reads (see `ChatSettings.parser_url`).

The template tells of the tools and writes the calls, so only what a turn says is left to do here: all of it is text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from .fenced import FencedFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .call import MalformedCall, ToolCall


class ForeignFormat(FencedFormat):
    """Implements `call.ToolCallFormat`; what writes and describes calls is never asked of it."""

    name: ClassVar = "foreign"

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> list[ToolCall | MalformedCall]:  # noqa: ARG002 - it has no calls that we read
        """Return no calls."""
        return []

    def before_calls(self, text: str) -> str:
        """Return all of it."""
        return text
