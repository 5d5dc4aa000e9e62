"""Forms of tool calls that are JSON behind a mark: one object, several, or a list of them.

    <tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>

The JSON is decoded where it begins, so that a mark within a string belongs to the string. The keys of all makers are
read in each form, and others are ignored; what is written is the form's own.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from .call import (
    MAX_CALLS,
    MalformedCall,
    MarkedFormat,
    ToolCall,
    ToolCallFormat,
    json_text,
    read_arguments,
    read_json_at,
)
from .messages import TurnMessage, said_before_calls, without_thoughts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .messages import Kind
    from .turn import Turn

_ARGUMENT_KEYS = ("arguments", "parameters", "args")
_BETWEEN = re.compile(r"[\s,;]*")
_NAME = re.compile(r'"(?:name|tool_name)"\s*:\s*"((?:[^"\\]|\\.)*)"')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters|args)"\s*:\s*')


class MarkedJsonFormat(MarkedFormat):
    """JSON between marks.

    The class's parameters:
        name: of the form.
        opens: what may stand before the JSON; the first is what is written.
        closes: what stands behind it; empty if nothing does.
        keys: of name and arguments, as written; None: the name is itself the key of the arguments.
        listed: the calls are written as a list.
    """

    opens: ClassVar[tuple[str, ...]]
    closes: ClassVar[str]
    keys: ClassVar[tuple[str, str] | None]
    listed: ClassVar[bool]

    def __init_subclass__(
        cls,
        *,
        name: str,
        opens: Sequence[str],
        closes: str = "",
        keys: tuple[str, str] | None = ("name", "arguments"),
        listed: bool = False,
    ) -> None:
        cls.name, cls.opens, cls.closes, cls.keys, cls.listed = name, tuple(opens), closes, keys, listed
        if "begins" not in cls.__dict__:
            cls.begins = re.compile("|".join(map(re.escape, opens)))
        cls.example = cls._framed(f'{{"{keys[0]}": "NAME", "{keys[1]}": {{…}}}}' if keys else '{"NAME": {…}}')

    only_calls: ClassVar[bool] = True
    """Nothing but a call ends in `closes`."""

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> list[ToolCall | MalformedCall]:
        """Return the tool calls of one turn, in order. Never raises."""
        if self.only_calls and self.closes and self.closes in text and self.begins.search(text) is None:
            return [self.malformed(f"there is {self.closes} without {self.opens[0]}")]
        return super().parse(text, tools)

    def read(self, turn: Turn, found: re.Match[str]) -> tuple[Sequence[ToolCall | MalformedCall], int]:
        """Read the JSON behind a mark."""
        text = turn.text
        calls, position = read_calls(self, text, found.end(), self.closes)
        following = self.begins.search(text, position) if self.closes else None  # looked for once, however many
        until = len(text) if following is None else following.start()
        end = text.find(self.closes, position, until) if self.closes else position
        if end < 0:
            if calls and not isinstance(calls[-1], MalformedCall) and not text[position:].strip():
                problem = f"it was not closed with {self.closes}"
                calls[-1] = malformed_json(self, problem, text[found.end() : position])
            return calls, position
        return calls, end + len(self.closes)

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call."""
        return self._framed(
            json_text({self.keys[0]: name, self.keys[1]: arguments} if self.keys else {name: arguments})
        )

    @classmethod
    def _framed(cls, content: str) -> str:
        return f"{cls.opens[0]}{'[' * cls.listed}{content}{']' * cls.listed}{cls.closes}"


def read_calls(
    form: ToolCallFormat, text: str, start: int, closes: str = ""
) -> tuple[list[ToolCall | MalformedCall], int]:
    """Read a list of calls, or several objects one behind the other; also return where what could be read ends.

    What cannot be read reaches to the next mark that closes calls.
    """
    calls: list[ToolCall | MalformedCall] = []
    position = start
    while len(calls) <= MAX_CALLS:
        begin = _end(_BETWEEN.match(text, position))
        if calls and not text.startswith("{", begin):
            break
        try:
            value, position = read_json_at(text, begin)
        except ValueError as error:
            end = text.find(closes, begin) if closes else -1
            content = text[begin:end] if end >= 0 else text[begin:]
            return [*calls, malformed_json(form, str(error), content)], position
        if value == []:
            break
        calls += [read_call(form, one) for one in (value if isinstance(value, list) else [value])[: MAX_CALLS + 1]]
    return calls, position


