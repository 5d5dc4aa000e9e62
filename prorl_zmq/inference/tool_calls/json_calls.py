"""Forms of tool calls whose arguments are JSON.

    <tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>                         `MarkedJsonFormat`
    <|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>{"command": "ls"}<|tool_call_end|>  `NamedJsonFormat`
    {"name": "bash", "parameters": {"command": "ls"}}                                                  `BareJsonFormat`

The JSON is decoded where it begins, so that a mark within a string belongs to the string. The closing mark may be
missing after a name. Every form accepts the keys of all makers and ignores others; it writes its own.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from .call import (
    MAX_CALLS,
    AnyCall,
    Frames,
    MalformedCall,
    MarkedFormat,
    ToolCall,
    ToolCallFormat,
    at_most,
    json_text,
    read_arguments,
    read_json_at,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .call import Turn

PYTHON_TAG = "<|python_tag|>"

_ARGUMENT_KEYS = ("arguments", "parameters", "args")
_BETWEEN = re.compile(r"[\s,;]*")
_NAME = re.compile(r'"(?:name|tool_name)"\s*:\s*"((?:[^"\\]|\\.)*)"')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters|args)"\s*:\s*')


class MarkedJsonFormat(MarkedFormat):
    """JSON between marks: one object, several, or a list of them.

    Args:
        name: of the form.
        opens: the text before the JSON, as written.
        closes: the text after it; empty if there is none.
        begins: the accepted forms of `opens`, as a regular expression; empty: only that.
        keys: of name and arguments, as written; None: the name is itself the key of the arguments.
        listed: the calls are written as a list.
        only_calls: only calls end in `closes`.
        frames: see `ToolCallFormat`.
    """

    def __init__(
        self,
        name: str,
        opens: str,
        closes: str = "",
        *,
        begins: str = "",
        keys: tuple[str, str] | None = ("name", "arguments"),
        listed: bool = False,
        only_calls: bool = True,
        frames: Frames | None = None,
    ) -> None:
        self._opens, self._closes = opens, closes
        self._keys, self._listed, self._only_calls = keys, listed, only_calls
        content = f'{{"{keys[0]}": "NAME", "{keys[1]}": {{…}}}}' if keys else '{"NAME": {…}}'
        super().__init__(name, begins or re.escape(opens), self._framed(content), frames)

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> list[AnyCall]:
        if self._only_calls and self._closes and self._closes in text and self.begins.search(text) is None:
            return [self.malformed(f"there is {self._closes} without {self._opens}")]
        return super().parse(text, tools)

    def read(self, turn: Turn, found: re.Match[str]) -> tuple[Sequence[AnyCall], int]:
        text, closes = turn.text, self._closes
        calls, position = read_calls(self, text, found.end(), closes, name_is_key=self._keys is None)
        following = self.begins.search(text, position) if closes else None  # searched once, however many
        until = len(text) if following is None else following.start()
        end = text.find(closes, position, until) if closes else position
        if end < 0:
            if calls and not isinstance(calls[-1], MalformedCall) and not text[position:].strip():
                problem = f"it was not closed with {closes}"
                calls[-1] = malformed_json(self, problem, text[found.end() : position])
            return calls, position
        return calls, end + len(closes)

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        call = {self._keys[0]: name, self._keys[1]: arguments} if self._keys else {name: arguments}
        return self._framed(json_text(call))

    def _framed(self, content: str) -> str:
        return f"{self._opens}{'[' * self._listed}{content}{']' * self._listed}{self._closes}"


class InklingFormat(MarkedJsonFormat):
    """The form of Inkling: a call is a message of the turn, headed by the tool's name."""

    def before_calls(self, text: str) -> str:
        return ToolCallFormat.before_calls(self, text)

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        return f"<|message_model|>{name}{super().write(name, arguments)}"


class NamedJsonFormat(MarkedFormat):
    """A name between marks, and the arguments after it.

    Args:
        name: of the form.
        begins: the beginning of a call, as written.
        header: the text from there to the arguments, as a regular expression with a group `name`, and `id` if it has.
        written: a call, with `NAME` and `ARGUMENTS` in their places.
        section: the text before the calls of a turn; a turn with it and without a call is malformed.
        listed: a mark may also begin a list of objects.
        frames: see `ToolCallFormat`.
    """

    def __init__(
        self,
        name: str,
        begins: str,
        header: str,
        written: str,
        *,
        section: str = "",
        listed: bool = False,
        frames: Frames | None = None,
    ) -> None:
        self._header, self._written = re.compile(header), written
        self._section, self._listed = section, listed
        super().__init__(name, re.escape(begins), written.replace("ARGUMENTS", "{…}"), frames)

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> list[AnyCall]:
        calls = super().parse(text, tools)
        if not calls and self._section and self._section in text:
            return [self.malformed(f"no call follows {self._section}")]
        return calls

    def before_calls(self, text: str) -> str:
        return super().before_calls(text.partition(self._section)[0] if self._section else text)

    def read(self, turn: Turn, found: re.Match[str]) -> tuple[Sequence[AnyCall], int]:
        text = turn.text
        if self._listed and text[found.end() : found.end() + 64].lstrip().startswith("["):
            return read_calls(self, text, found.end())
        header = self._header.match(text, found.end())
        if header is None:
            return [self.malformed(f"no name and arguments follow {found[0]}")], found.end()
        try:
            arguments, end = read_json_at(text, header.end())
            return [ToolCall(header["name"], read_arguments(arguments), header.groupdict().get("id") or "")], end
        except ValueError as error:
            written = text[header.end() :].strip()
            return [self.malformed(str(error), header["name"], written)], len(text)

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        return self._written.replace("NAME", name, 1).replace("ARGUMENTS", json_text(arguments), 1)


