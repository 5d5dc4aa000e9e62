"""Rewards against the truth: our graders, math-verify, and extraction as in simple-evals, on the same pairs.

The pairs are those of `tests/stages`, each with the verdict of a person: right answers, wrong ones, and tricks. A
grader is right about a pair if it gives that verdict; one that exceeds `LIMIT_S` gives none.

- math-verify: `verify(parse(truth), parse(answer))`, and of choices with its own extraction of letters.
- like simple-evals: the text after the last "Answer:", or in the last box, compared as text or as a number; that
  project leaves the comparison of mathematics to a model.
- Outputs of programs: the text without surrounding blanks, and the strict rule of LiveCodeBench.
"""

from __future__ import annotations

import multiprocessing
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness import Row, main

from prorl_zmq.stages.handlers.code_output import same_text
from prorl_zmq.stages.handlers.math_answers import answer_of, right_answer
from prorl_zmq.stages.handlers.stem_answers import judged_by_rules
from prorl_zmq.tasks.stem import TOLERANCE
from prorl_zmq.tasks.written_answers import boxed

sys.path.append(str(Path(__file__).parents[1] / "tests" / "stages"))
import answer_pairs
import choice_pairs
import message_pairs
import output_pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LIMIT_S = 5.0
QUICK = 8
"""Of a quick run, each of so many pairs."""
LETTERS = tuple("ABCDEFGHIJ")
_MATH_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_LETTER_ANSWER = re.compile(r"(?i)Answer[ \t]*:[ \t]*\$?\(?([A-J])\)?\$?")


class Pair(NamedTuple):
    right: bool
    truth: str
    answer: str
    choices: tuple[str, ...] = ()
    trick: bool = False


def ours_of_math(pair: Pair) -> bool:
    return right_answer(pair.truth, answer_of(None, pair.answer))


def ours_of_choices(pair: Pair) -> bool:
    verdict = judged_by_rules("auto", pair.truth, answer_of(None, pair.answer), list(pair.choices), TOLERANCE)
    return verdict == "right"


def ours_of_outputs(pair: Pair) -> bool:
    return same_text(pair.truth, pair.answer)


def math_verify(pair: Pair) -> bool:
    from math_verify import StringExtractionConfig, parse, verify

    if pair.choices:
        config = [StringExtractionConfig(strings=LETTERS)]
        return bool(verify(parse(pair.truth, config), parse(pair.answer, config)))
    return bool(verify(parse(f"${pair.truth}$"), parse(pair.answer)))


def like_simple_evals(pair: Pair) -> bool:
    found = (_LETTER_ANSWER if pair.choices else _MATH_ANSWER).findall(pair.answer)
    said = found[-1] if found else boxed(pair.answer)
    return _plain(said) == _plain(boxed(pair.truth))


def stripped_text(pair: Pair) -> bool:
    return pair.truth.strip() == pair.answer.strip()


def strict_lines(pair: Pair) -> bool:
    return same_text(pair.truth, pair.answer, "exact")


def _plain(text: str) -> str | float:
    text = re.sub(r"\\text\{([^{}]*)\}|[$*\s]", r"\1", text).strip(".").casefold()
    with suppress(ValueError):
        return float(text.replace(",", ""))
    return text


FAMILIES: dict[str, tuple[list[Pair], Callable[[Pair], bool], dict[str, Callable[[Pair], bool]]]] = {
    "math": (
        [Pair(right, truth, f"\\boxed{{{answer}}}") for truth, answer, right in answer_pairs.BOXED]
        + [Pair(right, truth, message) for truth, message, right in answer_pairs.MESSAGES]
        + [Pair(*pair, trick=pair[1:] in message_pairs.HACKS) for pair in message_pairs.PAIRS],
        ours_of_math,
        {"math-verify": math_verify, "like simple-evals": like_simple_evals},
    ),
    "choices": (
        [Pair(*pair, trick=not pair[0] and pair[1:3] in choice_pairs.HACKS) for pair in choice_pairs.PAIRS],
        ours_of_choices,
        {"math-verify": math_verify, "like simple-evals": like_simple_evals},
    ),
    "outputs of programs": (
        [Pair(*pair, trick=pair[1:] in output_pairs.HACKS) for pair in output_pairs.PAIRS],
        ours_of_outputs,
        {"the text as it is": stripped_text, "LiveCodeBench's rule": strict_lines},
    ),
}
FAMILIES["math"][0][:] = [
    pair._replace(trick=pair.trick or any(pair.answer == f"\\boxed{{{bad}}}" for _, bad in answer_pairs.HOSTILE))
    for pair in FAMILIES["math"][0]
]


def verdicts(judge: Callable[[Pair], bool], pairs: Sequence[Pair]) -> list[bool | None]:
    """Judge in a process of its own, which is replaced when it does not answer in time."""
    context = multiprocessing.get_context("fork")
    found: list[bool | None] = []
    workers: Any = context.Pool(1)
    try:
        for pair in pairs:
            verdict: bool | None = None
            try:
                verdict = workers.apply_async(judge, (pair,)).get(LIMIT_S)
            except multiprocessing.TimeoutError:
                workers.terminate()
                workers = context.Pool(1)
            except Exception as error:  # noqa: BLE001 - a grader that raises gives no verdict
                print(f"{judge.__name__}: {type(error).__name__} on {pair.answer[:60]!r}", file=sys.stderr)
            found.append(verdict)
    finally:
        workers.terminate()
    return found


def measure(quick: bool) -> list[Row]:
    rows = []
    for family, (pairs, ours, peers) in FAMILIES.items():
        kept = pairs[::QUICK] if quick else pairs
        tricks = sum(pair.trick for pair in kept)
        counts: dict[str, tuple[int, int]] = {}
        for name, judge in {"ours": ours, **peers}.items():
            found = verdicts(judge, kept)
            right = sum(verdict is pair.right for pair, verdict in zip(kept, found, strict=True))
            counts[name] = right, sum(bool(verdict) and pair.trick for pair, verdict in zip(kept, found, strict=True))
        mine, false = counts.pop("ours")
        for name, (right, theirs) in counts.items():
            rows.append(
                Row(
                    f"{family}: pairs of {len(kept)} judged as people do",
                    mine,
                    "pairs",
                    against=f"{name}: {right}",
                    ratio=mine / max(1, right),
                    target="more",
                    holds=mine > right,
                )
            )
            rows.append(Row(f"{family}: rewards for {tricks} tricks, {name}", theirs, "rewards"))
        rows.append(
            Row(f"{family}: rewards for {tricks} tricks, ours", false, "rewards", target="none", holds=not false)
        )
    return rows


if __name__ == "__main__":
    main("rewards", "which answers earn a reward, against math-verify and extraction as in simple-evals", measure)
