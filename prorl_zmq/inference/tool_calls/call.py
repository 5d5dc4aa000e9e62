"""Tool calls in the text of a policy, and the base classes of the forms in which models write them.

A form parses and writes calls. A call that cannot be parsed is a `MalformedCall`, whose feedback tells the model what
was wrong and how to write it; no text of a policy raises here. `formats` lists all forms.

The parsers of vLLM and SGLang cannot be imported without these engines, and those of transformers reject a whole turn
for one malformed call and strip values, so the forms are parsed here.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import msgspec

from .argument_types import ArgumentTypes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

MAX_CALLS = 64
"""Most tool calls of one turn that are parsed."""
NAME = r"[^\s<>{}\[\]|｜\"']{1,256}"
"""A tool's name, as a regular expression."""


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call that the policy asks for."""

    name: str
    arguments: dict[str, Any] = {}
    call_id: str = ""
    """The id that its answer names, if the policy wrote one."""


class MalformedCall(msgspec.Struct, frozen=True):
    """Text that was meant as a tool call but is invalid."""

    feedback: str
    """The answer to the model."""
    name: str = ""
    """The intended tool, if readable."""
    arguments: str = ""
    """The text of its arguments, which should have been JSON."""


AnyCall = ToolCall | MalformedCall


class TurnMessage(NamedTuple):
    """One message of a turn, in forms that split a turn into several: reasoning, text, and calls, each in a frame."""

    kind: Literal["thought", "said", "call"]
    start: int
    end: int
    """Its end, with its frame."""
    body: str
    name: str = ""
    """The called tool."""


class Frames(NamedTuple):
    """How a form frames the messages of a turn."""

    pattern: re.Pattern[str]
    """Matches a message; group 1 is its kind, group 2 its body."""
    thought: str
    """The kind of reasoning."""
    said: str
    """The kind of the turn's text; all others are calls."""


