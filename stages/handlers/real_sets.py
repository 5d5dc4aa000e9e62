r"""Sets of real numbers in answers, parsed to sympy's sets, which are equal if their members are.

`[0, 1) \cup (1, 2]`, `\mathbb{R} \setminus \{2\}`, `x \neq 2`, `x < 1 \text{ or } x > 3`, `\emptyset`, `\{1, 1, 2\}`.
Ends are evaluated to `DIGITS` digits: `\sqrt{8}` and `2\sqrt{2}` are one end. A set with letters gives None. Sympy is
imported lazily: it takes a second, and stage processes import this module.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

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
_NAME = re.compile(r"(?:[A-Za-z]|\\(?!infty|pi|text)[A-Za-z]+|\\text\{[^{}]*\})(?:_\{?\w+\}?)?")
_MARKED = re.compile(
    r"\\(?:cup|cap|setminus|smallsetminus|backslash|infty|neq|leq|geq|emptyset|varnothing|mathbb|mid)(?![A-Za-z])"
    r"|[<>∅ℝ]|\\\{|\breal|\bempty\b|no (?:real )?solution"
    r"|\[[^\[\]()]*\)|\([^\[\]()]*\]"
)


def same_sets(truth: str, answer: str) -> bool:
    """Return whether two `normal` texts are the same set, if at least one of them is written as a set."""
    if not (_MARKED.search(truth) or _MARKED.search(answer)):
        return False
    wanted = read_set(truth)
    return wanted is not None and read_set(answer) == wanted


def read_set(text: str, depth: int = 0) -> Any:
    """Parse a `normal` text to a sympy set; None: it is none. Runs in `answer_limit`."""
    import sympy

    reals = sympy.S.Reals
    text = named_value(text)[1].strip().rstrip(".") if "\\in" in text else text.strip().rstrip(".")
    if not text or depth > DEPTH_LIMIT:
        return None
    plain = re.sub(r"\s+", " ", unwrapped(text)).strip()
    if _EMPTY.fullmatch(plain) or _EMPTY.fullmatch(text):
        return sympy.S.EmptySet
    if _REALS.fullmatch(plain) or _REALS.fullmatch(text):
        return reals
    if len(parts := split(text, "\\cup", "\\text{ or }", " or ", "\\lor", "\\vee")) > 1:
        return _joined(sympy.Union, [read_set(part, depth + 1) for part in parts[: PIECES_LIMIT + 1]])
    if len(parts := split(text, "\\cap")) > 1:
        return _joined(sympy.Intersection, [read_set(part, depth + 1) for part in parts[: PIECES_LIMIT + 1]])
    whole = text if re.search(r"\\(?:small)?setminus|\\backslash", text) else plain
    if (gap := _EXCEPT.search(whole)) is not None and gap.start() > 0:
        taken = whole[gap.end() :].strip()
        if inside(taken, "\\{", "\\}") is None and read_set(taken, depth + 1) is None:
            taken = f"\\{{{taken.replace(' and ', ',')}\\}}"
        return _joined(sympy.Complement, [read_set(whole[: gap.start()], depth + 1), read_set(taken, depth + 1)])
    if (within := inside(text, "\\{", "\\}")) is not None:
        if (builder := _BUILDER.fullmatch(within)) is not None:
            return read_set(builder[2], depth + 1)
        return _points(split(within, ",", ";"))
    return _interval(text) if (compared := _compared(text, depth)) is None else compared


def _interval(text: str) -> Any:
    for opening in "([":
        for closing in ")]":
            within = inside(text, opening, closing)
            if within is not None and len(ends := split(within, ",", ";")) == 2:
                return _between(ends[0], ends[1], opening == "[", closing == "]")
    return None


def _compared(text: str, depth: int) -> Any:
    r"""Parse inequalities of one variable: `1 < x \leq 2`, `x \neq 2`, `x \neq 1, 3`."""
    import sympy

    clauses = split(text, ",", " and ", "\\land", "\\text{ and }")
    if len(clauses) > 1:
        if not all(re.search(r"[<>]|\\(?:leq|geq|neq)", clause) for clause in clauses):
            first, sign, rest = text.partition("\\neq")
            return _but(split(rest, ",", " and ")) if sign and _NAME.fullmatch(first.strip()) else None
        if depth >= DEPTH_LIMIT:
            return None
        return _joined(sympy.Intersection, [_compared(clause, depth + 1) for clause in clauses[: PIECES_LIMIT + 1]])
    sides = split(text, "\\neq")
    if len(sides) == 2 and is_name(sides[0]) != is_name(sides[1]):
        return _but([sides[is_name(sides[0])]])
    return None if (ends := inequality(text)) is None else _between(*ends)


def inequality(text: str) -> tuple[str, str, bool, bool] | None:
    r"""Return the ends that an inequality gives one variable, and whether they belong to it: `1 < x \leq 2`."""
    pieces = [piece.strip() for piece in re.split(r"(\\leq(?![A-Za-z])|\\geq(?![A-Za-z])|<|>)", text)]
    if len(pieces) not in {3, 5} or not all(pieces) or len(split(text, ",", " or ", " and ")) > 1:
        return None
    downward = {sign in {">", "\\geq"} for sign in pieces[1::2]}
    if len(downward) > 1:
        return None
    if downward == {True}:
        pieces.reverse()
    values, closed = pieces[::2], [sign in {"\\leq", "\\geq"} for sign in pieces[1::2]]
    match [is_name(value) for value in values]:
        case [True, False]:
            return "-\\infty", values[1], False, closed[0]
        case [False, True]:
            return values[0], "\\infty", closed[0], False
        case [_, True, _]:
            return values[0], values[2], closed[0], closed[1]
    return None


def is_name(text: str) -> bool:
    r"""Return whether a text names a variable or a quantity; `e` and `\pi` are numbers."""
    return _NAME.fullmatch(text) is not None and constant(text) is None


def _between(low: str, high: str, has_low: bool, has_high: bool) -> Any:
    import sympy

    infinite = {"-\\infty": -sympy.oo, "\\infty": sympy.oo, "+\\infty": sympy.oo}
    first, last = (infinite.get(re.sub(r"\s+", "", end)) or _value(end) for end in (low, high))
    if first is None or last is None or first == sympy.oo or last == -sympy.oo:
        return None
    if first > last or (first == last and not (has_low and has_high)):
        return None  # it may be a point, written like an interval
    return sympy.Interval(first, last, not has_low, not has_high)


def _points(texts: list[str]) -> Any:
    import sympy

    if len(texts) > PIECES_LIMIT:
        return None
    signed = [each.replace("\\pm", sign) for each in texts for sign in (("+", "-") if "\\pm" in each else ("",))]
    values = [_value(named_value(each.strip().removeprefix("+"))[1]) for each in signed]
    return None if None in values else sympy.FiniteSet(*values)


def _but(points: list[str]) -> Any:
    """Return the real numbers without these points."""
    import sympy

    return _joined(sympy.Complement, [sympy.S.Reals, _points(points)])


def _joined(by: Any, sets: list[Any]) -> Any:
    return None if None in sets or len(sets) > PIECES_LIMIT else by(*sets)


def _value(text: str) -> Any:
    """Parse a real number to a sympy fraction; None: it is none."""
    import sympy

    if (written := number(text)) is not None:
        return sympy.Rational(written.value)
    value = constant(text)
    if value is None:
        return None
    digits = DIGITS - len(str(abs(value.numerator) // value.denominator)) if value else 0
    return sympy.Rational(Fraction(round(value * 10**digits), 10**digits) if digits > 0 else value)