def read_call(form: ToolCallFormat, value: Any) -> ToolCall | MalformedCall:
    """Take a call from a JSON object; unknown keys are ignored."""
    if not isinstance(value, dict):
        return form.malformed(f"Expected `object`, got {json_text(value)[:40]}")
    name = next((value[key] for key in ("name", "tool_name") if isinstance(value.get(key), str)), "")
    arguments = next((value[key] for key in _ARGUMENT_KEYS if key in value), None)
    if not name and len(value) == 1 and getattr(form, "keys", ()) is None:
        ((name, arguments),) = value.items()
    if not name:
        return malformed_json(form, "Object missing required field `name`", json_text(value))
    try:
        call_id = next((value[key] for key in ("id", "tool_call_id") if isinstance(value.get(key), str)), "")
        return ToolCall(name, read_arguments(arguments), call_id)
    except ValueError as error:
        return form.malformed(str(error), name, arguments if isinstance(arguments, str) else json_text(arguments))


def malformed_json(form: ToolCallFormat, problem: str, content: str) -> MalformedCall:
    """Return a call that cannot be read, with what can be seen of it: its name, and the text of its arguments."""
    name, arguments = _NAME.search(content), _ARGUMENTS.search(content)
    if name is None or arguments is None:
        return form.malformed(problem)
    written = content[arguments.end() :].strip()
    closed = written.endswith("}") and written.count("}") > written.count("{")
    return form.malformed(problem, name[1], written.removesuffix("}") if closed else written)


def _end(found: re.Match[str] | None) -> int:
    assert found is not None  # its expression matches the empty text
    return found.end()


class HermesFormat(MarkedJsonFormat, name="hermes", opens=["<tool_call>"], closes="</tool_call>"):
    """Of Qwen 2.5 and 3, Granite 4, EXAONE 4, MiMo and many others."""


class NemotronFormat(MarkedJsonFormat, name="nemotron_v2", opens=["<TOOLCALL>"], closes="</TOOLCALL>", listed=True):
    """Of Nemotron Nano v2."""


class AprielFormat(MarkedJsonFormat, name="apriel", opens=["<tool_calls>"], closes="</tool_calls>", listed=True):
    """Of Apriel and Hunyuan A13B."""


class CommandFormat(
    MarkedJsonFormat,
    name="command_r",
    opens=["<|START_ACTION|>"],
    closes="<|END_ACTION|>",
    keys=("tool_name", "parameters"),
    listed=True,
):
    """Of Command R7B and Command A."""


class ApertusFormat(
    MarkedJsonFormat, name="apertus", opens=["<|tools_prefix|>"], closes="<|tools_suffix|>", keys=None, listed=True
):
    """Of Apertus."""


class GigaChatFormat(MarkedJsonFormat, name="gigachat", opens=["<|function_call|>"]):
    """Of GigaChat 3."""


class PhiFormat(MarkedJsonFormat, name="phi4_mini", opens=["functools", "<|tool_call|>"], closes="", listed=True):
    """Of Phi-4 mini."""


class GraniteFormat(MarkedJsonFormat, name="granite3", opens=["<|tool_call|>"], listed=True):
    """Of Granite 3."""


class FencedFormat(MarkedJsonFormat, name="fenced", opens=["\n```tool_call\n"], closes="\n```"):
    """Of no model: a block between fences, which stand at the beginnings of lines."""

    begins = re.compile(r"(?:\A|\n)```tool_call\b")

    only_calls = False


class ForeignFormat(ToolCallFormat):
    """A template's own form, which a server reads (see `ChatSettings.parser_url`); here its turns are only text."""

    name: ClassVar = "foreign"
    example: ClassVar = FencedFormat.example

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> list[ToolCall | MalformedCall]:  # noqa: ARG002 - it has no calls that are read here
        """Return no calls."""
        return []

    def before_calls(self, text: str) -> str:
        """Return all of it."""
        return text

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return a call in the plain form; the template writes those that it is given."""
        return FencedFormat().write(name, arguments)


class InklingFormat(
    MarkedJsonFormat,
    name="inkling",
    opens=["<|content_invoke_tool_json|>"],
    closes="<|end_message|>",
    keys=("name", "args"),
):
    """Of Inkling, whose turns are messages: a call is one that holds JSON."""

    only_calls = False

    def before_calls(self, text: str) -> str:
        """Return what a turn says before its first call, without its frames."""
        return said_before_calls(text, _messages(text))

    def split(self, text: str) -> tuple[str | None, str] | None:
        """Return the messages of reasoning, and the others."""
        return without_thoughts(text, _messages(text))

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call."""
        return f"<|message_model|>{name}{super().write(name, arguments)}"


_MESSAGE = re.compile(
    r"(?:<\|message_model\|>[^<]{0,256})?<\|content_(thinking|text|invoke_tool_json)\|>(.*?)(?:<\|end_message\|>|\Z)",
    re.DOTALL,
)
_KINDS: dict[str, Kind] = {"thinking": "thought", "text": "said", "invoke_tool_json": "call"}


def _messages(text: str) -> Iterator[TurnMessage]:
    for found in _MESSAGE.finditer(text):
        yield TurnMessage(_KINDS[found[1]], found.start(), found.end(), found[2])