class ToolCallFormat(ABC):
    """One form of tool calls.

    Args:
        name: the value of `ChatSettings.tool_calls`.
        example: a call, for a model that has to write one; empty: the call of a tool `NAME`.
        frames: of the messages of a turn; None: a turn is one message.
    """

    has_messages = False
    """Whether turns are messages that this form frames."""

    def __init__(self, name: str, example: str = "", frames: Frames | None = None) -> None:
        self.name = name
        self._frames = frames
        self.has_messages |= frames is not None
        self.example = example or self.write("NAME", {"PARAMETER": "VALUE"})

    def describe(self, tools: Sequence[dict[str, Any]]) -> str:
        """Return a text that describes the tools and how to call them, for a template that does not."""
        schemas = "\n".join(map(json_text, tools))
        return f"You may call these tools, described as JSON schemas:\n{schemas}\nWrite each call as\n{self.example}"

    @abstractmethod
    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> list[AnyCall]:
        """Return the tool calls of one turn, in order; an empty list if it calls no tool. Never raises.

        Args:
            text: the turn, without its reasoning.
            tools: JSON schemas of the policy's tools. They type arguments that a form writes as plain text; an argument
                without a schema stays text.
        """

    @abstractmethod
    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call, for a turn that another program reports."""

    def before_calls(self, text: str) -> str:
        """Return the text of a turn before its first call, without frames; all of it, if it calls no tool."""
        said, found = [], False
        for message in self.messages(text):
            found = True
            if message.kind == "call":
                break
            if message.kind == "said":
                said.append(message.body)
        return "".join(said) if found else text

    def split(self, text: str) -> tuple[str | None, str] | None:
        """Return a whole turn's reasoning (None: none) and the rest, if turns are messages of this form.

        None: the template's marks of reasoning separate them.
        """
        if not self.has_messages:
            return None
        thoughts, rest, position = [], [], 0
        for message in self.messages(text):
            if message.kind == "thought":
                thoughts.append(message.body)
                rest.append(text[position : message.start])
                position = message.end
        return "\n".join(thoughts) if thoughts else None, "".join(rest) + text[position:]

    def messages(self, text: str) -> Iterable[TurnMessage]:
        """Return the messages of a turn; none if the form has no frames."""
        if self._frames is None:
            return
        pattern, thought, said = self._frames
        for found in pattern.finditer(text):
            kind: Literal["thought", "said", "call"] = "call"
            if found[1] in (thought, said):
                kind = "thought" if found[1] == thought else "said"
            yield TurnMessage(kind, found.start(), found.end(), found[2])

    def malformed(self, problem: str, name: str = "", arguments: str = "") -> MalformedCall:
        """Return a call that cannot be parsed."""
        return MalformedCall(f"The tool call could not be read: {problem}. Write it as {self.example}", name, arguments)


class MarkedFormat(ToolCallFormat):
    """A form whose calls begin with a mark. Parsing takes time linear in the text.

    Args:
        begins: the beginning of a call, or of a section of calls, as a regular expression.
        others: see `ToolCallFormat`.
    """

    def __init__(self, name: str, begins: str, *others: Any, **named: Any) -> None:
        self.begins = re.compile(begins, re.MULTILINE)
        super().__init__(name, *others, **named)

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> list[AnyCall]:
        turn = Turn(text, tools)
        calls: list[AnyCall] = []
        position = 0
        while len(calls) <= MAX_CALLS and (found := self.begins.search(text, position)) is not None:
            read, position = self.read(turn, found)
            calls += read
        return at_most(calls)

    def before_calls(self, text: str) -> str:
        found = self.begins.search(text)
        return super().before_calls(text if found is None else text[: found.start()])

    @abstractmethod
    def read(self, turn: Turn, found: re.Match[str]) -> tuple[Sequence[AnyCall], int]:
        """Parse the call at a mark; also return its end, which is after the mark."""


class Turn:
    """One turn of the policy during the parse of its calls; finds the ends of unquoted values.

    A value may hold the marks of its own form. A mark that closes a value counts only if another mark of the form, or
    the text's end, follows. A whole call within a value, as in the documentation of a form, is part of the value. Both
    are found by position, in time linear in the text.

    Args:
        text: of the policy.
        tools: the JSON schemas of its tools.
    """

    def __init__(self, text: str, tools: Sequence[dict[str, Any]]) -> None:
        self.text = text
        self.types = ArgumentTypes(tools)
        self._nests = True
        """Whether every call within a value was closed so far. After the first that was not, their marks are plain
        text, so that each part of a text is read at most three times."""

    def end_of_value(
        self, start: int, marks: re.Pattern[str], ends: Callable[[re.Match[str]], bool]
    ) -> re.Match[str] | None:
        """Return the mark that ends the value that begins at `start`; None if no mark does.

        Args:
            start: a position in the text.
            marks: an expression with groups `enters` and `leaves`, for the marks around a call within a value.
            ends: whether a mark ends a value that no call within it surrounds.
        """
        depth = 0
        for mark in marks.finditer(self.text, start) if self._nests else ():
            if mark["enters"] is not None:
                depth += 1
            elif depth:
                depth -= mark["leaves"] is not None
            elif ends(mark):
                return mark
        self._nests = False
        return next(filter(ends, marks.finditer(self.text, start)), None)


def at_most(calls: list[AnyCall]) -> list[AnyCall]:
    """Return the first `MAX_CALLS` of a turn's calls, and a malformed one for the rest."""
    if len(calls) <= MAX_CALLS:
        return calls
    rest = MalformedCall(f"More than {MAX_CALLS} tool calls in one turn; the rest were not read.")
    return [*calls[:MAX_CALLS], rest]


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def value_text(value: Any) -> str:
    """Return an argument in the forms without quotes: a text unchanged, any other value as JSON."""
    return value if isinstance(value, str) else json_text(value)


def read_json_at(text: str, start: int) -> tuple[Any, int]:
    """Decode the JSON that begins at `start`, whatever follows it; also return its end.

    Raises:
        ValueError: it is not JSON, is nested too deep, or has no text in Unicode.
    """
    try:
        value, end = _JSON.raw_decode(text, start)
        json_text(value).encode()  # half of a surrogate pair, which Python's decoder accepts, is not text elsewhere
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return value, end


def read_arguments(value: Any) -> dict[str, Any]:
    """Return a call's arguments, which may be missing, empty or an object in a string.

    Raises:
        ValueError: they are anything else.
    """
    if isinstance(value, str) and value.strip():
        start = len(value) - len(value.lstrip())
        value = read_json_at(value, start)[0] if value[start] == "{" else value
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if not isinstance(value, dict):
        kind = {str: "str", list: "array", bool: "bool"}.get(type(value), "number")
        raise ValueError(f"Expected `object`, got `{kind}` for its arguments")  # noqa: TRY004 - about the policy's text
    return value


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


_JSON = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite, strict=False)
"""Not strict: accepts a line break within a string."""
