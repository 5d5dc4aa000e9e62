"""Corpora of answers, one per family of graders: right ones, wrong ones, and tricks."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
from choice_pairs import HACKS as CHOICE_HACKS
from choice_pairs import PAIRS as CHOICES

from prorl_zmq.stages.handlers.choice_answers import of_truth, picked
from prorl_zmq.stages.handlers.math_answers import answer_of

LEAST = 400
"""Pairs of each corpus."""


def test_choices() -> None:
    assert len(CHOICES) >= LEAST
    assert len(CHOICE_HACKS) >= 100
    wrong = [
        (truth, answer[:80], sorted(picked(answer_of(None, answer), choices)))
        for right, truth, answer, choices in CHOICES
        if (picked(answer_of(None, answer), choices) == of_truth(truth, choices)) is not right
    ]
    assert wrong == []


def test_pairs_are_different() -> None:
    again = [pair for pair, times in Counter(CHOICES).items() if times > 1]
    assert again == []
