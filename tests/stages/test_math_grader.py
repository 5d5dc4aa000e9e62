"""Grading by math-verify in its child process."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from prorl_zmq.stages.handlers.math_grader import MathGrader

CASES = [
    ("1/2", "The answer is \\boxed{\\frac{1}{2}}.", True),
    ("1/2", "The answer is \\boxed{0.5}.", True),
    ("1/2", "The answer is \\boxed{2}.", False),
    ("$x^2 + 2x + 1$", "So we get $(x+1)^2$", True),
    ("42", "I do not know.", False),
    ("42", "", False),
    ("\\sqrt{8}", "\\boxed{2\\sqrt{2}}", True),
    ("", "\\boxed{1}", False),
]


def test_answers() -> None:
    async def grade() -> list[bool]:
        grader = MathGrader()
        try:
            return [await grader.grade(truth, answer) for truth, answer, _ in CASES]
        finally:
            grader.close()

    assert asyncio.run(grade()) == [right for *_, right in CASES]


def test_child_that_was_killed_is_started_again() -> None:
    async def grade() -> tuple[bool, bool]:
        grader = MathGrader()
        try:
            first = await grader.grade("2", "\\boxed{2}")
            for child in psutil.Process().children(recursive=True):
                if "spawn_main" in " ".join(child.cmdline()):
                    child.kill()
            return first, await grader.grade("2", "\\boxed{2}")
        finally:
            grader.close()

    assert asyncio.run(grade()) == (True, True)


@pytest.mark.parametrize(
    "answer",
    ["\\boxed{" + "(" * 3000, "$" + "9^" * 40 + "9$", "\\boxed{" + "x" * 100_000 + "}"],
    ids=["parentheses", "powers", "long"],
)
def test_hostile_answer_is_wrong_within_bounded_time(answer: str) -> None:
    async def grade() -> bool:
        grader = MathGrader()
        try:
            return await asyncio.wait_for(grader.grade("2", answer), 60)
        finally:
            grader.close()

    assert asyncio.run(grade()) is False
