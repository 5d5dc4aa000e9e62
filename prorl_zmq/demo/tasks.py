"""The demo's tasks: small questions about a file of numbers, whose answers only a tool call can find.

Prompt i of a seed has its own random numbers. The expected answer is in the check script alone, which runs in a fresh
sandbox after the episode. On a file's numbers the answers to all kinds of question differ, so a wrong command is never
right by luck.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from ..wire.messages.jobs import EpisodeLimits, Job, PhaseLimits, Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DESTINATION = "answer.txt"
QUESTIONS: dict[str, Callable[[list[int]], int]] = {
    "How many lines are in data.txt?": len,
    "Add up the numbers of the file data.txt.": sum,
    "Of all values in data.txt, give the largest.": max,
    "Show the first line of data.txt.": lambda numbers: numbers[0],
    "Read data.txt, and take its last number.": lambda numbers: numbers[-1],
}
"""The kinds of question, and what the answer is."""

MAX_TURN_TOKENS = 40


def make_prompts(seed: int, first: int = 0, temperature: float = 1.0) -> Iterator[Job]:
    """Yield the prompts of a seed from number `first` on, without end; the kinds of question take turns."""
    for number in count(first):
        random = np.random.default_rng((seed, number))
        yield Job(
            task="shell",
            instance=make_instance(list(QUESTIONS)[number % len(QUESTIONS)], random),
            job_id=f"prompt-{number}",
            sampling=Sampling(temperature, MAX_TURN_TOKENS, int(random.integers(2**62))),
            episode=EpisodeLimits(max_turns=3, max_tokens=512, tool_call_s=10.0),
            limits=PhaseLimits(init_s=30.0, run_s=60.0, eval_s=30.0),
        )


def make_instance(question: str, random: np.random.Generator) -> dict[str, object]:
    """Make an instance of task `shell`: `instruction`, `files` and `check` (a bash script; exit code 0: solved)."""
    numbers = _numbers(random)
    expected = QUESTIONS[question](numbers)
    return {
        "instruction": f"Write to {DESTINATION}: {question}",
        "files": {"data.txt": "".join(f"{number}\n" for number in numbers)},
        "check": f'[ "$(tr -d "[:space:]" < {DESTINATION})" = "{expected}" ]\n',
    }


def _numbers(random: np.random.Generator) -> list[int]:
    """Draw 8 to 20 numbers on which the answers to all questions differ."""
    while True:
        numbers = [int(number) for number in random.integers(100, 1000, random.integers(8, 21))]
        if len({answer(numbers) for answer in QUESTIONS.values()}) == len(QUESTIONS):
            return numbers
