"""Mutations: changes of one function, each of them the bug of an instance.

A mutation replaces some bytes of the file and leaves all others unchanged, formatting included. It is written by hand,
since libraries for mutation testing rewrite the formatting of a file.
"""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .source_text import SourceText, first_line, own_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .source_text import Function, Place, Span

    Edit = tuple[Span, bytes]
    Kind = Callable[[SourceText, Place, Any], Iterator[Edit]]

KINDS: dict[str, tuple[tuple[type[ast.AST], ...], Kind]] = {}
"""All kinds of bugs by name, each with the nodes in which it can be, and the function that yields its edits there."""
OPERATOR = re.compile(rb"not\s+in\b|is\s+not\b|[^\s()\\]+")
OTHER_OPERATORS = {
    operator: others
    for operator, *others in (
        *((b"<", b"<=", b">"), (b"<=", b"<", b">="), (b">", b">=", b"<"), (b">=", b">", b"<=")),
        *((b"==", b"!="), (b"!=", b"=="), (b"in", b"not in"), (b"not in", b"in"), (b"is", b"is not")),
        *((b"is not", b"is"), (b"and", b"or"), (b"or", b"and"), (b"&", b"|"), (b"|", b"&")),
        *((b"+", b"-"), (b"-", b"+"), (b"*", b"//", b"+"), (b"/", b"//", b"*"), (b"//", b"/", b"%")),
        *((b"%", b"//"), (b"**", b"*"), (b"<<", b">>"), (b">>", b"<<")),
    )
}


def _both_ways(*pairs: tuple[str, str]) -> dict[str, str]:
    return {one: other for pair in pairs for one, other in (pair, pair[::-1])}


OTHER_FUNCTION = _both_ways(
    *(("min", "max"), ("any", "all"), ("startswith", "endswith"), ("lstrip", "rstrip"), ("find", "rfind")),
    *(("split", "rsplit"), ("partition", "rpartition"), ("lower", "upper"), ("ljust", "rjust"), ("floor", "ceil")),
    *(("keys", "values"), ("append", "extend"), ("popleft", "pop"), ("removeprefix", "removesuffix")),
    *(("isdigit", "isalpha"), ("islower", "isupper"), ("match", "search"), ("union", "intersection")),
)
"""Functions that programmers confuse."""
WRAPPERS = frozenset({"str", "int", "float", "list", "tuple", "set", "sorted", "reversed", "abs", "round", "dict"})
CLEANERS = frozenset({"strip", "lstrip", "rstrip", "lower", "upper", "casefold", "copy", "title", "capitalize"})
ORDERED = frozenset({"isinstance", "issubclass", "getattr", "hasattr", "setattr", "range", "super"})
"""Functions whose callers notice swapped arguments at once."""
STRINGS = _both_ways(
    *(("", " "), (",", ", "), ("-", "_"), ("true", "false"), ("left", "right"), ("start", "end"), ("key", "value")),
    ("yes", "no"),
) | {".": ",", "/": "\\\\", ":": ";", "0": "1", "\n": " ", "r": "rb", "utf-8": "ascii"}
OTHER_EXCEPTION = _both_ways(
    ("ValueError", "TypeError"), ("KeyError", "IndexError"), ("OverflowError", "ZeroDivisionError")
) | {
    "AttributeError": "KeyError",
    "StopIteration": "IndexError",
    "NotImplementedError": "TypeError",
    "UnicodeDecodeError": "UnicodeEncodeError",
    "OSError": "ValueError",
    "FileNotFoundError": "PermissionError",
}
SIMPLE = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)


@dataclass(frozen=True)
class Mutation:
    kind: str
    function: str
    """Qualified name of the outermost function around it."""
    scope_line: int
    """First line of the innermost function around it, as in its code object."""
    statement_line: int
    """First line of its statement, from 1."""
    start: int
    """First replaced byte."""
    end: int
    """The byte after the last replaced one."""
    replacement: bytes

    def apply(self, data: bytes) -> bytes:
        return data[: self.start] + self.replacement + data[self.end :]

    def lines(self, data: bytes) -> tuple[str, ...]:
        """Return the changed lines, stripped, before and after the change."""
        first = data.rfind(b"\n", 0, self.start) + 1
        changed = self.apply(data)
        new_end = self.start + len(self.replacement)
        texts = (data[first : _line_end(data, self.end)], changed[first : _line_end(changed, new_end)])
        lines = (line.strip() for text in texts for line in text.decode().splitlines())
        return tuple(dict.fromkeys(filter(None, lines)))


