"""Whether an answer to a science question is right, as far as rules can tell; runs in a grader process.

Numbers are compared with their units, which `pint` converts, within a tolerance; choices by letter or text; expressions
as in the `math` task. Words go to a judge, unless they are equal. An answer that cannot be parsed as the ground truth's
kind is wrong.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ...tasks.written_answers import boxed, compact, named_value, normal, number, split, unwrapped, words
from .announced_answers import announced, without_markup
from .choice_answers import of_truth, picked
from .math_answers import TEXT_LIMIT, readable, right_answer
from .math_expressions import answer_limit, constant, errors_logged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...tasks.written_answers import Number

PRELOADED = ("math_verify", "latex2sympy2_extended.latex2sympy2", "pint")
Verdict = Literal["right", "wrong", "undecided"]
CPU_S = 1.2
RULED_LIMIT = 200
"""Longest ground truth that rules compare; a longer one is an explanation."""
UNIT_LIMIT = 60
COUNT_LIMIT = 1000
"""Whole numbers without a unit below this are counts, and have no tolerance."""

_VALUE = re.compile(
    r"[+-]?\s*(?:\d{1,3}(?:(?:,|\{,\}|\s)\d{3})+(?:\.\d+)?(?!\d)|\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+(?![A-Za-z\d]))?"
    r"(?:\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{\s*[+-]?\d+\s*\}|[+-]?\d+))?"
)
_POWER = re.compile(r"[+-]?\s*10\s*\^\s*(?:\{\s*[+-]?\d+\s*\}|[+-]?\d+)")
_RATIO = re.compile(r"[+-]?\s*(?:\d+\s*)?(?:\\frac\s*\{\s*[\d.]+\s*\}\s*\{\s*[\d.]+\s*\}|[\d.]+\s*/\s*[\d.]+)")
_ABOUT = re.compile(
    r"(?:(?:about|approximately|approx\.?|roughly|around|ca\.?|circa)\s+|\\(?:approx|simeq|sim)\s*)+", re.IGNORECASE
)
_PROSE = re.compile(r"\s(?:in|at|the|is|and|of|for|when|as|to|on|by|from|with|so|if|or|a|which|after)\b")
"""Matches where a unit ends in a sentence; an `in` of inches ends it, too."""
_COUNTED = re.compile(r"\\text\{[^{}\d]*\}|[A-Za-z]{3,}(?: [A-Za-z]+){0,2}")
_UNCERTAINTY = re.compile(r"\s*\\pm\s*\d+\.?\d*")
_UNIT_REWRITES = (
    (r"\^\s*\{?\s*\\circ\s*\}?\s*(?:\\text\{\s*([CF])\s*\}|([CF])(?![A-Za-z]))", r" deg\1\2 "),
    (r"\^\s*\{?\s*\\circ\s*\}?", " deg "),
    (r"\\mu(?![A-Za-z])\s*|[µμ]", "u"),
    (r"\\Omega(?![A-Za-z])|[ΩΩ]", "ohm"),
    (r"\\AA(?![A-Za-z])|[ÅÅ]", "angstrom"),
    (r"\\?%", " percent "),
    (r"\\frac\s*\{((?:[^{}]|\{[^{}]*\})*)\}\s*\{((?:[^{}]|\{[^{}]*\})*)\}", r"(\1)/(\2)"),
    (r"\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|([+-]?\d+))", r"^\1\2"),
    (r"\\text\{([^{}]*)\}", r" \1 "),
    (r"(?<![A-Za-z])u\s+(?=[A-Za-z])", "u"),
    (r"\s+\^", "^"),
    (r"\\(?:cdot|times)(?![A-Za-z])|[·•*⋅]", " "),
    (r"\bper\b", "/"),
    (r"(?<![A-Za-z])(k?J)(K|mol)(?![A-Za-z])", r"\1 \2"),
    (r"\bsquare\s+([a-z]+)", r"\1^2"),
    (r"\bcubic\s+([a-z]+)", r"\1^3"),
    (r"([A-Za-z]+)\s+squared", r"\1^2"),
    (r"([A-Za-z])([+-]?\d)", r"\1^\2"),
    (r"[{}\\]", " "),
)
"""From LaTeX to what pint reads, in this order: symbols; fractions, exponents and words of LaTeX; prefixes, products
and exponents in words; digits behind a unit's name; what is left of LaTeX."""
_UNIT = re.compile(r"[A-Za-z_]+(?:\^[+-]?\d{1,2})?|[/()]|\s+")
_ALIASES = {
    "ev": "eV", "kev": "keV", "mev": "MeV", "gev": "GeV", "AU": "astronomical_unit", "Kg": "kg", "KG": "kg", "KJ": "kJ",
    "Kj": "kJ", "Km": "km", "KHz": "kHz", "secs": "s", "hrs": "hour", "cc": "cm**3", "kph": "kilometer_per_hour",
    "molar": "molar", "celsius": "degC", "Celsius": "degC", "Fahrenheit": "degF", "amps": "ampere", "lbs": "pound",
    "lbf": "force_pound", "Cal": "kilocalorie",
}  # fmt: skip


