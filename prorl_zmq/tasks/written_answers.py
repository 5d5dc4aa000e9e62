"""Parse answers as the field writes them: boxes, LaTeX spellings, numbers, units, choices, named values.

Text in, text out, without sympy. Row formats extract answers from solutions with it, and graders compare simple answers
(`stages/handlers/math_answers.py`, `stem_answers.py`).
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

ROUNDED_DIGITS = 6
"""A decimal fraction with at least so many significant digits stands for all values that round to it."""
FLOAT_DIGITS, FLOAT_ERROR = 15, Fraction(1, 10**12)
"""A decimal fraction with so many digits comes from floats, and errs by so much of it at most."""
UNIT_LIMIT = 40
"""Most characters of a unit."""
NUMBER_LIMIT = 1000
"""Most digits of a number, and largest power of ten that is written with it."""

_SYMBOLS = {
    "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "÷": "/", "⁄": "/", "√": "\\sqrt", "∞": "\\infty ",
    "≤": "\\leq ", "≥": "\\geq ", "≠": "\\neq ", "±": "\\pm ", "∓": "\\mp ", "∪": "\\cup ", "∈": "\\in ",
    "π": "\\pi ", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "⟨": "\\langle ", "⟩": "\\rangle ",
    "≈": "\\approx ", "≃": "\\simeq ", "≅": "\\cong ", "≡": "\\equiv ", "→": "\\to ", "⇒": "\\Rightarrow ",
    "∼": "\\sim ", "ℝ": "\\mathbb{R} ",
    "°": "^\\circ ", "²": "^2", "³": "^3", "\u2009": " ", "\u00a0": " ",
}  # fmt: skip
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_REWRITES = tuple(
    (re.compile(pattern), to)
    for pattern, to in (
        (r"(?<!\\)\$|(?<!\\)\\[()\[\]]", " "),
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\.?", ""),
        (r"(?<!\\),\\!\s*(?=\d{3})", ","),
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\[,;:> ]|\\(?:q?quad|displaystyle|limits|thinspace)(?![A-Za-z])|~", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\le(?:qslant)?(?![A-Za-z])|<=", r"\\leq "),
        (r"\\ge(?:qslant)?(?![A-Za-z])|>=", r"\\geq "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r":=", "="),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\ne(?![A-Za-z])|!=", r"\\neq "),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\degrees?(?![A-Za-z])", r"^\\circ "),
        (r"\{\\(?:rm|bf|it)\s+([^{}]*)\}", r"\\text{\1}"),
        (r"\\(?:text[a-z]*|math(?:rm|bf|it|sf)|[mh]box|operatorname\*?|boldsymbol|bm|emph)\s*\{", r"\\text{"),
        (r"\\text\{\s*(and|or|,)\s*\}|\b(and|or)\b", r" \1\2 "),
        *(
            (rf"(?<=\d)\s*\\text\{{\s*{name}\b\s*", rf" \\times 10^{{{power}}} \\text{{")
            for name, power in _SCALES.items()
        ),
        *((rf"(?<=\d)[\s-]*{name}\b", rf" \\times 10^{{{power}}} ") for name, power in _SCALES.items()),
        (r"\\text\{\s*\}", " "),
        (r"\*\*", "^"),
        (r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
        (r"(?<![\\A-Za-z])(pi|sin|cos|tan|log|ln|exp)(?![A-Za-z])", r"\\\1 "),
        (r"(\^|_)\s*(\d{2,})", r"\1{\2}"),
        (r"\s+", " "),
    )
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_BRACKETS = {"(": 1, "[": 1, "{": 1, "\\{": 1, "\\langle": 1, "\\begin": 1, "\\end": -1} | dict.fromkeys(
    (")", "]", "}", "\\}", "\\rangle"), -1
)
_DECIMAL = r"(?:\d+\.?\d*|\.\d+)"
THOUSANDS = re.compile(r"[+-]?\s*\d{1,3}(?:(?:,|\{,\}|\s)\d{3})+(?:\.\d+)?")
_NUMBER = re.compile(
    rf"([+-]?)\s*({_DECIMAL})(?:[eE]([+-]?\d+)|\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{{?\s*([+-]?\d+)\s*\}}?)?"
)
_POWER_OF_TEN = re.compile(r"([+-]?)\s*10\s*\^\s*\{?\s*([+-]?\d+)\s*\}?")
_FRACTION = re.compile(
    rf"([+-]?)\s*(\d+)?\s*\\frac\s*(?:\{{\s*([+-]?{_DECIMAL})\s*\}}|(\d))\s*(?:\{{\s*([+-]?{_DECIMAL})\s*\}}|(\d))"
)
_SLASHED = re.compile(rf"([+-]?)\s*(?:(\d+)\s+)?([+-]?{_DECIMAL})()\s*/\s*([+-]?{_DECIMAL})()")
_REPEATING = re.compile(r"([+-]?)\s*(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")

_CHOICE = re.compile(r"(?:\(([A-J])\)|([A-J])(?=[.:)]|$))[.:)]?\s*(.*)", re.DOTALL)
_PERCENT = re.compile(r"(.*?)\s*(?:\\?%|\\text\{\s*(?:percent|\\?%)\s*\}|percent)", re.DOTALL)
_UNIT = re.compile(
    r"(.*?[\w)}\]])\s*"
    r"((?:\\text\{[^{}]*\}|(?<=[\d ])(?<!\\)[A-Za-z]{2,}\.?(?: [A-Za-z]+\.?)*|\^\s*\{?\\circ\s*\}?\s*[A-Z]?)"
    r"(?:\s*\^\s*\{?[23]\}?)?)",
    re.DOTALL,
)
_UNIT_NAMES = {
    alias: name
    for name, aliases in {
        "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre", "mm": "millimeter millimetre",
        "in": "inch inche", "ft": "foot feet", "deg": "degree", "usd": "dollar", "s": "second sec", "min": "minute",
        "h": "hour hr", "g": "gram", "kg": "kilogram", "l": "liter litre", "": "unit squareunit sq.unit cubicunit",
    }.items()
    for alias in aliases.split()
}  # fmt: skip


class Number(NamedTuple):
    """A number as it was written."""

    value: Fraction
    significant: int = 0
    """Significant digits of a decimal fraction; 0: it is exact."""
    last_place: Fraction = Fraction(0)
    """What one more in its last digit would add."""


class Quantity(NamedTuple):
    """A value, and what stood around it."""

    text: str
    unit: str = ""
    percent: bool = False


def boxed(text: str) -> str:
    r"""Return what is in a text's last `\boxed{}`: nothing if that has no end; the text itself if it has no box."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return text
    opening = re.compile(r"\\[a-z]+\s*\{").match(text, start)
    if opening is None:
        bare = re.compile(r"\\[a-z]+\s+([^\s$\\{}]+?)[.,;]?(?:[\s$]|\Z)").match(text, start)
        return bare[1] if bare is not None else ""
    depth = 1
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, opening.end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return text[opening.end() : brace.start()]
    return ""


