"""A mutation: one small change to one function of a file, the bug of an instance.

It replaces some bytes of the file and leaves all others unchanged, formatting included. The kinds of mutations are in
`expression_kinds` and `statement_kinds`; `search` runs the tests to see whether they notice one.
"""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .expression_kinds import EXPRESSION_KINDS
from .source_text import SourceText, first_line
from .statement_kinds import STATEMENT_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .source_text import Place, Span

    Edit = tuple[Span, bytes]
    Kind = Callable[[SourceText, Place], Iterator[Edit]]

KINDS: dict[str, Kind] = {**EXPRESSION_KINDS, **STATEMENT_KINDS}
"""All kinds of bugs, by name."""


@dataclass(frozen=True)
class Mutation:
    """One change to a file."""

    kind: str
    function: str
    """Qualified name of the outermost function that it is in."""
    scope_line: int
    """First line of the innermost function that it is in, as its code object has it."""
    statement_line: int
    """First line of the statement that it is in, counted from 1."""
    start: int
    """First byte that goes."""
    end: int
    """Behind the last byte that goes."""
    replacement: bytes

    def apply(self, data: bytes) -> bytes:
        return data[: self.start] + self.replacement + data[self.end :]

    def lines(self, data: bytes) -> tuple[str, ...]:
        """Return the lines that it changes, as they were and as they are then, without the space around them."""
        first = data.rfind(b"\n", 0, self.start) + 1
        changed = self.apply(data)
        new_end = self.start + len(self.replacement)
        texts = (data[first : _line_end(data, self.end)], changed[first : _line_end(changed, new_end)])
        lines = (line.strip() for text in texts for line in text.decode().splitlines())
        return tuple(dict.fromkeys(filter(None, lines)))


def mutations(source: SourceText) -> Iterator[Mutation]:
    """Return all mutations of a file, in a fixed order. Some do not parse: see `is_sound`."""
    for place in source.places():
        for name, kind in KINDS.items():
            for (start, end), replacement in kind(source, place):
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
    """Return whether the changed file is Python that means something else."""
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
