"""The demo's tasks: small questions about a file of numbers, whose answers only a tool call can find.

Each instance has its own random numbers, and the expected answer is in the check script alone, which runs in a fresh
sandbox after the episode and which the policy never sees. The numbers are drawn so that no two kinds of question
have the same answer: the wrong command cannot be right by luck.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..wire.messages.base import new_id
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

EPISODE = EpisodeLimits(max_turns=3, max_tokens=512, tool_call_s=10.0)
LIMITS = PhaseLimits(init_s=30.0, run_s=60.0, eval_s=30.0)
MAX_TURN_TOKENS = 40


def make_jobs(groups: int, group_size: int, seed: int, temperature: float = 1.0, name: str = "") -> list[Job]:
    """Make the jobs of one training step: `groups` prompts, `group_size` jobs each, for the task `shell`.

    The kinds of question take turns, so that each step asks all of them about equally often. The same seed gives the
    same jobs.
    """
    random = np.random.default_rng(seed)
    questions = _in_turn(random, list(QUESTIONS))
    name = name or new_id()
    jobs = []
    for group in range(groups):
        instance = make_instance(next(questions), random)
        group_id = f"{name}-{group}"
        jobs += [
            Job(
                task="shell",
                instance=instance,
                job_id=f"{group_id}-{index}",
                group_id=group_id,
                sampling=Sampling(temperature, MAX_TURN_TOKENS, int(random.integers(2**62))),
                episode=EPISODE,
                limits=LIMITS,
            )
            for index in range(group_size)
        ]
    return jobs


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


def _in_turn(random: np.random.Generator, questions: list[str]) -> Iterator[str]:
    while True:
        for index in random.permutation(len(questions)):
            yield questions[index]