def normal(text: str) -> str:
    r"""Write a text in one way: `\frac` for `\dfrac`, `\text` for all its kin, no `\left`, no dollars, one space."""
    text = re.sub(r"(?<=\d)([¼-¾⅐-⅞])", r" \1", text)
    text = re.sub(r"[⁺⁻]?[⁰¹²³⁴-⁹]+", lambda digits: _raised(digits[0].translate(_RAISED)), text)
    for symbol, to in _SYMBOLS.items():
        text = text.replace(symbol, to)
    text = unicodedata.normalize("NFKC", text).replace("⁄", "/").strip().strip("`")
    if len(text) > 4 and text.startswith("**") and text.endswith("**"):
        text = text[2:-2]
    for pattern, to in _REWRITES:
        text = pattern.sub(to, text)
    return re.sub(r"[\s.,;:]+$", "", re.sub(r"(?<!\\)\\$", "", text.strip()))


def _raised(digits: str) -> str:
    return f"^{digits}" if len(digits) == 1 else f"^{{{digits}}}"


def compact(text: str) -> str:
    """Remove what never matters: spaces, except between digits, and braces around one character."""
    return re.sub(r"(?<!\\)\{(\w)\}", r"\1", re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text))


def unwrapped(text: str) -> str:
    r"""Return a normal text without `\text`."""
    return re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).strip()