class Reading(NamedTuple):
    """A value with its unit, as written."""

    value: float
    written: Number | None
    """None: the value is that of an expression."""
    unit: str = ""


def judged_by_rules(kind: str, ground_truth: str, answer: str, choices: list[str], tolerance: float) -> Verdict:
    _registry()  # takes longer than the limit
    with answer_limit(CPU_S):
        return _verdict(kind, ground_truth, answer, choices, tolerance)
    return "wrong"


def _verdict(kind: str, ground_truth: str, answer: str, choices: Sequence[str], tolerance: float) -> Verdict:
    truth = normal(boxed(ground_truth)[: TEXT_LIMIT + 1])
    given = normal(boxed(answer)[-TEXT_LIMIT:])
    if not given:
        return "wrong"
    kind = kind_of(truth, choices) if kind == "auto" else kind
    if kind == "choice":
        return _said(_same_choice(truth, answer, choices))
    if compact(truth) == compact(given) or (kind == "text" and words(truth) == words(given)):
        return "right"
    match kind:
        case "number":
            return _same_number(ground_truth, truth, given, answer, tolerance)
        case "expression":
            return _said(right_answer(ground_truth, answer))
        case _:
            return "undecided"


def kind_of(truth: str, choices: Sequence[str]) -> str:
    if choices or re.fullmatch(r"\(?[A-J]\)?[.:]?", unwrapped(truth)):
        return "choice"
    if len(truth) > RULED_LIMIT:
        return "text"
    if read(truth) is not None:
        return "number"
    return "expression" if readable(truth) else "text"


def _said(right: bool) -> Verdict:
    return "right" if right else "wrong"


def _same_choice(truth: str, answer: str, choices: Sequence[str]) -> bool:
    wanted = of_truth(truth, choices)
    return bool(wanted) and picked(answer, choices) == wanted


def _same_number(ground_truth: str, truth: str, given: str, answer: str, tolerance: float) -> Verdict:
    wanted, got = read(truth), read(given)
    if got is None and "\\boxed" not in answer:
        said = announced(answer[-TEXT_LIMIT:])
        got = read(normal(said)) if said else None
        got = got or _last_value(normal(without_markup(answer[-TEXT_LIMIT:])))
    if wanted is None or got is None:
        return _said(right_answer(ground_truth, answer))
    if not wanted.unit or not got.unit:
        return _said(_same_without_unit(wanted, got, tolerance))
    ours, theirs = unit_of(wanted.unit), unit_of(got.unit)
    if ours is None or theirs is None:
        # Such as 5 photons: a judge decides on the noun, if the number is right.
        same = words(wanted.unit).rstrip("s") == words(got.unit).rstrip("s")
        return "wrong" if not _close(wanted, got, tolerance) else "right" if same else "undecided"
    if str(ours) == "degree_Celsius" and unwrapped(got.unit) == "C":
        theirs = ours  # not a coulomb
    if ours == theirs:
        return _said(_close(wanted, got, tolerance))
    return _said(_close_converted(wanted, got, ours, theirs, tolerance))


def _last_value(text: str) -> Reading | None:
    """Return the last value of a message, such as 3.0 m/s of `So the speed is 3.0 m/s in the end`."""
    values = list(_VALUE.finditer(text))
    parts = _PROSE.split(text[values[-1].start() :], maxsplit=1)[0].split(" ") if values else []
    beginnings = (" ".join(parts[:end]).rstrip(".,;:!") for end in range(min(len(parts), 6), 0, -1))
    return next((reading for each in beginnings if (reading := read(each)) is not None), None)


