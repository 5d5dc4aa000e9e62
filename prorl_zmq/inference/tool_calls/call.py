"""What a policy's text holds of tool calls, whatever form it writes them in; and what every form does.

A call that cannot be read is not an error of the service: the model is told what was wrong and how to write it.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_CALLS = 64
"""Tool calls of one turn that are read."""

_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')

T = TypeVar("T")
_JSON = json.JSONDecoder()


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call that the policy asks for."""

    name: str
    arguments: dict[str, Any] = {}
    call_id: str = ""
    """What its answer is to name, if the policy wrote one."""


class MalformedCall(msgspec.Struct, frozen=True):
    """Something that was meant as a tool call and is none."""

    feedback: str
    """What to tell the model."""
    name: str = ""
    """The tool that was meant, if that can be read."""
    arguments: str = ""
    """The text that should have been its arguments as JSON."""


class ToolCallFormat(ABC):
    """One form of tool calls."""

    name: ClassVar[str]
    """As `ChatSettings.tool_calls` has it."""

    @abstractmethod
    def describe(self, tools: Sequence[dict[str, Any]]) -> str:
        """Return a text that describes the tools and how to call them, for a template that does not."""

    @abstractmethod
    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> list[ToolCall | MalformedCall]:
        """Return the tool calls of one turn, in order; an empty list if it calls no tool. Never raises.

        Args:
            text: the turn, without its reasoning.
            tools: JSON schemas of what the policy may call. They type arguments that a form writes as plain text;
                an argument without a schema stays text.
        """

    @abstractmethod
    def before_calls(self, text: str) -> str:
        """Return what a turn says before its first call; all of it, if it calls no tool."""

    @abstractmethod
    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call, for a turn that another program reports."""

    def split(self, text: str) -> tuple[str | None, str] | None:  # noqa: ARG002 - most forms are of calls only
        """Return a whole turn's reasoning and the rest, where turns are messages that this form frames.

        None: the template's marks of reasoning tell them apart.
        """
        return None


def malformed(problem: str, content: str) -> MalformedCall:
    """Return a call that cannot be read, with what can be seen of it: its name, and the text of its arguments."""
    name, arguments = _NAME.search(content), _ARGUMENTS.search(content)
    if name is None or arguments is None:
        return MalformedCall(problem)
    written = content[arguments.end() :].strip()
    return MalformedCall(problem, name[1], written.removesuffix("}") if _is_closed(written) else written)


def _is_closed(arguments: str) -> bool:
    """Return whether the brace that ends a text closes the call, not its arguments."""
    return arguments.endswith("}") and arguments.count("}") > arguments.count("{")


def read_json(content: str, kind: type[T], example: str) -> T | MalformedCall:
    """Read JSON of a known kind that a policy wrote, or give what to tell it."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        return malformed(f"The tool call could not be read: {error}. Write it as {example}", content)


def read_json_at(text: str, start: int, kind: type[T], example: str) -> tuple[T | MalformedCall, int]:
    """Read JSON of a known kind that begins at `start`, whatever follows it; also give where it ended."""
    try:
        value, end = _JSON.raw_decode(text, start)
        # Half of a surrogate pair, which Python's decoder lets pass, is no text that anything else takes.
        json.dumps(value, ensure_ascii=False).encode()
        return msgspec.convert(value, kind), end
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        problem = f"The tool call could not be read: {error}. Write it as {example}"
        return malformed(problem, text[start:]), len(text)


def too_many_calls() -> MalformedCall:
    """Return what follows the last call that was read."""
    return MalformedCall(f"More than {MAX_CALLS} tool calls in one turn; the rest were not read.")


def call_json(arguments_key: str, name: str, arguments: dict[str, Any]) -> str:
    """Return a call as most forms have it."""
    return json.dumps({"name": name, arguments_key: arguments}, ensure_ascii=False)


def describe_tools(tools: Sequence[dict[str, Any]], example: str) -> str:
    """Return the tools' schemas, one on a line, and how to call them."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return f"You may call these tools, described as JSON schemas:\n{schemas}\nWrite each call as\n{example}"
