"""Whether two mathematical expressions or relations are equal, by `math-verify` and sympy; runs in a grader process.

Values are compared as numbers where possible, and else by `math_verify.verify`. Expressions that would take too much
time or memory to parse or evaluate are rejected first: a policy may write answers that would cost hours.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import re
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ..grading.cpu_limit import cpu_limit

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger("prorl.grader")
EXPRESSION_LIMIT = 400
NESTED_LIMIT = 12
"""Most nested brackets of an expression: each level slows down parsing."""
MAGNITUDE_LIMIT = 4000
"""Most digits of a value that is evaluated."""
CPU_S = 0.8

_EXPRESSION = re.compile(r"[A-Za-z0-9\s+\-*/^_(){}\[\]|!.,'=<>\\%]+")
_UNREADABLE = re.compile(r"(?<!_)\d\s+[\d.]|\.\s*\d+\.|[+\-*/^_=]\s*$|^\s*[*/^_=]|\{\s*\}|\*\s*\*|\d{301}|\\text")
_EAGER = re.compile(r"\\(?:binom|[dt]binom|choose|gcd|lcm|[bp]?mod)(?![A-Za-z])|gcd|lcm")
"""Operations that are evaluated during parsing."""


@contextlib.contextmanager
def answer_limit(seconds: float = CPU_S) -> Iterator[None]:
    """Limit an answer's processor time, without the import of math-verify (see `cpu_limit`)."""
    import math_verify  # noqa: F401 - takes longer than the limit

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own limits are off
    with cpu_limit(seconds):
        yield


@contextlib.contextmanager
def errors_logged(what: str) -> Iterator[None]:
    """End the block at an error: sympy and pint raise all kinds, none of which may save a wrong answer from its 0."""
    try:
        yield
    except Exception:
        log.debug("%s failed", what, exc_info=True)


def same_expressions(truth: str, answer: str) -> bool:
    with errors_logged("comparing expressions"):
        one, other = read_expression(truth), read_expression(answer)
        if one is None or other is None:
            return False
        if type(one).__name__ == type(other).__name__ == "Equality" and _proportional(one, other):
            return True
        if (decided := _same_values(one, other)) is not None:
            return decided
        from math_verify import verify

        return bool(verify(one, other, timeout_seconds=None))
    return False


def extracted(text: str) -> str:
    """Return the answer that `math-verify` finds in a text, as written."""
    from math_verify import parse

    return next((each for each in reversed(parse(text, parsing_timeout=None)) if isinstance(each, str)), "")


@lru_cache(maxsize=256)
def read_expression(text: str) -> Any:
    """Parse an expression or a relation by `math-verify`; None: it is none, or too large."""
    text = re.sub(r"_\{?\\text\{(\w+)\}\}?", r"_{\1}", text)
    text = re.sub(r"\\text\{\s*(\w)\s*\}", r" \1 ", text)
    if (
        not text.strip()
        or len(text) > EXPRESSION_LIMIT
        or not _EXPRESSION.fullmatch(text)
        or not _wholly_readable(text)
    ):
        return None
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy, normalize_latex
    from math_verify.grader import should_treat_as_complex

    # Not `math_verify.parse`, which lowers all letters: G M m / r^2 would be G m^2 / r^2.
    written = normalize_latex(text, NormalizationConfig(malformed_operators=True, nits=True, boxed="none"))
    real, cases = not should_treat_as_complex(text), ConversionConfig(lowercase_symbols=False)
    found = latex2sympy(written, is_real=real, normalization_config=None, conversion_config=cases)
    return found if found is not None and _magnitude(found) <= MAGNITUDE_LIMIT else None


def _wholly_readable(text: str) -> bool:
    """Return whether `math-verify` would parse the whole text without a large computation."""
    depths = list(accumulate(1 if bracket in "({[" else -1 for bracket in re.findall(r"[({\[\])}]", text))) or [0]
    if depths[-1] or min(depths) < 0 or max(depths) > NESTED_LIMIT or _UNREADABLE.search(text):
        return False
    return not (_EAGER.search(text) and re.search(r"\d{5}|\^|!", text))