def _same_without_unit(wanted: Reading, got: Reading, tolerance: float) -> bool:
    """Compare values of which one lacks the unit, which the problem may state."""
    percents = ["percent" in (_pint_text(each.unit) or "") for each in (wanted, got)]
    if percents[0] != percents[1]:
        share, percent = (got, wanted) if percents[0] else (wanted, got)
        as_share = percent.value / 100
        if _near(wanted.value, got.value * (100 if percents[0] else 0.01), tolerance):
            return True
        if abs(share.value) <= 1 and as_share != share.value:
            return False  # 0.5 is not 0.5 %, though 50 may be short for 50 %
    return _close(wanted, got, tolerance)


def _close(wanted: Reading, got: Reading, tolerance: float) -> bool:
    ours, theirs = wanted.written, got.written
    counted = ours and theirs and not (ours.significant or theirs.significant or wanted.unit)
    if counted and abs(wanted.value) < COUNT_LIMIT and wanted.value.is_integer() and got.value.is_integer():
        return wanted.value == got.value
    return _near(wanted.value, got.value, tolerance) or _rounds_to(wanted, got.value)


def _near(wanted: float, got: float, tolerance: float) -> bool:
    return math.isfinite(got) and abs(wanted - got) <= max(tolerance, 1e-12) * abs(wanted)


def _rounds_to(wanted: Reading, got: float) -> bool:
    """Return whether the truth is a value rounded to the truth's digits: 0.13 for 0.1347."""
    if wanted.written is None or wanted.written.significant < 2:
        return False
    return abs(got - wanted.value) <= float(wanted.written.last_place) / 2 * (1 + 1e-9)


def _close_converted(wanted: Reading, got: Reading, ours: Any, theirs: Any, tolerance: float) -> bool:
    with errors_logged("converting a unit"):  # such as one of another kind
        value = float(_registry().Quantity(got.value, theirs).to(ours).magnitude)
        return _near(wanted.value, value, tolerance) or _rounds_to(wanted, value)
    return False


def read(text: str) -> Reading | None:
    r"""Parse a `normal` text as a value with or without a unit: `v = 3 \times 10^{8} \text{ m/s}`; None: it is none."""
    text = named_value(text)[1]
    if about := _ABOUT.match(text):
        text = text[about.end() :]
    if text.count("\\pm") == 1 and not text.startswith("\\pm"):
        text = _UNCERTAINTY.sub("", text)
    if len(text) > RULED_LIMIT:
        return None
    for pattern in (_RATIO, _POWER, _VALUE):
        match = pattern.match(text)
        if match is None or (written := number(match[0])) is None:
            continue
        unit = text[match.end() :].strip()
        if unit and unit_of(unit) is None and not _COUNTED.fullmatch(unit):
            continue
        return _finite(written, unit)
    value, separator, unit = text.partition("\\text{")
    if split(text, ",", ";", " and ", " or ")[1:] or (separator and unit_of(separator + unit) is None):
        return None
    worked_out = constant(value)
    return None if worked_out is None else _finite(None, separator + unit, worked_out)


def _finite(written: Number | None, unit: str, value: Any = None) -> Reading | None:
    try:
        return Reading(float(value if written is None else written.value), written, unit)
    except OverflowError:
        return None


@lru_cache(maxsize=512)
def unit_of(text: str) -> Any:
    r"""Return pint's unit for a plain or LaTeX spelling: `m/s^2`, `\text{J K}^{-1}`; None: it is none."""
    written = _pint_text(text)
    if not written:
        return None
    with errors_logged("reading a unit"):  # pint asserts, too
        return _registry().parse_units(written)
    return None


@lru_cache(maxsize=512)
def _pint_text(text: str) -> str | None:
    """Rewrite a unit for pint; None: it cannot be a unit."""
    if len(text) > 2 * UNIT_LIMIT:
        return None
    for pattern, to in _UNIT_REWRITES:
        text = re.sub(pattern, to, text)
    text = re.sub(r"\s+", " ", text).strip(" .,")
    if not text or len(text) > UNIT_LIMIT or "".join(_UNIT.findall(text)) != text or text.count("(") != text.count(")"):
        return None
    text = re.sub(r"[A-Za-z_]+", lambda word: _known(word[0]), text)
    return re.sub(r"\s*([/()])\s*", r"\1", text.replace("^", "**")).replace(")(", ")*(")


def _known(word: str) -> str:
    if word in _ALIASES:
        return _ALIASES[word]
    registry = _registry()
    return word.lower() if len(word) > 3 and word not in registry and word.lower() in registry else word


@lru_cache(maxsize=1)
def _registry() -> Any:
    import pint

    return pint.UnitRegistry()
