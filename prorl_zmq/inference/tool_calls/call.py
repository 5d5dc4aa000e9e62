"""Tool calls in the text of a policy, and what every form of them shares.

A call that cannot be read is not an error of the service: the feedback says what was wrong and how to write it.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import msgspec

from .turn import Turn

if TYPE_CHECKING:
    import re
    from collections.abc import Sequence

MAX_CALLS = 64
"""Tool calls of one turn that are read."""
NAME = r"[^\s<>{}\[\]|｜\"']{1,256}"
"""A tool's name, as a regular expression."""


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
    example: ClassVar[str]
    """A call, for a model that has to write one."""

    def describe(self, tools: Sequence[dict[str, Any]]) -> str:
        """Return a text that describes the tools and how to call them, for a template that does not."""
        schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return f"You may call these tools, described as JSON schemas:\n{schemas}\nWrite each call as\n{self.example}"

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

    def malformed(self, problem: str, name: str = "", arguments: str = "") -> MalformedCall:
        """Return a call that cannot be read."""
        return MalformedCall(f"The tool call could not be read: {problem}. Write it as {self.example}", name, arguments)


class MarkedFormat(ToolCallFormat):
    """A form whose calls begin with a mark. Reading them takes time linear in the text."""

    begins: ClassVar[re.Pattern[str]]
    """What begins a call, or a section of calls."""

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> list[ToolCall | MalformedCall]:
        """Return the tool calls of one turn, in order. Never raises."""
        turn = Turn(text, tools)
        calls: list[ToolCall | MalformedCall] = []
        position = 0
        while len(calls) <= MAX_CALLS and (found := self.begins.search(text, position)) is not None:
            read, position = self.read(turn, found)
            calls += read
        return calls if len(calls) <= MAX_CALLS else [*calls[:MAX_CALLS], too_many_calls()]

    def before_calls(self, text: str) -> str:
        """Return what a turn says before its first call."""
        found = self.begins.search(text)
        return text if found is None else text[: found.start()]

    @abstractmethod
    def read(self, turn: Turn, found: re.Match[str]) -> tuple[Sequence[ToolCall | MalformedCall], int]:
        """Read what a mark begins; also return where it ends, which is behind the mark."""


def too_many_calls() -> MalformedCall:
    """Return what follows the last call that was read."""
    return MalformedCall(f"More than {MAX_CALLS} tool calls in one turn; the rest were not read.")


def json_text(value: Any) -> str:
    """Return a value as JSON."""
    return json.dumps(value, ensure_ascii=False)


def value_text(value: Any) -> str:
    """Return an argument as the forms without quotes write it: a text as it is, any other value as JSON."""
    return value if isinstance(value, str) else json_text(value)


def read_json_at(text: str, start: int) -> tuple[Any, int]:
    """Read the JSON that begins at `start`, whatever follows it; also return where it ends.

    Raises:
        ValueError: it is no JSON, is nested too deep, or has no text in Unicode.
    """
    try:
        value, end = _JSON.raw_decode(text, start)
        json_text(value).encode()  # half of a surrogate pair, which Python's decoder accepts, is no text elsewhere
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return value, end


def read_arguments(value: Any) -> dict[str, Any]:
    """Return a call's arguments, which may be missing, empty or an object in a string.

    Raises:
        ValueError: they are something else.
    """
    if isinstance(value, str) and value.strip():
        start = len(value) - len(value.lstrip())
        value = read_json_at(value, start)[0] if value[start] == "{" else value
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if not isinstance(value, dict):
        kind = {str: "str", list: "array", bool: "bool"}.get(type(value), "number")
        raise ValueError(f"Expected `object`, got `{kind}` for its arguments")  # noqa: TRY004 - of what the policy wrote
    return value


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


_JSON = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite, strict=False)
"""Not strict: a line's end within a string is read as one."""