def mutations(source: SourceText) -> Iterator[Mutation]:
    """Return all mutations of a file, in a fixed order. Some do not parse: see `is_sound`."""
    for place in source.places():
        for name, (nodes, kind) in KINDS.items():
            edits = kind(source, place, place.node) if isinstance(place.node, nodes) else ()
            for (start, end), replacement in edits:
                yield Mutation(
                    kind=name,
                    function=place.function,
                    scope_line=first_line(place.scope),
                    statement_line=place.statement.lineno,
                    start=start,
                    end=end,
                    replacement=replacement,
                )


def is_sound(mutation: Mutation, source: SourceText) -> bool:
    """Return whether the changed file parses and means something else."""
    changed = mutation.apply(source.data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # such as: "is" with a literal, which a user would be warned of
            text = changed.decode()
            compile(text, "changed", "exec", dont_inherit=True)
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, Warning):
        return False
    return ast.dump(tree) != ast.dump(source.tree)


def _line_end(data: bytes, start: int) -> int:
    found = data.find(b"\n", max(0, start - 1))
    return len(data) if found < 0 else found


def _kind(*nodes: type[ast.AST]) -> Callable[[Kind], Kind]:
    def note(function: Kind) -> Kind:
        KINDS[function.__name__] = (nodes, function)
        return function

    return note


def _other_operators(source: SourceText, left: ast.AST, right: ast.AST, behind: bytes = b"") -> Iterator[Edit]:
    """Replace the operator between two operands, unless a comment stands there."""
    start, end = source.span(left)[1], source.span(right)[0]
    gap = source.data[start:end]
    found = OPERATOR.search(gap)
    if found is None or b"#" in gap:
        return
    operator = b" ".join(found[0].split()).removesuffix(behind)
    for other in OTHER_OPERATORS.get(operator, ()):
        yield (start + found.start(), start + found.end()), other + behind


@_kind(ast.Compare)
def comparison(source: SourceText, _place: Place, node: ast.Compare) -> Iterator[Edit]:
    """A comparison that is flipped, or off by one."""
    for left, right in pairwise([node.left, *node.comparators]):
        yield from _other_operators(source, left, right)


@_kind(ast.BoolOp)
def boolean_operator(source: SourceText, _place: Place, node: ast.BoolOp) -> Iterator[Edit]:
    """An `and` for an `or`, or the other way round."""
    if len(node.values) == 2:
        left, right = node.values
        yield from _other_operators(source, left, right)


@_kind(ast.BinOp, ast.AugAssign)
def arithmetic(source: SourceText, _place: Place, node: ast.BinOp | ast.AugAssign) -> Iterator[Edit]:
    """Another arithmetic operator."""
    if isinstance(node, ast.BinOp):
        operands, behind = (node.left, node.right), b""
    else:
        operands, behind = (node.target, node.value), b"="
    if not any(map(_is_text, operands)):
        yield from _other_operators(source, *operands, behind)


