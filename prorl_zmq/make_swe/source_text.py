"""`SourceText`: a Python file's bytes, its syntax tree, and the places that a mutation may change.

Positions count bytes of UTF-8. Places are in function bodies and defaults, except docstrings, annotations, decorators
and f-strings (whose positions are wrong before Python 3.12).
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef
Span = tuple[int, int]
"""Start and end offset."""


@dataclass(frozen=True)
class Place:
    """A node of a function, and its surroundings."""

    node: ast.AST
    parent: ast.AST
    statement: ast.stmt
    """The innermost statement around it; for a default, the function."""
    siblings: list[ast.stmt]
    """Of a statement: its block, itself included; else empty."""
    scope: Function
    """The innermost function around it."""
    function: str
    """Qualified name of the outermost function around it."""


class SourceText:
    """Raises `ValueError` of a file that cannot be parsed or has carriage returns or a byte order mark."""

    def __init__(self, data: bytes) -> None:
        if b"\r" in data or data.startswith(b"\xef\xbb\xbf"):
            raise ValueError("it has carriage returns or a byte order mark")
        try:
            self.text = data.decode()
            self.tree = ast.parse(self.text)
        except (SyntaxError, RecursionError) as error:
            raise ValueError(f"it is no Python that this interpreter can read: {error}") from error
        self.data = data
        self._starts = [0]
        for line in data.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)

    def span(self, node: ast.AST) -> Span:
        start = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return start, end

    def of(self, node: ast.AST) -> bytes:
        start, end = self.span(node)
        return self.data[start:end]

    def line_start(self, line: int) -> int:
        """Return the offset of a line, counted from 1; of the line after the last, the end."""
        return min(self._starts[line - 1], len(self.data))

    def own_lines(self, node: ast.stmt) -> Span | None:
        """Return the whole lines of a statement; None: it shares one with another statement."""
        start, end = self.span(node)
        first, behind = self.line_start(node.lineno), self.line_start((node.end_lineno or node.lineno) + 1)
        rest = self.data[end:behind].strip()
        if self.data[first:start].strip() or (rest and not rest.startswith(b"#")):
            return None
        return first, behind

    def places(self) -> Iterator[Place]:
        """Return all places, in the order of the file."""
        yield from self._of_blocks(self.tree, "")

    def _of_blocks(self, node: ast.AST, prefix: str) -> Iterator[Place]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                yield from _function(child, f"{prefix}{child.name}")
            elif isinstance(child, ast.ClassDef):
                yield from self._of_blocks(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.stmt | ast.ExceptHandler):
                yield from self._of_blocks(child, prefix)


def first_line(function: Function) -> int:
    """Return the first line of a function's code object: that of its first decorator."""
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """Return all nodes of a function's body, including inner functions."""
    for statement in function.body:
        yield from ast.walk(statement)


def _function(function: Function, qualified: str) -> Iterator[Place]:
    for default in (*function.args.defaults, *filter(None, function.args.kw_defaults)):
        yield Place(default, function.args, function, [], function, qualified)
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    for statement in body:
        yield from _walk(statement, function, statement, function.body, function, qualified)


def _walk(
    node: ast.AST, parent: ast.AST, statement: ast.stmt, siblings: list[ast.stmt], scope: Function, qualified: str
) -> Iterator[Place]:
    if isinstance(node, ast.JoinedStr | ast.ClassDef):
        return
    if isinstance(node, Function):
        yield from _function(node, qualified)
        return
    yield Place(node, parent, statement, siblings if isinstance(node, ast.stmt) else [], scope, qualified)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_comment"):
            continue
        children = value if isinstance(value, list) else [value]
        block = value if isinstance(value, list) and all(isinstance(each, ast.stmt) for each in value) else []
        for child in children:
            if isinstance(child, ast.stmt):
                yield from _walk(child, node, child, block, scope, qualified)
            elif isinstance(child, ast.AST) and not isinstance(child, ast.expr_context | ast.operator | ast.boolop):
                yield from _walk(child, node, statement, [], scope, qualified)
