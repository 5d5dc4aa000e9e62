"""Whether a mathematical answer is right: the functions that run in a grader process (`EvalPhase.grade`).

Choices, words, numbers, units, lists, tuples, intervals and matrices are compared here by their text; only single
expressions and relations reach `math-verify` and sympy, if their values are not too large, for `CPU_S`. What
`math-verify` alone gets wrong is in `tests/stages/answer_pairs.py`: `2x = 5` for 5, `silent` for `listen`, 1e-7 for
2e-7, 5 m for 5 cm. An answer that cannot be read is wrong; a ground truth that cannot be read is compared as text.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ...tasks.written_answers import (
    ROUNDED_DIGITS,
    THOUSANDS,
    Number,
    both_signs,
    boxed,
    choice,
    close,
    compact,
    inside,
    named_value,
    normal,
    number,
    quantity,
    spelled_out,
    split,
    unwrapped,
    words,
)
from .announced_answers import announced, boxes, hedged, without_markup
from .math_expressions import answer_limit, constant, errors_logged, extracted, read_expression, same_expressions
from .real_sets import inequality, is_name, read_set, same_sets

if TYPE_CHECKING:
    from collections.abc import Sequence

PRELOADED = ("math_verify", "latex2sympy2_extended.latex2sympy2")
TEXT_LIMIT = 4000
"""Most characters of an answer that are read, since no right answer has more; also most characters at the end of a
message in which an answer without a box is searched."""
PARTS_LIMIT = 64
DEPTH_LIMIT = 4
"""Most elements of a list, and most levels of nested lists, that are compared."""

ABOUT = 0.05
"""Largest difference between the sides of an approximation, as a share of the larger."""

_BASE = re.compile(r"([0-9A-Fa-f]+)_\{?(?:\\text\{)?(\d+)\}*")
_TEXT = re.compile(r"\\text\{[^{}\d]*[A-Za-z]{2}[^{}\d]*\}")
_ABOUT = ("\\approx", "\\simeq", "\\sim", "\\doteq", "\\cong")
_OTHER_RELATIONS = ("\\equiv", "\\to", "\\rightarrow", "\\mapsto", "\\Rightarrow", "\\implies", "\\iff", "\\propto")
_PROSE = re.compile(r"(?<![A-Za-z\\])(?!(?:and|sin|cos|tan|cot|sec|csc|log|exp|max|min|gcd|lcm|deg|mod)\b)[A-Za-z]{3,}")
_RELATIONS = ("=", "<", ">", "\\leq", "\\geq", "\\neq")
_FUNCTIONS = frozenset({"sqrt", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan", "mathbb", "emptyset", "binom"})


class _Structure(NamedTuple):
    kind: str
    """`list` (unordered), `set`, `tuple` (also intervals), `union`, `matrix`, `determinant` or `relation`."""
    parts: tuple[str, ...]
    shape: str = ""
    """The brackets of a tuple, the rows and columns of a matrix, the sign of a relation."""


def answer_of(message: str | None, last_text: str) -> str:
    r"""Return the answer to judge: the last box (see `boxes`) of the finish message or last text, else one of these."""
    for text in (message or "", last_text):
        if "\\boxed" in text or "\\fbox" in text:
            return f"\\boxed{{{(boxes(text) or boxed(text))[: TEXT_LIMIT + 1]}}}"
    return (message if message and message.strip() else last_text).strip()[-TEXT_LIMIT:]


def usable(ground_truth: str) -> bool:
    return bool(normal(boxed(ground_truth)[:TEXT_LIMIT]))


def right_answer(ground_truth: str, answer: str) -> bool:
    """Return whether an answer from `answer_of` equals the ground truth (LaTeX or plain)."""
    truth = normal(boxed(ground_truth)[:TEXT_LIMIT])
    in_box = "\\boxed" in answer or "\\fbox" in answer
    text = normal(boxed(answer)[: TEXT_LIMIT + 1] if in_box else answer.strip()[-TEXT_LIMIT:])
    if truth and compact(truth) == compact(text):
        return True
    with answer_limit():
        return same(_first_side(truth), _first_side(text if in_box else _one_reading(answer)))
    return False


def _one_reading(answer: str) -> str:
    """Return the answer in a text without a box: what it announces, or all of it, or what `math-verify` finds."""
    answer = answer.strip()[-TEXT_LIMIT:]
    if said := announced(answer):
        return normal(said)
    text = normal(without_markup(answer))
    if not _PROSE.search(unwrapped(text)) or read_set(text) is not None:
        return text
    found = extracted(answer)
    return "" if hedged(answer, found) else normal(found) or text


def _first_side(text: str) -> str:
    r"""Return the exact value of `\pi \approx 3.14`; nothing if the sides are not about equal: two guesses."""
    sides = split(text, *_ABOUT)
    if len(sides) < 2:
        return text
    first, *others = sides
    if is_name(first):
        first, *others = others
    values = [constant(named_value(each)[1]) for each in (first, *others)]
    known = [value for value in values if value is not None]
    if len(known) < len(values) or max(known) - min(known) > ABOUT * max(map(abs, known)):
        return ""
    return first


def same(truth: str, answer: str, depth: int = 0) -> bool:
    """Compare two `normal` texts."""
    if not truth or not answer or len(answer) > TEXT_LIMIT or depth > DEPTH_LIMIT:
        return False
    if compact(truth) == compact(answer) or compact(unwrapped(truth)) == compact(unwrapped(answer)):
        return True
    if same_sets(truth, answer):
        return True
    for decide in (_same_choice, _same_words, _same_in_base):
        if (decided := decide(truth, answer)) is not None:
            return decided
    truth, answer = _unnamed(both_signs(truth), both_signs(answer))
    for one in _readings(truth):
        for other in _readings(answer):
            if one is None and other is None:
                if _same_single(truth, answer, depth):
                    return True
            elif one is not None and other is not None and _same_structures(one, other, depth):
                return True
    return False


def readable(text: str, depth: int = 0) -> bool:
    """Return whether a `normal` text is one or several comparable expressions. Runs in `answer_limit`."""
    if (structure := _structure(text)) is not None:
        return depth < DEPTH_LIMIT and all(readable(part, depth + 1) for part in structure.parts[:PARTS_LIMIT])
    with errors_logged("reading a value"):
        return _same_words(text, "") is None and read_expression(quantity(named_value(text)[1]).text) is not None
    return False


def _same_choice(truth: str, answer: str) -> bool | None:
    """Compare letters of choices: `B`, `(B)`, `B.`, `(B) 12`; if the truth has a text, that text matches too."""
    if (wanted := choice(truth)) is None:
        return None
    if (given := choice(answer)) is not None:
        return given[0] == wanted[0]
    plain = unwrapped(answer).strip("(). ")
    return plain.upper() == wanted[0] if len(plain) == 1 else same(normal(wanted[1]), answer, DEPTH_LIMIT)


def _same_words(truth: str, answer: str) -> bool | None:
    """Compare words as text: sympy would read both `listen` and `silent` as the same product of six variables."""
    plain = unwrapped(truth)
    is_text = _TEXT.fullmatch(truth) or (truth.isalpha() and len(truth) > 1 and _TEXT.fullmatch(answer))
    named = [word for word in re.findall(r"(?<![A-Za-z\\])[A-Za-z]{4,}", plain) if word not in _FUNCTIONS]
    if is_text or (named and not re.search(r"[\d=<>]|\\(?:frac|sqrt|leq|geq|in)(?![A-Za-z])", plain)):
        return words(truth) == words(answer)
    return None


def _same_in_base(truth: str, answer: str) -> bool | None:
    """Compare numbers with a base, such as `1011_2`; the answer may omit the base, which the problem states."""
    if (wanted := _BASE.fullmatch(compact(truth))) is None or wanted[1].isalpha():
        return None
    given = _BASE.fullmatch(compact(answer))
    digits, base = (given[1], given[2]) if given else (compact(answer), wanted[2])
    return (digits.upper(), base) == (wanted[1].upper(), wanted[2])


def _readings(text: str) -> tuple[_Structure | None, ...]:
    """Return the structures that a text may be; None among them: one value. `100,200` may be that or a list."""
    structure = _structure(text)
    return (None, structure) if structure and THOUSANDS.fullmatch(quantity(text).text) else (structure,)


def _structure(text: str) -> _Structure | None:
    environment = r"\\begin\{([A-Za-z]*)(?:matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1(?:matrix|array)\}"
    if matrix := re.fullmatch(environment, text, re.DOTALL):
        rows = [split(row, "&") for row in re.split(r"\\\\(?:\[[^\]]*\])?", matrix[2]) if row.strip()]
        if not rows or any(len(row) != len(rows[0]) for row in rows):
            return None
        kind = "determinant" if matrix[1].startswith("v") else "matrix"
        return _Structure(kind, tuple(cell for row in rows for cell in row), f"{len(rows)}x{len(rows[0])}")
    if len(united := split(text, "\\cup")) > 1:
        return _Structure("union", tuple(united))
    for relation in _OTHER_RELATIONS:
        if len(sides := split(text, relation)) > 1:
            return _Structure("relation", tuple(sides), relation)
    if (ends := inequality(text)) is not None:
        low, high, has_low, has_high = ends
        return _Structure("tuple", (low, high), "(["[has_low] + ")]"[has_high])
    if len(parts := split(text, ",", ";", " and ", " or ", "\\lor", "\\vee")) > 1:
        return _Structure("list", tuple(parts))
    if (within := inside(text, "\\{", "\\}")) is not None:
        return _Structure("set", tuple(split(within, ",", ";")))
    for left, right in (("(", ")"), ("[", "]"), ("(", "]"), ("[", ")"), ("\\langle", "\\rangle")):
        within = inside(text, left, right)
        if within is not None and len(parts := split(within, ",", ";")) > 1:
            return _Structure("tuple", tuple(parts), "()" if left == "\\langle" else left + right)
    return None


def _same_structures(truth: _Structure, answer: _Structure, depth: int) -> bool:
    if len(truth.parts) != len(answer.parts) or len(truth.parts) > PARTS_LIMIT:
        return False
    match sorted((truth.kind, answer.kind)):
        case ["tuple", "tuple"] | ["matrix", "matrix"] | ["determinant", "determinant"] | ["relation", "relation"]:
            ordered = truth.shape == answer.shape
        case ["matrix", "tuple"]:
            ordered = {truth.shape, answer.shape} <= {"()", f"1x{len(truth.parts)}", f"{len(truth.parts)}x1"}
        case ["list", "tuple"]:
            ordered = "()" in {truth.shape, answer.shape}
        case ["list", "list" | "set" | "union"] | ["set", "set"] | ["union", "union"]:
            return _same_in_any_order(truth.parts, answer.parts, depth)
        case _:
            return False
    return ordered and all(same(*pair, depth + 1) for pair in zip(truth.parts, answer.parts, strict=True))


def _same_in_any_order(truths: Sequence[str], answers: Sequence[str], depth: int) -> bool:
    left = list(answers)
    for truth in truths:
        found = next((at for at, answer in enumerate(left) if same(truth, answer, depth + 1)), None)
        if found is None:
            return False
        del left[found]
    return True


def _unnamed(truth: str, answer: str) -> tuple[str, str]:
    """Remove the names of values (`x = 5`), unless the two texts name different things, or several."""
    parts = [[named_value(part) for part in split(text, ",", ";", " and ", " or ")] for text in (truth, answer)]
    first, second = ({compact(unwrapped(name)).casefold() for name, _ in side} for side in parts)
    if any(not name and split(value, "=")[1:] for side in parts for name, value in side):
        return truth, answer
    if "" not in first | second and (first != second or len(first) > 1):
        return spelled_out(truth), spelled_out(answer)
    values = [", ".join(value for _, value in side) for side in parts]
    return values[0] if any(first) else truth, values[1] if any(second) else answer


def _same_single(truth: str, answer: str, depth: int) -> bool:
    truth_sides, answer_sides = split(truth, *_RELATIONS), split(answer, *_RELATIONS)
    if len(truth_sides) > 1 or (len(answer_sides) > 1 and split(answer, *_RELATIONS[1:])[1:]):
        return same_expressions(truth, answer)
    if len(answer_sides) > 1:
        # An identity such as 10/2 = 5, all of whose sides must be right; an equation such as 2x = 5 does not state 5.
        return len(answer_sides) <= PARTS_LIMIT and all(same(truth, side, depth + 1) for side in answer_sides)
    wanted, given = quantity(truth), quantity(answer)
    if wanted.unit and given.unit and wanted.unit != given.unit:
        return False
    if {wanted.unit, given.unit} == {"deg", ""} and ("\\pi" in wanted.text) != ("\\pi" in given.text):
        degrees, radians = (wanted, given) if wanted.unit else (given, wanted)
        return same_expressions(f"({degrees.text}) \\cdot \\frac{{\\pi}}{{180}}", radians.text)
    first, second = number(wanted.text), number(given.text)
    if first is not None and second is not None:
        return _same_numbers(first, second, wanted.percent, given.percent)
    if wanted.percent != given.percent:
        return False
    rounded, other = (second, wanted.text) if first is None else (first, given.text)
    if rounded is not None and rounded.significant >= ROUNDED_DIGITS:
        value = constant(other)
        return value is not None and close(rounded, Number(value))
    return same_expressions(wanted.text, given.text)


def _same_numbers(truth: Number, answer: Number, truth_percent: bool, answer_percent: bool) -> bool:
    if truth_percent == answer_percent:
        return close(truth, answer)
    share, percent = (answer, truth) if truth_percent else (truth, answer)
    if close(share, percent._replace(value=percent.value / 100, last_place=percent.last_place / 100)):
        return True
    # 50 and 50 % are the same, since no share is over 1; 0.5 and 0.5 % are not.
    return abs(share.value) > 1 and close(share, percent)