@_kind(ast.UnaryOp, ast.If, ast.While, ast.IfExp, ast.comprehension)
def negated_condition(source: SourceText, _place: Place, node: ast.AST) -> Iterator[Edit]:
    """A condition that is the wrong way round."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield source.span(node), source.of(node.operand)
    elif isinstance(node, ast.If | ast.While | ast.IfExp) and isinstance(node.test, SIMPLE):
        yield source.span(node.test), b"not " + source.of(node.test)
    elif isinstance(node, ast.comprehension):
        for test in node.ifs:
            if isinstance(test, SIMPLE):
                yield source.span(test), b"not " + source.of(test)


@_kind(ast.BoolOp)
def removed_condition(source: SourceText, _place: Place, node: ast.BoolOp) -> Iterator[Edit]:
    """One part of a condition that is missing."""
    spans = [source.span(value) for value in node.values]
    yield (spans[0][0], spans[1][0]), b""
    yield from (((before[1], after[1]), b"") for before, after in pairwise(spans))


@_kind(ast.Constant)
def wrong_constant(source: SourceText, place: Place, node: ast.Constant) -> Iterator[Edit]:
    """A number that is off by one, another truth value, another separator."""
    if not isinstance(place.parent, ast.arguments | ast.Slice | ast.Expr | ast.Subscript | ast.UnaryOp):
        yield from _other_constants(source, node)


@_kind(ast.Constant)
def changed_default(source: SourceText, place: Place, node: ast.Constant) -> Iterator[Edit]:
    """A parameter with another default."""
    if isinstance(place.parent, ast.arguments):
        yield from _other_constants(source, node)


@_kind(ast.Call)
def swapped_arguments(source: SourceText, _place: Place, node: ast.Call) -> Iterator[Edit]:
    """Two arguments of a call in the wrong order."""
    if isinstance(node.func, ast.Name) and node.func.id in ORDERED:
        return
    for one, other in pairwise(node.args):
        texts = source.of(one), source.of(other)
        if texts[0] == texts[1] or any(isinstance(each, ast.Starred) for each in (one, other)):
            continue
        (start, gap_start), (gap_end, end) = source.span(one), source.span(other)
        yield (start, end), texts[1] + source.data[gap_start:gap_end] + texts[0]


@_kind(ast.IfExp)
def swapped_branches(source: SourceText, _place: Place, node: ast.IfExp) -> Iterator[Edit]:
    """The two values of a conditional expression in the wrong places."""
    (start, gap_start), (gap_end, end) = source.span(node.body), source.span(node.orelse)
    yield (start, end), source.of(node.orelse) + source.data[gap_start:gap_end] + source.of(node.body)


@_kind(ast.Subscript)
def changed_bound(source: SourceText, _place: Place, node: ast.Subscript) -> Iterator[Edit]:
    """A slice or an index that is off by one."""
    index = node.slice
    if isinstance(index, ast.Slice):
        for bound in filter(None, (index.lower, index.upper)):
            number = _integer(bound)
            if number is not None:
                yield source.span(bound), str(number + 1).encode()
                if number != 0:
                    yield source.span(bound), str(number - 1).encode()
            elif isinstance(bound, SIMPLE):
                yield source.span(bound), source.of(bound) + b" + 1"
                yield source.span(bound), source.of(bound) + b" - 1"
        if index.upper is not None:
            yield (source.span(index.upper), b"")
    elif (number := _integer(index)) is not None:
        yield source.span(index), {0: b"-1", -1: b"0"}.get(number, str(number - 1).encode())
        yield source.span(index), str(number + 1).encode()


@_kind(ast.Call)
def dropped_call(source: SourceText, _place: Place, node: ast.Call) -> Iterator[Edit]:
    """A value that is used without being cleaned or converted."""
    if node.keywords:
        return
    if isinstance(node.func, ast.Attribute) and node.func.attr in CLEANERS and not node.args:
        yield (source.span(node.func.value)[1], source.span(node)[1]), b""
    elif isinstance(node.func, ast.Name) and node.func.id in WRAPPERS and len(node.args) == 1:
        argument = source.of(node.args[0])
        yield source.span(node), argument if isinstance(node.args[0], SIMPLE) else b"(" + argument + b")"


@_kind(ast.Call)
def wrong_function(source: SourceText, _place: Place, node: ast.Call) -> Iterator[Edit]:
    """A function's twin, such as `max` for `min`."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if other := OTHER_FUNCTION.get(name):
        end = source.span(node.func)[1]
        yield (end - len(name), end), other.encode()


@_kind(ast.Name)
def wrong_variable(source: SourceText, place: Place, node: ast.Name) -> Iterator[Edit]:
    """Another variable of the same function."""
    known = [name for name in _variables_before(place.scope, node.lineno) if name not in ("self", "cls", "_")]
    is_called = isinstance(place.parent, ast.Call) and place.parent.func is node
    if isinstance(node.ctx, ast.Load) and node.id in known and not is_called:
        yield from ((source.span(node), other.encode()) for other in known if other != node.id)


