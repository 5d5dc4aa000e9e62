"""Forms of tool calls that are calls of Python functions, with literals as arguments.

    <|tool_call_start|>[bash(command='ls', seconds=5), clock()]<|tool_call_end|>

Nothing is evaluated: the text is parsed to a syntax tree, and only calls by name with literals are accepted. `true`,
`false` and `null` are literals too, and a string may contain a line break.
"""

from __future__ import annotations

import ast
import keyword
import re
import warnings
from itertools import islice
from typing import TYPE_CHECKING, Any

from .call import MAX_CALLS, MarkedFormat, ToolCall, at_most, json_text
from .json_calls import BareJsonFormat

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .call import AnyCall, ToolCallFormat, Turn

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
    """Calls between marks; a mark within a string does not count.

    Args:
        name: of the form.
        opens: the text before the calls.
        closes: the text after them.
        listed: the calls are a list; otherwise each is a line.
    """

    def __init__(self, name: str, opens: str, closes: str, *, listed: bool) -> None:
        self._opens, self._closes, self._listed = opens, closes, listed
        self._tokens = re.compile(rf"{_STRING}|({re.escape(closes)})", re.DOTALL)
        super().__init__(name, re.escape(opens), self._framed("NAME(KEY='VALUE')"))

    def read(self, turn: Turn, found: re.Match[str]) -> tuple[Sequence[AnyCall], int]:
        text = turn.text
        end = next((token.start(1) for token in self._tokens.finditer(text, found.end()) if token[1]), -1)
        end = end if end >= 0 else text.find(self._closes, found.end())
        if end < 0:
            return [self.malformed(f"it is not closed with {self._closes}")], len(text)
        return python_calls(self, text[found.end() : end]), end + len(self._closes)

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        return self._framed(python_text(name, arguments))

    def _framed(self, content: str) -> str:
        content = f"[{content}]" if self._listed else f"\n{content}\n"
        return f"{self._opens}{content}{self._closes}"


class Llama4Format(BareJsonFormat):
    """The form of Llama 4: the whole turn is a list of calls, or JSON as of Llama 3. Marks may stand around either."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "[NAME(KEY='VALUE')]")

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> list[AnyCall]:
        _, content = _llama4_parts(text)
        return python_calls(self, content) if _LLAMA_CALLS.match(content) else super().parse(content, tools)

    def before_calls(self, text: str) -> str:
        said, _ = _llama4_parts(text)
        return said if self.parse(text) else text

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        return f"[{python_text(name, arguments)}]"


def _llama4_parts(text: str) -> tuple[str, str]:
    """Return the text before the calls, and the calls without the marks around them."""
    before, _, inside = text.rpartition("<|python_start|>") if "<|python_start|>" in text else ("", "", text)
    said, closed, after = inside.partition("<|python_end|>")
    return (before + said, after.strip()) if closed and after.strip() else (before, said.strip())


def python_calls(form: ToolCallFormat, source: str) -> list[AnyCall]:
    """Parse calls that are written as a list, or each on a line."""
    if len(source) > MAX_CHARS:
        return [form.malformed(f"it is longer than {MAX_CHARS} characters")]
    calls: list[AnyCall] = []
    try:
        calls.extend(map(_call, islice(_nodes(source), MAX_CALLS + 1)))  # calls before a fault are kept
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        problem = error.msg if isinstance(error, SyntaxError) else str(error) or "it is nested too deep"
        calls.append(form.malformed(problem))
    return at_most(calls)


def _nodes(source: str) -> Iterator[ast.expr]:
    try:
        tree = _parsed(source.strip())
    except SyntaxError:
        tree = _parsed(_LINE_IN_STRING.sub(r"\\n", source.strip()))
    for statement in tree.body:
        if not isinstance(statement, ast.Expr):
            raise ValueError("it is not a call of a function")  # noqa: TRY004 - about the policy's text
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
        raise ValueError("it is not a call of a function")  # noqa: TRY004 - about the policy's text
    name = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else "?"
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{name[:40]} is not a name of a tool")
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
    raise ValueError("an argument is not a literal")


_INFINITE = (float("inf"),)


def python_text(name: str, arguments: dict[str, Any]) -> str:
    """Return a call in Python's syntax."""
    named = [f"{key}={value!r}" for key, value in arguments.items() if key.isidentifier()]
    others = {key: value for key, value in arguments.items() if not key.isidentifier()}
    return f"{name}({', '.join([*named, *([f'**{others!r}'] if others else [])])})"
