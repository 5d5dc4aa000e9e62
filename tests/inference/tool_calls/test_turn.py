from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from prorl_zmq.inference.tool_calls.call import Frames, Turn
from prorl_zmq.inference.tool_calls.formats import FORMS

if TYPE_CHECKING:
    from collections.abc import Iterator

MARKS = re.compile(r"(?P<enters><call>)|(?P<leaves></call>)|(?P<closed></v>)(?=<v>|</call>|\Z)")


class Counted:
    """An expression that counts the marks that it finds."""

    def __init__(self) -> None:
        self.found = 0

    def finditer(self, text: str, start: int) -> Iterator[re.Match[str]]:
        for mark in MARKS.finditer(text, start):
            self.found += 1
            yield mark


def closed(mark: re.Match[str]) -> bool:
    return mark["closed"] is not None


@pytest.mark.parametrize(
    ("value", "rest"),
    [
        ("plain", "</v>"),
        ("a </v> b", "</v></call>"),
        ("<call><v>a</v></call>", "</v></call>"),
        ("<call> is not closed", "</v></call>"),
        ("</call> closes nothing", "</v></call>"),
    ],
)
def test_a_value_ends_at_the_mark_that_another_follows(value: str, rest: str) -> None:
    end = Turn(f"{value}{rest}", ()).end_of_value(0, MARKS, closed)
    assert end is not None
    assert end.start() == len(value)


def test_nothing_ends_a_value() -> None:
    assert Turn("a </v> b", ()).end_of_value(0, MARKS, closed) is None


@pytest.mark.parametrize("part", ["<call>", "</call>", "a</v><v>", "a</v>b<v>", "<call>a</v><v>", "</v></call>"])
def test_no_mark_is_looked_at_more_than_three_times(part: str) -> None:
    text = part * 2000
    marks, turn, position = Counted(), Turn(text, ()), 0
    while position < len(text):
        counted: Any = marks
        end = turn.end_of_value(position, counted, closed)
        if end is None:
            break
        position = end.end()
    assert marks.found <= 3 * len(MARKS.findall(text)) + 3


def test_expressions_need_no_square_of_the_length() -> None:
    """What is repeated without a bound has nothing in it that is: so no text is read in more than one way."""
    from re import _constants as constants  # type: ignore[attr-defined]
    from re import _parser as parser  # type: ignore[attr-defined]

    def check(items: Any, *, within: bool, pattern: str) -> None:
        for code, argument in items:
            if code in {constants.MAX_REPEAT, constants.MIN_REPEAT}:
                _, most, inner = argument
                unbounded = most is constants.MAXREPEAT
                assert not (unbounded and within), pattern
                check(inner, within=within or unbounded, pattern=pattern)
            elif code is constants.BRANCH:
                for branch in argument[1]:
                    check(branch, within=within, pattern=pattern)
            elif code is constants.SUBPATTERN:
                check(argument[-1], within=within, pattern=pattern)
            elif code in {constants.ASSERT, constants.ASSERT_NOT}:
                check(argument[1], within=within, pattern=pattern)

    patterns: set[re.Pattern[str]] = set()
    for form in FORMS.values():
        for source in (vars(__import__(type(form).__module__, fromlist=["_"])), vars(form)):
            values = [value.pattern if isinstance(value, Frames) else value for value in source.values()]
            patterns.update(value for value in values if isinstance(value, re.Pattern))
    assert len(patterns) > 40
    for found in patterns:
        check(parser.parse(found.pattern, found.flags & re.DOTALL), within=False, pattern=found.pattern)
