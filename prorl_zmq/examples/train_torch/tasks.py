"""What the example trains on: an endless stream of prompts for the tasks `shell` and `math`, and some to test with.

Every second prompt is a question about a file of numbers, which only a tool call can answer (those of `prorl demo`);
the others ask for a fact of geometry. Prompt i depends on the seed and on i alone, so a run that is resumed continues
where it was. What the tests have that training never saw are the files; the kinds of question are those of training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...demo.tasks import QUESTIONS as SHELL_QUESTIONS
from ...demo.tasks import make_instance
from ...wire.messages.jobs import EpisodeLimits, Job, PhaseLimits, Sampling

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTEXT_TOKENS = 256
MAX_TURN_TOKENS = 64
TEMPERATURE = 1.0
"""Of the rollouts. At any other, the engine's log-probs would be of another policy than the learner's."""
EPISODE = EpisodeLimits(max_turns=3, max_tokens=CONTEXT_TOKENS, tool_call_s=10.0)
LIMITS = PhaseLimits(init_s=30.0, run_s=60.0, eval_s=30.0)
SHAPES = {"triangle": 3, "square": 4, "pentagon": 5, "hexagon": 6}
"""What the problems are about, and the answers."""
MATH_QUESTIONS = (
    "How many sides has a {}?",
    "Count the corners of a {}.",
    "Tell how many lines make a {}.",
)
TASKS = ("shell", "math")
_TRAINING, _TESTING = 0, 1


class PromptStream:
    def __init__(self, seed: int, position: int = 0) -> None:
        self._seed = seed
        self.position = position

    def __iter__(self) -> Iterator[Job]:
        return self

    def __next__(self) -> Job:
        number = self.position
        self.position += 1
        return _make_prompt((self._seed, _TRAINING, number), f"p{number}", number, TEMPERATURE)


def held_out_jobs(seed: int, count: int, name: str) -> list[Job]:
    """Return jobs that measure the policy at temperature 0, on prompts that training does not use."""
    return [_make_prompt((seed, _TESTING, index), f"{name}-{index}", index, 0.0) for index in range(count)]


def _make_prompt(seed: tuple[int, ...], job_id: str, index: int, temperature: float) -> Job:
    random = np.random.default_rng(seed)
    task = TASKS[index % len(TASKS)]
    kind = index // len(TASKS)  # the kinds take turns
    if task == "shell":
        instance = make_instance(list(SHELL_QUESTIONS)[kind % len(SHELL_QUESTIONS)], random)
    else:
        shape = list(SHAPES)[kind % len(SHAPES)]
        instance = {"problem": math_problem(shape, random), "ground_truth": str(SHAPES[shape])}
    return Job(
        task=task,
        instance=instance,
        job_id=job_id,
        sampling=Sampling(temperature, MAX_TURN_TOKENS, int(random.integers(2**62))),
        episode=EPISODE,
        limits=LIMITS,
    )


def math_problem(shape: str, random: np.random.Generator) -> str:
    return MATH_QUESTIONS[random.integers(len(MATH_QUESTIONS))].format(shape)
