"""One turn of the policy while its calls are read, and where a value in it ends that is written without quotes.

A value may hold the marks of its own form. A mark that closes a value counts only where another mark of the form, or
the text's end, follows. A whole call within a value, as in the documentation of a form, is part of the value. Both are
found by position, in time linear in the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .argument_types import ArgumentTypes

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Sequence


class Turn:
    """A turn that is read from its beginning to its end.

    Args:
        text: what the policy said.
        tools: the JSON schemas of what it may call.
    """

    def __init__(self, text: str, tools: Sequence[dict[str, Any]]) -> None:
        self.text = text
        self.types = ArgumentTypes(tools)
        self._nests = True
        """Every call within a value was closed so far. After the first that was not, their marks are plain text, so
        that each part of a text is read at most three times."""

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
