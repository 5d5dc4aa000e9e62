"""Corpora of answers, one per family of graders: right ones, wrong ones, and tricks."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from choice_pairs import HACKS as CHOICE_HACKS
from choice_pairs import PAIRS as CHOICES
from message_pairs import HACKS as MATH_HACKS
from message_pairs import PAIRS as MATH
from output_pairs import HACKS as OUTPUT_HACKS
from output_pairs import PAIRS as OUTPUTS
from output_pairs import RESULT_PAIRS as RESULTS
from output_pairs import STRICT

from prorl_zmq.stages.handlers.choice_answers import of_truth, picked
from prorl_zmq.stages.handlers.code_output import same_result, same_text
from prorl_zmq.stages.handlers.math_answers import answer_of, right_answer
from prorl_zmq.stages.handlers.stem_answers import judged_by_rules
from prorl_zmq.tasks.stem import TOLERANCE

LEAST = 400
"""Pairs of each corpus."""


@pytest.mark.proof(quick=True)
def test_choices() -> None:
    assert len(CHOICES) >= LEAST
    assert len(CHOICE_HACKS) >= 100
    wrong = [
        (truth, answer[:80], sorted(picked(answer_of(None, answer), choices)))
        for right, truth, answer, choices in CHOICES
        if (picked(answer_of(None, answer), choices) == of_truth(truth, choices)) is not right
    ]
    assert wrong == []


@pytest.mark.proof(quick=True)
def test_math() -> None:
    assert len(MATH) >= LEAST
    assert len(MATH_HACKS) >= 80
    wrong = [
        (truth, message[:80], not right)
        for right, truth, message in MATH
        if right_answer(truth, answer_of(None, message)) is not right
    ]
    assert wrong == []


def test_outputs() -> None:
    assert len(OUTPUTS) >= LEAST
    assert len(OUTPUT_HACKS) >= 100
    wrong = [pair for pair in OUTPUTS if same_text(*pair[1:]) is not pair[0]]
    wrong += [pair for pair in RESULTS if same_result(*pair[1:], wrapped=False) is not pair[0]]
    assert wrong == []


def test_strict_rule_for_outputs() -> None:
    assert [pair for pair in STRICT if same_text(*pair[:2], "exact") is not pair[2]] == []


@pytest.mark.parametrize("pairs", [CHOICES, MATH, OUTPUTS, RESULTS])
def test_pairs_are_different(pairs: list[object]) -> None:
    assert [pair for pair, times in Counter(pairs).items() if times > 1] == []


def documented(task: str) -> list[tuple[str, list[str], list[str]]]:
    """Return the rows of a task's table in docs/tasks.md: ground truth, right answers, wrong ones."""
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    section = page.partition("## What counts as an answer")[2].partition(f"**`{task}`**")[2]
    rows = [row.split(" | ") for row in re.findall(r"^\| (`.*`.*) \|$", section.partition("\n**`")[0], re.MULTILINE)]
    return [(truth.split("`")[1], *(re.findall("`([^`]*)`", cell) for cell in cells)) for truth, *cells in rows]


@pytest.mark.proof(quick=True)
def test_examples_of_the_documentation() -> None:
    math, stem, code = (documented(task) for task in ("math", "stem", "code"))
    assert min(len(math), len(stem), len(code)) >= 3
    choices = ["Iron", "Copper", "Gold", "Zinc"]
    for table, right in (
        (math, lambda truth, answer: right_answer(truth, answer_of(None, answer))),
        (
            stem,
            lambda truth, answer: (
                judged_by_rules("auto", truth, answer, choices if truth[0] in "ABC" else [], TOLERANCE) == "right"
            ),
        ),
        (code, same_text),
    ):
        for truth, rights, wrongs in table:
            assert rights
            assert wrongs
            assert [answer for answer in rights if not right(truth, answer)] == []
            assert [answer for answer in wrongs if right(truth, answer)] == []