class BareJsonFormat(ToolCallFormat):
    """The form of Llama 3: the whole turn is a call, or several separated by `;`.

    `<|python_tag|>` may precede them. A turn with another beginning is not a call, nor is JSON without a name, since it
    may be the requested answer.
    """

    def __init__(self, name: str = "llama3", example: str = '{"name": "NAME", "parameters": {…}}') -> None:
        super().__init__(name, example)

    def describe(self, tools: Sequence[dict[str, Any]]) -> str:
        return f"{super().describe(tools)}\nwith nothing before it; separate several with a semicolon."

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> list[AnyCall]:  # noqa: ARG002 - JSON has types
        before, tag, after = ("", "", text) if text.lstrip().startswith("{") else text.partition(PYTHON_TAG)
        content = (after if tag else before or after).strip()
        if not content.startswith("{"):
            return [self.malformed(f"what follows {PYTHON_TAG} is none")] if tag else []
        if not tag and '"name"' not in content:
            return []
        return at_most(read_calls(self, content, 0)[0])

    def before_calls(self, text: str) -> str:
        before, tag, _ = text.partition(PYTHON_TAG)
        if tag and not text.lstrip().startswith("{"):
            return before
        return "" if self.parse(text) else text

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        return f"{json_text({'name': name, 'parameters': arguments})};"


class ForeignFormat(ToolCallFormat):
    """A template's own form, which a server parses (see `ChatSettings.parser_url`); here its turns are only text.

    Args:
        fenced: the form in which calls are written; the template writes those that it gets.
    """

    def __init__(self, fenced: ToolCallFormat) -> None:
        self._fenced = fenced
        super().__init__("foreign", fenced.example)

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> list[AnyCall]:  # noqa: ARG002 - it has no calls that are read here
        return []

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        return self._fenced.write(name, arguments)


def read_calls(
    form: ToolCallFormat, text: str, start: int, closes: str = "", *, name_is_key: bool = False
) -> tuple[list[AnyCall], int]:
    """Parse a list of calls, or consecutive objects; also return the end of the parsed part.

    An unparsable part extends to the next mark that closes calls.
    """
    calls: list[AnyCall] = []
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
        values = value[: MAX_CALLS + 1] if isinstance(value, list) else [value]
        calls += [_read_call(form, one, name_is_key=name_is_key) for one in values]
    return calls, position


def _read_call(form: ToolCallFormat, value: Any, *, name_is_key: bool) -> AnyCall:
    """Take a call from a JSON object; unknown keys are ignored."""
    if not isinstance(value, dict):
        return form.malformed(f"Expected `object`, got {json_text(value)[:40]}")
    name = next((value[key] for key in ("name", "tool_name") if isinstance(value.get(key), str)), "")
    arguments = next((value[key] for key in _ARGUMENT_KEYS if key in value), None)
    if not name and len(value) == 1 and name_is_key:
        ((name, arguments),) = value.items()
    if not name:
        return malformed_json(form, "Object missing required field `name`", json_text(value))
    try:
        call_id = next((value[key] for key in ("id", "tool_call_id") if isinstance(value.get(key), str)), "")
        return ToolCall(name, read_arguments(arguments), call_id)
    except ValueError as error:
        return form.malformed(str(error), name, arguments if isinstance(arguments, str) else json_text(arguments))


def malformed_json(form: ToolCallFormat, problem: str, content: str) -> MalformedCall:
    """Return an invalid call, with its readable parts: its name, and the text of its arguments."""
    name, arguments = _NAME.search(content), _ARGUMENTS.search(content)
    if name is None or arguments is None:
        return form.malformed(problem)
    written = content[arguments.end() :].strip()
    closed = written.endswith("}") and written.count("}") > written.count("{")
    return form.malformed(problem, name[1], written.removesuffix("}") if closed else written)


def _end(found: re.Match[str] | None) -> int:
    assert found is not None  # its expression matches the empty text
    return found.end()
