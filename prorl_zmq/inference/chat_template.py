"""A model's chat template: renders conversations. What it is like is found by rendering markers (`chat_traits`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Message = dict[str, Any]

FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template can raise."""


class TemplateRefused(Exception):
    """The template cannot render a conversation; who renders knows what to do instead."""


class ChatTemplate:
    """Renders conversations."""

    def __init__(self, apply: Callable[..., Any], end_of_text: str) -> None:
        self._apply = apply
        self._end_of_text = end_of_text

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = (), *, opened: bool = False) -> str:
        """Render a conversation.

        Raises:
            TemplateRefused: the template raised.
        """
        try:
            return str(self._apply(messages, tools=tools or None, tokenize=False, add_generation_prompt=opened))
        except FAULTS as error:
            raise TemplateRefused(str(error)) from error

    def render_or_not(self, messages: Sequence[Message], tools: Sequence[Any] = (), *, opened: bool = False) -> str:
        """Render a conversation; empty if the template refuses it."""
        try:
            return self.render(messages, tools, opened=opened)
        except TemplateRefused:
            return ""

    def length_in(self, text: str, messages: Sequence[Message], tools: Sequence[Any] = ()) -> int:
        """Return how many characters these messages take at the beginning of a text; 0 if it does not begin so."""
        return self.length_of(text, self.render_or_not(messages, tools))

    def length_of(self, text: str, beginning: str) -> int:
        """Return how long a rendered beginning is in a text; 0 if the text does not begin so."""
        if not text.startswith(beginning) and self._end_of_text:
            beginning = beginning.removesuffix(self._end_of_text)
        return len(beginning) if text.startswith(beginning) else 0


def marker(name: str) -> str:
    """Return a word that no template writes, and that survives JSON and trimming."""
    return f"qz{name}zq"


def marker_tool() -> dict[str, Any]:
    """Return a tool's schema made of markers."""
    properties = {
        marker("key"): {"type": "string", "description": marker("about")},
        marker("number"): {"type": "integer", "description": marker("about")},
    }
    parameters = {"type": "object", "properties": properties, "required": [marker("key")]}
    function = {"name": marker("tool"), "description": marker("description"), "parameters": parameters}
    return {"type": "function", "function": function}
