"""The forms of tool calls that there are, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .fenced import FencedFormat
from .hermes import HermesFormat
from .llama3 import Llama3Format
from .mistral import MistralFormat

if TYPE_CHECKING:
    from .call import ToolCallFormat

FORMS: dict[str, ToolCallFormat] = {
    form.name: form for form in (HermesFormat(), MistralFormat(), Llama3Format(), FencedFormat())
}
"""In the order in which they are tried on what a template writes: a form with a mark of its own before one without."""


def format_named(name: str) -> ToolCallFormat:
    """Return a form by the name that `ChatSettings.tool_calls` has."""
    return FORMS[name]