def words(text: str) -> str:
    """Return a normal text's words, in lower case, without articles."""
    plain = re.sub(r"[^\w+-]", " ", unwrapped(text).casefold())
    return " ".join(word for word in plain.split() if word not in {"the", "a", "an"})


def split(text: str, *separators: str) -> list[str]:
    """Split where no bracket is open; what is empty is left out."""
    pattern = "|".join(re.escape(each) + r"(?![A-Za-z])" * each.startswith("\\") for each in separators)
    parts, depth, start = [], 0, 0
    for token in re.finditer(rf"{pattern}|\\(?:begin|end|langle|rangle)(?![A-Za-z])|\\[{{}}]|[()\[\]{{}}]", text):
        if step := _BRACKETS.get(token[0]):
            depth += step
        elif depth == 0:
            parts.append(text[start : token.start()])
            start = token.end()
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def inside(text: str, left: str, right: str) -> str | None:
    """Return what is between a text's first and last bracket, if they belong together."""
    if not text.startswith(left) or not text.endswith(right) or len(text) < len(left) + len(right):
        return None
    depth, end = 0, len(text) - len(right)
    for token in re.finditer(r"\\(?:begin|end|langle|rangle)(?![A-Za-z])|\\[{}]|[()\[\]{}]", text):
        depth += _BRACKETS[token[0]]
        if depth <= 0 and token.start() < end:
            return None
    return text[len(left) : end].strip() if depth == 0 else None


def close(one: Number, other: Number) -> bool:
    """Return whether two numbers are equal, but for what rounding and floats make of the digits that were written."""
    difference = abs(one.value - other.value)
    rough, fine = (one, other) if one.last_place >= other.last_place else (other, one)
    from_floats = max(one.significant, other.significant) >= FLOAT_DIGITS
    if difference == 0 or (from_floats and difference <= FLOAT_ERROR * abs(fine.value)):
        return True
    if rough.significant < ROUNDED_DIGITS:
        return False
    cut = difference < rough.last_place and abs(rough.value) < abs(fine.value)
    return cut or difference <= rough.last_place / 2


def number(text: str) -> Number | None:
    r"""Read a number: `1,000`, `-.5`, `3e8`, `3 \times 10^{8}`, `\frac{1}{2}`, `1 1/2`, `0.\overline{3}`."""
    text = text.strip()
    if len(text) > NUMBER_LIMIT:
        return None
    while (within := inside(text, "(", ")") or inside(text, "{", "}")) is not None:
        text = within
    if THOUSANDS.fullmatch(text):
        text = re.sub(r"(?<=\d)(?:\{,\}|,|\s)(?=\d)", "", text)
    if match := _NUMBER.fullmatch(text):
        sign, digits, *exponents = match.groups()
        power = next((each for each in exponents if each), "0")
        return _scaled(sign, digits, power, any(exponents))
    if match := _POWER_OF_TEN.fullmatch(text):
        return _scaled(match[1], "1", match[2], written=False)
    if match := _REPEATING.fullmatch(text):
        sign, whole, fixed, period = match.groups()
        value = Fraction(int((whole or "0") + fixed), 10 ** len(fixed))
        value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
        return Number(-value if sign == "-" else value)
    match = _FRACTION.fullmatch(text) or _SLASHED.fullmatch(text)
    if match is None:
        return None
    sign, whole, above, below = match[1], match[2], match[3] or match[4], match[5] or match[6]
    if Fraction(below) == 0 or (whole and not above.isdecimal()):
        return None
    value = int(whole or 0) + Fraction(above) / Fraction(below)
    return Number(-value if sign == "-" else value)


