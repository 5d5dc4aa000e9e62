"""Forms of tool calls that are calls of Python functions, with literals as arguments.

    <|tool_call_start|>[bash(command='ls', seconds=5), clock()]<|tool_call_end|>

Nothing is evaluated: the text is parsed to a syntax tree, of which only calls by name with literals in them are taken.
`true`, `false` and `null` are literals too, and a line's end within a string is one.
"""

from __future__ import annotations

import ast
import keyword
import re
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

from .call import MAX_CALLS, MarkedFormat, ToolCall, json_text, too_many_calls
from .llama3 import Llama3Format

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .call import MalformedCall, ToolCallFormat
    from .turn import Turn

MAX_CHARS = 1 << 18
"""Longest text of the calls of a turn: its syntax tree takes some hundred times the memory."""
_STRING = r"'(?:[^'\\]|\\.)*(?:'|\Z)|\"(?:[^\"\\]|\\.)*(?:\"|\Z)"
_NAMES = {"true": True, "false": False, "null": None}
_LINE_IN_STRING = re.compile(r"\n(?!\s{0,64}[A-Za-z_][\w.]{0,255}\()")
_NO_IDENTIFIERS = re.compile(
    rf"{_STRING}|(?P<key>\b(?:{'|'.join(keyword.kwlist)})\b)(?=\s?=[^=]|\()"
    r"|(?P<tool>(?<![\w.-])[A-Za-z_][\w.-]{0,255}(?=\())",
    re.DOTALL,
)
"""Keys and tools whose names are keywords of Python, and tools whose names have a hyphen."""
_KEYWORD, _HYPHEN = "__keyword", "__hyphen__"
_LLAMA_CALLS = re.compile(r"\[\s*[A-Za-z_][\w.-]{0,255}\(")


class PythonCallsFormat(MarkedFormat):
    """Calls between marks.

    The class's parameters:
        name: of the form.
        opens: what stands before the calls.
        closes: what stands behind them.
        listed: the calls are a list; otherwise each is a line.
    """

    opens: ClassVar[str]
    closes: ClassVar[str]
    listed: ClassVar[bool]
    tokens: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls, *, name: str, opens: str, closes: str, listed: bool) -> None:
        cls.name, cls.opens, cls.closes, cls.listed = name, opens, closes, listed
        cls.begins = re.compile(re.escape(opens))
        cls.tokens = re.compile(rf"{_STRING}|({re.escape(closes)})", re.DOTALL)
        cls.example = cls._framed("NAME(KEY='VALUE')")

    def read(self, turn: Turn, found: re.Match[str]) -> tuple[Sequence[ToolCall | MalformedCall], int]:
        """Read the calls between marks; a mark within a string does not count."""
        text = turn.text
        end = next((token.start(1) for token in self.tokens.finditer(text, found.end()) if token[1]), -1)
        end = end if end >= 0 else text.find(self.closes, found.end())
        if end < 0:
            return [self.malformed(f"it is not closed with {self.closes}")], len(text)
        return python_calls(self, text[found.end() : end]), end + len(self.closes)

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call."""
        return self._framed(python_text(name, arguments))

    @classmethod
    def _framed(cls, content: str) -> str:
        return f"{cls.opens}[{content}]{cls.closes}" if cls.listed else f"{cls.opens}\n{content}\n{cls.closes}"


class Lfm2Format(PythonCallsFormat, name="lfm2", opens="<|tool_call_start|>", closes="<|tool_call_end|>", listed=True):
    """Of LFM2 and LFM2.5."""


class OlmoFormat(PythonCallsFormat, name="olmo3", opens="<function_calls>", closes="</function_calls>", listed=False):
    """Of Olmo 3."""


class Llama4Format(Llama3Format):
    """Of Llama 4: the whole turn is a list of calls, or JSON as of Llama 3. Marks may stand around either."""

    name: ClassVar = "llama4"
    example: ClassVar = "[NAME(KEY='VALUE')]"

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> list[ToolCall | MalformedCall]:
        """Return the tool calls of one turn, in order. Never raises."""
        _, content = _llama4_parts(text)
        return python_calls(self, content) if _LLAMA_CALLS.match(content) else super().parse(content, tools)

    def before_calls(self, text: str) -> str:
        """Return what a turn says before its first call."""
        said, _ = _llama4_parts(text)
        return said if self.parse(text) else text

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call."""
        return f"[{python_text(name, arguments)}]"


def _llama4_parts(text: str) -> tuple[str, str]:
    """Return what is said before the calls, and the calls without the marks around them."""
    before, _, inside = text.rpartition("<|python_start|>") if "<|python_start|>" in text else ("", "", text)
    said, closed, after = inside.partition("<|python_end|>")
    return (before + said, after.strip()) if closed and after.strip() else (before, said.strip())


def python_calls(form: ToolCallFormat, source: str) -> list[ToolCall | MalformedCall]:
    """Read calls that are written as a list, or each on a line."""
    if len(source) > MAX_CHARS:
        return [form.malformed(f"it is longer than {MAX_CHARS} characters")]
    calls: list[ToolCall | MalformedCall] = []
    try:
        for node in _nodes(source):
            if len(calls) == MAX_CALLS:
                return [*calls, too_many_calls()]
            calls.append(_call(node))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        problem = error.msg if isinstance(error, SyntaxError) else str(error) or "it is nested too deep"
        calls.append(form.malformed(problem))
    return calls


def _nodes(source: str) -> Iterator[ast.expr]:
    try:
        tree = _parsed(source.strip())
    except SyntaxError:
        tree = _parsed(_LINE_IN_STRING.sub(r"\\n", source.strip()))
    for statement in tree.body:
        if not isinstance(statement, ast.Expr):
            raise ValueError("it is no call of a function")  # noqa: TRY004 - of what the policy wrote
        if isinstance(statement.value, ast.List | ast.Tuple):
            yield from statement.value.elts
        else:
            yield statement.value


def _parsed(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of backslashes in strings
        return ast.parse(_NO_IDENTIFIERS.sub(_as_identifier, source))


def _as_identifier(found: re.Match[str]) -> str:
    if found["key"]:
        return found["key"] + _KEYWORD
    return found["tool"].replace("-", _HYPHEN) if found["tool"] else found[0]


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call):
        raise ValueError("it is no call of a function")  # noqa: TRY004 - of what the policy wrote
    name = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else "?"
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{name[:40]} is no name of a tool")
    name = name.replace(_HYPHEN, "-").removesuffix(_KEYWORD)
    if node.args:
        raise ValueError(f"arguments of {name} have no names")
    arguments: dict[str, Any] = {}
    for argument in node.keywords:
        value = _literal(argument.value)
        if argument.arg is not None:
            arguments[argument.arg.removesuffix(_KEYWORD)] = value
        elif isinstance(value, dict):
            arguments.update(value)
    json_text(arguments).encode()
    return ToolCall(name, arguments)


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal that JSON has too."""
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value) if value not in _INFINITE:
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)) if value not in _INFINITE:
            return -value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            names = [_literal(key) if key is not None else None for key in keys]
            if all(isinstance(name, str) for name in names):
                return dict(zip(names, map(_literal, values), strict=True))
    raise ValueError("an argument is no literal")


_INFINITE = (float("inf"),)


def python_text(name: str, arguments: dict[str, Any]) -> str:
    """Return a call as Python writes it."""
    named = [f"{key}={value!r}" for key, value in arguments.items() if key.isidentifier()]
    others = {key: value for key, value in arguments.items() if not key.isidentifier()}
    return f"{name}({', '.join([*named, *([f'**{others!r}'] if others else [])])})"
