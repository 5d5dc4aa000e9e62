r"""Sets of real numbers, as answers write them, in one canonical form: intervals and points in order.

`[0, 1) \cup (1, 2]`, `\mathbb{R} \setminus \{2\}`, `x \neq 2`, `x < 1 \text{ or } x > 3`, `\emptyset`, `\{1, 1, 2\}`.
Ends are worked out to `DIGITS` digits, so that `\sqrt{8}` and `2\sqrt{2}` are one end. What has letters in it is None.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from ...tasks.written_answers import inside, named_value, number, split, unwrapped
from .math_expressions import constant

DIGITS = 40
PIECES_LIMIT = 32
DEPTH_LIMIT = 4

_REALS = re.compile(
    r"(?:\\(?:mathbb|text|Bbb|mathbf)\s*\{?\s*R\s*\}?|ℝ|(?:the set of )?all real(?: number| value)?s?"
    r"|all reals|the reals|reals"
    r"|(?:all|any|every) real (?:number|value)s? x)",
    re.IGNORECASE,
)
_EMPTY = re.compile(
    r"\\(?:emptyset|varnothing)|∅|\\\{\s*\\\}|(?:the )?empty set|no (?:real )?solutions?(?: exists?)?"
    r"|there (?:is|are) no (?:real )?solutions?",
    re.IGNORECASE,
)
_EXCEPT = re.compile(
    r"\s(?:except(?: for)?|other than|excluding|but not|without)\s"
    r"(?:x\s*=\s*)?|\\(?:setminus|smallsetminus|backslash)(?![A-Za-z])"
)
_BUILDER = re.compile(
    r"\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?\s*)?"
    r"(?:\\mid|\||:|\\colon|\\text\{\s*(?:such that|:)\s*\})\s*(.+)",
    re.DOTALL,
)
_NAME = re.compile(r"[A-Za-z]|\\(?!infty|pi)[a-z]+")
_MARKED = re.compile(
    r"\\(?:cup|cap|setminus|smallsetminus|backslash|infty|neq|leq|geq|emptyset|varnothing|mathbb|mid)(?![A-Za-z])"
    r"|[<>∅ℝ]|\\\{|\breal|\bempty\b|no (?:real )?solution"
    r"|\[[^\[\]()]*\)|\([^\[\]()]*\]"
)


class _Piece(NamedTuple):
    """An interval; one point if both ends are the same."""

    low: Fraction | None
    """None: minus infinity."""
    high: Fraction | None
    """None: infinity."""
    has_low: bool
    has_high: bool


Set = tuple[_Piece, ...]
ALL = (_Piece(None, None, has_low=False, has_high=False),)


def same_sets(truth: str, answer: str) -> bool:
    """Return whether two `normal` texts are the same set, if at least one of them is written as a set."""
    if not (_MARKED.search(truth) or _MARKED.search(answer)):
        return False
    wanted = read_set(truth)
    return wanted is not None and read_set(answer) == wanted


def read_set(text: str, depth: int = 0) -> Set | None:
    text = named_value(text)[1].strip().rstrip(".") if "\\in" in text else text.strip().rstrip(".")
    if not text or depth > DEPTH_LIMIT:
        return None
    plain = re.sub(r"\s+", " ", unwrapped(text)).strip()
    if _EMPTY.fullmatch(plain) or _EMPTY.fullmatch(text):
        return ()
    if _REALS.fullmatch(plain) or _REALS.fullmatch(text):
        return ALL
    if len(parts := split(text, "\\cup", "\\text{ or }", " or ", "\\lor", "\\vee")) > 1:
        return _united([read_set(part, depth + 1) for part in parts])
    if len(parts := split(text, "\\cap")) > 1:
        pieces = [read_set(part, depth + 1) for part in parts]
        return None if None in pieces else _without(ALL, _united([_without(ALL, one or ()) for one in pieces]))
    whole = text if re.search(r"\\(?:small)?setminus|\\backslash", text) else plain
    if (gap := _EXCEPT.search(whole)) is not None and gap.start() > 0:
        taken = whole[gap.end() :].strip()
        if inside(taken, "\\{", "\\}") is None and read_set(taken, depth + 1) is None:
            taken = f"\\{{{taken.replace(' and ', ',')}\\}}"
        return _without(read_set(whole[: gap.start()], depth + 1), read_set(taken, depth + 1))
    if (within := inside(text, "\\{", "\\}")) is not None:
        if (builder := _BUILDER.fullmatch(within)) is not None:
            return read_set(builder[2], depth + 1)
        return _points(split(within, ",", ";"))
    return _interval(text) if (compared := _compared(text, depth)) is None else compared


def _interval(text: str) -> Set | None:
    for opening in "([":
        for closing in ")]":
            within = inside(text, opening, closing)
            if within is not None and len(ends := split(within, ",", ";")) == 2:
                return _between(ends[0], ends[1], opening == "[", closing == "]")
    return None


def _compared(text: str, depth: int) -> Set | None:
    r"""Read inequalities of one variable: `1 < x \leq 2`, `x \neq 2`, `x \neq 1, 3`."""
    clauses = split(text, ",", " and ", "\\land", "\\text{ and }")
    if len(clauses) > 1:
        if not all(re.search(r"[<>]|\\(?:leq|geq|neq)", clause) for clause in clauses):
            first, sign, rest = text.partition("\\neq")
            return (
                _without(ALL, _points(split(rest, ",", " and "))) if sign and _NAME.fullmatch(first.strip()) else None
            )
        read = [_compared(clause, depth + 1) for clause in clauses] if depth < DEPTH_LIMIT else [None]
        return None if None in read else _without(ALL, _united([_without(ALL, one or ()) for one in read]))
    pieces = [piece.strip() for piece in re.split(r"(\\leq(?![A-Za-z])|\\geq(?![A-Za-z])|\\neq(?![A-Za-z])|<|>)", text)]
    if len(pieces) not in {3, 5} or not all(pieces):
        return None
    names = [_NAME.fullmatch(piece) is not None and constant(piece) is None for piece in pieces[::2]]
    if sum(names) != 1 or (len(pieces) == 5 and not names[1]):
        return None
    signs = pieces[1::2]
    if signs == ["\\neq"]:
        return _without(ALL, _points([pieces[2 if names[0] else 0]]))
    if len({sign in {">", "\\geq"} for sign in signs}) > 1 or "\\neq" in signs:
        return None
    if signs[0] in {">", "\\geq"}:
        pieces.reverse()
        names.reverse()
    values, closed = pieces[::2], [sign in {"\\leq", "\\geq"} for sign in pieces[1::2]]
    if len(values) == 3:
        return _between(values[0], values[2], *closed)
    if names[0]:
        return _between("-\\infty", values[1], False, closed[0])
    return _between(values[0], "\\infty", closed[0], False)


def _between(low: str, high: str, has_low: bool, has_high: bool) -> Set | None:
    infinite = {"-\\infty": -1, "\\infty": 1, "+\\infty": 1}
    sides = [infinite.get(re.sub(r"\s+", "", end), 0) for end in (low, high)]
    values = [None if side else _value(end) for end, side in zip((low, high), sides, strict=True)]
    if (
        sides[0] > 0
        or sides[1] < 0
        or any(value is None and not side for value, side in zip(values, sides, strict=True))
    ):
        return None
    first, last = values
    if first is not None and last is not None and (first > last or (first == last and not (has_low and has_high))):
        return None  # it may be a point, written like an interval
    return (_Piece(first, last, has_low and first is not None, has_high and last is not None),)


def _points(texts: list[str]) -> Set | None:
    if len(texts) > PIECES_LIMIT:
        return None
    signed = [each.replace("\\pm", sign) for each in texts for sign in (("+", "-") if "\\pm" in each else ("",))]
    values = [_value(named_value(each.strip().removeprefix("+"))[1]) for each in signed]
    return _united([None if value is None else (_Piece(value, value, True, True),) for value in values])


def _value(text: str) -> Fraction | None:
    if (written := number(text)) is not None:
        return written.value
    value = constant(text)
    if value is None or not value:
        return value
    digits = DIGITS - len(str(abs(value.numerator) // value.denominator))
    return Fraction(round(value * 10**digits), 10**digits) if digits > 0 else value


def _united(sets: list[Set | None]) -> Set | None:
    pieces: list[_Piece] = []
    for each in sets:
        if each is None:
            return None
        pieces += each
    if len(pieces) > PIECES_LIMIT:
        return None
    pieces.sort(key=lambda one: (one.low is not None, one.low or 0, not one.has_low))
    merged: list[_Piece] = []
    for piece in pieces:
        if merged and _touch(merged[-1], piece):
            last = merged[-1]
            top = max(last, piece, key=lambda one: (one.high is None, one.high or 0, one.has_high))
            merged[-1] = last._replace(high=top.high, has_high=top.has_high)
        else:
            merged.append(piece)
    return tuple(merged)


def _touch(one: _Piece, other: _Piece) -> bool:
    if one.high is None or other.low is None or one.high > other.low:
        return True
    return one.high == other.low and (one.has_high or other.has_low)


def _without(whole: Set | None, taken: Set | None) -> Set | None:
    """Return a set without another one's members."""
    if whole is None or taken is None:
        return None
    left = list(whole)
    for hole in taken:
        rest: list[_Piece] = []
        for piece in left:
            before = piece._replace(high=hole.low, has_high=not hole.has_low) if hole.low is not None else None
            after = piece._replace(low=hole.high, has_low=not hole.has_high) if hole.high is not None else None
            rest += [_least(piece, before)] if before is not None else []
            rest += [_least(piece, after)] if after is not None else []
        left = [piece for piece in rest if _has_members(piece)]
    return _united([(piece,) for piece in left])


def _least(piece: _Piece, cut: _Piece) -> _Piece:
    """Return what two intervals have in common."""
    low = max(piece, cut, key=lambda one: (one.low is not None, one.low or 0, not one.has_low))
    high = min(piece, cut, key=lambda one: (one.high is None, one.high or 0, one.has_high))
    return _Piece(low.low, high.high, low.has_low, high.has_high)


def _has_members(piece: _Piece) -> bool:
    if piece.low is None or piece.high is None:
        return True
    return piece.low < piece.high or (piece.low == piece.high and piece.has_low and piece.has_high)
