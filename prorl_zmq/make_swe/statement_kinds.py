"""Kinds of bugs in statements, such as one that is missing. Each yields its edits at a place."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from .expression_kinds import both_ways
from .source_text import own_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .source_text import Place, SourceText, Span

    Edit = tuple[Span, bytes]

OTHER_EXCEPTION = both_ways(
    ("ValueError", "TypeError"), ("KeyError", "IndexError"), ("OverflowError", "ZeroDivisionError")
) | {
    "AttributeError": "KeyError",
    "StopIteration": "IndexError",
    "NotImplementedError": "TypeError",
    "UnicodeDecodeError": "UnicodeEncodeError",
    "OSError": "ValueError",
    "FileNotFoundError": "PermissionError",
}


def removed_statement(source: SourceText, place: Place) -> Iterator[Edit]:
    """An assignment or a call that is missing."""
    node = place.node
    call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    again = isinstance(node, ast.Assign) and len(node.targets) == 1 and _has_value_before(place, node.targets[0])
    if call or again or isinstance(node, ast.AugAssign):
        yield from _removed(source, place)


def removed_guard(source: SourceText, place: Place) -> Iterator[Edit]:
    """An `if` or `elif` without `else` that is missing with all it does."""
    if isinstance(place.node, ast.If) and not place.node.orelse:
        yield from _removed(source, place)


def removed_return(source: SourceText, place: Place) -> Iterator[Edit]:
    """A `return` before the function's end that is missing, so that the function continues."""
    node = place.node
    if isinstance(node, ast.Return) and not isinstance(place.parent, ast.FunctionDef | ast.AsyncFunctionDef):
        yield source.span(node), b"pass"


def early_return(source: SourceText, place: Place) -> Iterator[Edit]:
    """The `return` behind a loop, moved into it: it ends in its first round."""
    node, siblings = place.node, place.siblings
    if not isinstance(node, ast.Return) or node.end_lineno != node.lineno or source.own_lines(node) is None:
        return
    at = siblings.index(node)
    loop = siblings[at - 1] if at else None
    if isinstance(loop, ast.For | ast.While) and not loop.orelse and source.own_lines(loop.body[-1]):
        start = source.line_start(node.lineno)
        last = loop.body[-1]
        indent = source.data[source.line_start(last.lineno) : source.span(last)[0]]
        yield (start, start + node.col_offset), indent


def loop_exit(source: SourceText, place: Place) -> Iterator[Edit]:
    """A `break` for a `continue`, or the other way round."""
    if isinstance(place.node, ast.Break | ast.Continue):
        yield source.span(place.node), b"continue" if isinstance(place.node, ast.Break) else b"break"


def changed_exception(source: SourceText, place: Place) -> Iterator[Edit]:
    """Another exception that is raised or caught, or one of several that is not caught."""
    node = place.node
    if isinstance(node, ast.Raise):
        caught = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    elif isinstance(node, ast.ExceptHandler):
        caught = node.type
    else:
        return
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
    """Return whether an assignment's target exists without it, so that its absence is not noticed at once."""
    if not isinstance(target, ast.Name):
        return isinstance(target, ast.Attribute | ast.Subscript)
    scope = place.scope
    arguments = (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs)
    if target.id in {argument.arg for argument in arguments}:
        return True
    return any(
        isinstance(node, ast.Name)
        and node.id == target.id
        and isinstance(node.ctx, ast.Store)
        and node.lineno < target.lineno
        for node in own_nodes(scope)
    )


STATEMENT_KINDS: dict[str, Callable[[SourceText, Place], Iterator[Edit]]] = {
    kind.__name__: kind
    for kind in (removed_statement, removed_guard, removed_return, early_return, loop_exit, changed_exception)
}