def _scaled(sign: str, digits: str, power: str, written: bool) -> Number | None:
    if len(power) > 6 or abs(int(power)) > NUMBER_LIMIT:
        return None
    scale = Fraction(10) ** int(power)
    value = Fraction(digits) * scale * (-1 if sign == "-" else 1)
    after = len(digits.partition(".")[2])
    if not after and not written:
        return Number(value)
    return Number(value, len(digits.replace(".", "").lstrip("0")), scale / 10**after)


def quantity(text: str) -> Quantity:
    """Return a value apart from its unit, percent sign and currency."""
    text = re.sub(r"^([+-]?)\s*(?:\\\$|[$€£¥])\s*", r"\1", text.strip())
    if percent := _PERCENT.fullmatch(text):
        return Quantity(percent[1], percent=True)
    match = _UNIT.fullmatch(text)
    if (
        match is None
        or len(match[2]) > UNIT_LIMIT
        or re.search(r"(?<![A-Za-z])(?:or|and|not|to)(?![A-Za-z])", match[2])
    ):
        return Quantity(text)
    known = match[2].casefold().removesuffix("s") in {*_UNIT_NAMES, *_UNIT_NAMES.values()}
    if not known and not match[2].startswith(("\\text", "^")):
        product = re.fullmatch(r"[a-z]{2,3}", match[2]) and text[match.end(1)] != " "
        if product or number(match[1]) is None:
            return Quantity(text)
    if "\\circ" in match[2]:
        return Quantity(match[1], "deg" + match[2].strip()[-1] if match[2].strip()[-1].isupper() else "deg")
    name, power, exponent = compact(unwrapped(match[2]).casefold()).replace(" ", "").partition("^")
    name = name.rstrip(".")
    name = _UNIT_NAMES.get(name.removesuffix("s"), name.removesuffix("s") if len(name) > 2 else name)
    return Quantity(match[1], name + power + exponent.strip("{}"))


def choice(text: str) -> tuple[str, str] | None:
    """Return the letter and the text, if any, of `B`, `(B)`, `B. 12` or `(B) 12`; None: it is not a choice."""
    match = _CHOICE.fullmatch(unwrapped(text))
    return match and (match[1] or match[2], match[3].strip())


def both_signs(text: str) -> str:
    r"""Write `x = 1 \pm \sqrt{2}` as a list of two."""
    if text.count("\\pm") != 1 or len(split(text, ",", ";", " or ", " and ")) > 1:
        return text
    value = text.rpartition("=")[2]
    plus, minus = value.replace("\\mp", "-").replace("\\pm", "+"), value.replace("\\mp", "+").replace("\\pm", "-")
    return f"{plus.strip().removeprefix('+').strip()}, {minus.strip()}"


def spelled_out(text: str) -> str:
    """Write `(x, y) = (1, 2)` as `x = 1, y = 2`."""
    sides = [split(inside(side, "(", ")") or "", ",") for side in split(text, "=")]
    if len(sides) == 2 and len(sides[0]) == len(sides[1]):
        return ", ".join(f"{name} = {value}" for name, value in zip(*sides, strict=True)) or text
    return text


def named_value(text: str) -> tuple[str, str]:
    r"""Return the name and the value of `x = 5`, `f(2) = 5`, `x = 10/2 = 5`, `x \in S`; else no name and the text.

    Who names a value writes no digits, but in brackets and subscripts: `2x = 5` says nothing of 5.
    """
    for sign in ("\\in", "="):
        name, *values = split(text, sign) or [""]
        bare = re.sub(r"_(?:\{[^{}]*\}|\w)|\([^()]*\)|\\text\{[^{}]*\}", "", name)
        if values and (len(values) == 1 or sign == "=") and not re.search(r"[\d<>]", bare):
            return name, values[-1]
    return "", text
