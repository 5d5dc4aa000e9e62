"""A model's chat template: renders conversations, and lists its arguments and literal texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from jinja2.parser import Parser

Message = dict[str, Any]

FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""The exceptions that a template can raise."""

_GIVEN = {
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("raise_exception", "strftime_now"),
}
"""The names that every template gets; the texts of the tokenizer's special tokens come in addition."""


class TemplateRefused(Exception):
    """The template cannot render a conversation; the caller tries another form."""


class ChatTemplate:
    def __init__(self, apply: Callable[..., Any], end_of_text: str, arguments: Mapping[str, Any] | None = None) -> None:
        self._apply = apply
        self._end_of_text = end_of_text
        self._arguments = dict(arguments or {})

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = (), *, opened: bool = False) -> str:
        """Render a conversation.

        Raises:
            TemplateRefused: the template raised.
        """
        try:
            return str(
                self._apply(
                    messages, tools=tools or None, tokenize=False, add_generation_prompt=opened, **self._arguments
                )
            )
        except FAULTS as error:
            raise TemplateRefused(str(error)) from error

    def render_or_not(self, messages: Sequence[Message], tools: Sequence[Any] = (), *, opened: bool = False) -> str:
        """Render a conversation; empty if the template rejects it."""
        try:
            return self.render(messages, tools, opened=opened)
        except TemplateRefused:
            return ""

    def length_in(self, text: str, messages: Sequence[Message], tools: Sequence[Any] = ()) -> int:
        """Return the number of characters of these messages at the beginning of a text; 0 if it does not begin so."""
        return self.length_of(text, self.render_or_not(messages, tools))

    def length_of(self, text: str, beginning: str) -> int:
        """Return the length of a rendered beginning in a text; 0 if the text does not begin so."""
        if not text.startswith(beginning) and self._end_of_text:
            beginning = beginning.removesuffix(self._end_of_text)
        return len(beginning) if text.startswith(beginning) else 0


class _Generation(Extension):
    """The tag around generated text, which some templates have; its content is kept."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_variables(source: str, token_names: Iterable[str]) -> frozenset[str]:
    """Return the names of the arguments that a template reads.

    Args:
        source: of the template.
        token_names: variables that hold special tokens, such as `bos_token`.

    Raises:
        TemplateError: it is not a template.
    """
    tree = _tree(source)
    names = list(tree.find_all(nodes.Name))
    # Names that a template sets in a loop or a branch are included. It tests an argument before it sets it.
    own = {name.name for name in names if name.ctx != "load"} | {macro.name for macro in tree.find_all(nodes.Macro)}
    asked = {
        one.node.name
        for one in tree.find_all((nodes.Test, nodes.Filter))
        if one.name in {"defined", "undefined", "default"} and isinstance(one.node, nodes.Name)
    }
    return frozenset(find_undeclared_variables(tree) - (own - asked) - _GIVEN - set(token_names))


def written_texts(source: str) -> frozenset[str]:
    """Return the literal texts of a template, which may stand next to its inputs.

    Raises:
        TemplateError: it is not a template.
    """
    tree = _tree(source)
    texts = {one.data for one in tree.find_all(nodes.TemplateData)}
    texts |= {one.value for one in tree.find_all(nodes.Const) if isinstance(one.value, str)}
    return frozenset(texts - {""})


def _tree(source: str) -> nodes.Template:
    environment = Environment(autoescape=False, extensions=[_Generation, loopcontrols])  # noqa: S701 - nothing is rendered
    return environment.parse(source)


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