def _magnitude(value: Any) -> float:
    """Return an upper bound of a value's digits without evaluating it; infinite: do not try."""
    import sympy

    if isinstance(value, sympy.Rational):
        return max(len(str(abs(value.p))), len(str(value.q)))
    if isinstance(value, sympy.Float):
        return abs(math.log10(abs(float(value)) or 1.0)) if value.is_finite else math.inf
    if not getattr(value, "args", ()):
        return 1.0
    sizes = [_magnitude(each) for each in value.args if isinstance(each, sympy.Basic)]
    largest = max(sizes, default=1.0)
    if largest > MAGNITUDE_LIMIT:
        return math.inf
    match value:
        case sympy.Pow():
            return sizes[0] * _most(value.exp, sizes[1])
        case sympy.exp():
            return _most(value.args[0], sizes[0])
        case sympy.factorial() | sympy.factorial2() | sympy.binomial() | sympy.gamma():
            most = _most(value.args[0], sizes[0])
            return most * max(1.0, math.log10(most)) if value.args[0].is_number else largest
        case sympy.Sum() | sympy.Product():
            ranges = [high - low for _, low, high in value.limits if high.is_Integer and low.is_Integer]
            return largest * max([1, *ranges]) if all(size < MAGNITUDE_LIMIT for size in ranges) else math.inf
        case sympy.Mul() | sympy.Add():
            return sum(sizes)
        case _:
            return largest


def _most(value: Any, size: float) -> float:
    """Return an upper bound of a value with this many digits."""
    if value.is_Rational or value.is_Float:
        return max(1.0, abs(float(value))) if size < 300 else math.inf
    return 10.0**size if value.is_number and size < 300 else (math.inf if value.is_number else 4.0)


def _same_values(one: Any, other: Any) -> bool | None:
    """Compare expressions by value, at several points if they have variables; None: too few points have values."""
    import sympy

    if not all(isinstance(each, sympy.Expr) and not isinstance(each, sympy.MatrixExpr) for each in (one, other)):
        return None
    one, other = _exact(one), _exact(other)
    if one.is_Rational and other.is_Rational:
        return bool(one == other)
    variables = sorted(one.free_symbols | other.free_symbols, key=str)
    points = [dict(zip(variables, row, strict=False)) for row in _coordinates(len(variables))] if variables else [{}]
    digits = 25 + int(max(_magnitude(one), _magnitude(other)))
    compared = 0
    for point in points:
        values = [_at(each, point, digits) for each in (one, other)]
        if None in values:
            continue
        if abs(values[0] - values[1]) > 10.0**-15 * max(abs(values[0]), abs(values[1])):
            return False
        compared += 1
    return True if compared >= min(3, len(points)) else None


def _exact(value: Any) -> Any:
    """Write decimal fractions as fractions and `i` as the imaginary unit, and evaluate pending operations."""
    import sympy

    value = value.xreplace({each: sympy.Rational(str(each)) for each in value.atoms(sympy.Float)})
    value = value.xreplace({each: sympy.I for each in value.free_symbols if each.name == "i"}).doit()
    two = [each for each in value.atoms(sympy.log) if len(each.args) == 2]
    return value.xreplace({each: sympy.log(each.args[0]) / sympy.log(each.args[1]) for each in two})


def _coordinates(count: int) -> list[list[Any]]:
    """Return fixed points to compare at: positive ones first, which most domains contain."""
    import sympy

    draws = random.Random(20)  # noqa: S311 - not secret
    signs = [(1, 1)] * 5 + [(1, -1)] * 4
    return [
        [sympy.Rational(draws.choice(sign) * draws.randint(300, 2500), 997) for _ in range(count)] for sign in signs
    ]


def _at(value: Any, point: dict[Any, Any], digits: int) -> Any:
    """Return a value at a point, as a number; None: the point is outside its domain, or there is no value."""
    import sympy

    try:
        if point:
            roots = [each.base for each in value.atoms(sympy.Pow) if not each.exp.is_integer]
            roots += [each.args[0] for each in value.atoms(sympy.log)]
            if any(root.free_symbols and not root.subs(point).evalf(15) >= 0 for root in roots):
                return None
        result = value.subs(point).evalf(digits, maxn=4 * MAGNITUDE_LIMIT)
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return None
    return result if result.is_number and result.is_finite and not result.atoms(sympy.Function) else None


def _proportional(one: Any, other: Any) -> bool:
    """Return whether two equations are equivalent: one is a multiple of the other."""
    first, second = one.lhs - one.rhs, other.lhs - other.rhs
    points = _coordinates(len(variables := sorted(first.free_symbols | second.free_symbols, key=str)))
    ratios = []
    for row in points if variables else ():
        above, below = (_at(_exact(each), dict(zip(variables, row, strict=True)), 25) for each in (first, second))
        if above is not None and below is not None and abs(below) > 1e-12 and abs(above) > 1e-12:
            ratios.append(above / below)
    return len(ratios) >= 3 and all(abs(ratio - ratios[0]) <= 1e-12 * abs(ratios[0]) for ratio in ratios)


def constant(text: str) -> Fraction | None:
    """Return the value of a real expression without variables, to 50 digits, else None. Runs in `answer_limit`."""
    with errors_logged("working out a value"):
        parsed = read_expression(text)
        if parsed is not None and not parsed.free_symbols:
            value = _at(_exact(parsed), {}, 50)
            return Fraction(str(value)) if value is not None and value.is_real else None
    return None