def _variables_before(scope: Function, line: int) -> list[str]:
    arguments = scope.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    stored = (node for node in own_nodes(scope) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return list(dict.fromkeys([*names, *(node.id for node in stored if node.lineno < line)]))


def _other_constants(source: SourceText, node: ast.Constant) -> Iterator[Edit]:
    value, span, text = node.value, source.span(node), source.of(node)
    if isinstance(value, bool):
        yield span, str(not value).encode()
    elif isinstance(value, int) and text.isdigit():
        yield span, str(value + 1).encode()
        if value > 0:
            yield span, str(value - 1).encode()
    elif isinstance(value, float):
        yield span, repr(value + 1).encode()
    elif isinstance(value, str) and value in STRINGS and text[:1] in (b"'", b'"') and text[:3] not in (b"'''", b'"""'):
        yield span, text[:1] + STRINGS[value].encode() + text[-1:]


def _integer(node: ast.AST) -> int | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _integer(node.operand)
        return None if number is None else -number
    value = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


@_kind(ast.Expr, ast.Assign, ast.AugAssign)
def removed_statement(source: SourceText, place: Place, node: ast.Expr | ast.Assign | ast.AugAssign) -> Iterator[Edit]:
    """An assignment or a call that is missing."""
    call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    again = isinstance(node, ast.Assign) and len(node.targets) == 1 and _has_value_before(place, node.targets[0])
    if call or again or isinstance(node, ast.AugAssign):
        yield from _removed(source, place)


@_kind(ast.If)
def removed_guard(source: SourceText, place: Place, node: ast.If) -> Iterator[Edit]:
    """An `if` or `elif` without `else` that is missing with all it does."""
    if not node.orelse:
        yield from _removed(source, place)


@_kind(ast.Return)
def removed_return(source: SourceText, place: Place, node: ast.Return) -> Iterator[Edit]:
    """A `return` before the function's end that is missing, so that the function continues."""
    if not isinstance(place.parent, ast.FunctionDef | ast.AsyncFunctionDef):
        yield source.span(node), b"pass"


@_kind(ast.Return)
def early_return(source: SourceText, place: Place, node: ast.Return) -> Iterator[Edit]:
    """The `return` behind a loop, moved into it: it ends in its first round."""
    at = place.siblings.index(node)
    loop = place.siblings[at - 1] if at else None
    if node.end_lineno != node.lineno or source.own_lines(node) is None:
        return
    if isinstance(loop, ast.For | ast.While) and not loop.orelse and source.own_lines(loop.body[-1]):
        start = source.line_start(node.lineno)
        last = loop.body[-1]
        indent = source.data[source.line_start(last.lineno) : source.span(last)[0]]
        yield (start, start + node.col_offset), indent


@_kind(ast.Break, ast.Continue)
def loop_exit(source: SourceText, _place: Place, node: ast.Break | ast.Continue) -> Iterator[Edit]:
    """A `break` for a `continue`, or the other way round."""
    yield source.span(node), b"continue" if isinstance(node, ast.Break) else b"break"


@_kind(ast.Raise, ast.ExceptHandler)
def changed_exception(source: SourceText, _place: Place, node: ast.Raise | ast.ExceptHandler) -> Iterator[Edit]:
    """Another exception that is raised or caught, or one of several that is not caught."""
    caught = node.exc if isinstance(node, ast.Raise) else node.type
    caught = caught.func if isinstance(node, ast.Raise) and isinstance(caught, ast.Call) else caught
    if isinstance(caught, ast.Name) and caught.id in OTHER_EXCEPTION:
        yield source.span(caught), OTHER_EXCEPTION[caught.id].encode()
    elif isinstance(caught, ast.Tuple) and len(caught.elts) > 1:
        for left_out in caught.elts:
            kept = [source.of(each) for each in caught.elts if each is not left_out]
            yield source.span(caught), kept[0] if len(kept) == 1 else b"(" + b", ".join(kept) + b")"


def _removed(source: SourceText, place: Place) -> Iterator[Edit]:
    node = place.node
    if not isinstance(node, ast.stmt):
        return
    lines = source.own_lines(node)
    if lines is not None and (len(place.siblings) > 1 or source.of(node).startswith(b"elif")):
        yield lines, b""
    else:
        yield source.span(node), b"pass"


def _has_value_before(place: Place, target: ast.expr) -> bool:
    """Return whether the target has a value without the assignment, so that its absence is not noticed at once."""
    if not isinstance(target, ast.Name):
        return isinstance(target, ast.Attribute | ast.Subscript)
    return target.id in _variables_before(place.scope, target.lineno)
