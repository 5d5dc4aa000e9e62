"""Instances of the `math` task, and the row formats of its data sets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from ..errors import InvalidRecord
from .answer_columns import answer_text, chat_problem, rule_answer
from .row_format import Record, filled, formats_of, native
from .written_answers import boxed

if TYPE_CHECKING:
    from collections.abc import Callable

ToolName = Literal["ipython", "bash", "think", "finish"]
GSM8K_MARK = "####"


class MathInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One math problem."""

    problem: str
    """The user message."""
    ground_truth: str
    """The right answer, in LaTeX or as a plain expression."""
    tools: tuple[ToolName, ...] = ()
    """The agent's tools. `bash` and `ipython` run in a sandbox."""
    image: str = ""
    """The sandbox's root filesystem, as `prorl image list` of the node names it, or a path below one of the service's
    `image_folders`; empty: the service's default."""


def _from_chat(record: Record) -> MathInstance:
    return MathInstance(chat_problem(record), rule_answer(record))


def _from_columns(problem: str, answer: str) -> Callable[[Record], MathInstance]:
    return lambda record: MathInstance(filled(record, problem), answer_text(record, answer))


def _from_derivation(record: Record) -> MathInstance:
    _, _, answer = filled(record, "answer").rpartition(GSM8K_MARK)
    if not answer.strip():
        raise InvalidRecord(f"answer has nothing behind {GSM8K_MARK}", field="answer")
    return MathInstance(filled(record, "question"), answer.strip())


def _ends_in_answer(record: Record) -> bool:
    return isinstance(record["answer"], str) and GSM8K_MARK in record["answer"]


def _from_solution(record: Record) -> MathInstance:
    solution = filled(record, "solution")
    answer = boxed(solution)
    if answer == solution or not answer.strip():
        raise InvalidRecord("solution has no \\boxed{} with the answer", field="solution")
    return MathInstance(filled(record, "problem"), answer)


_row_format = formats_of("math")
_from_answer = _from_columns("problem", "answer")
ROW_FORMATS = (
    _row_format("dapo", "DAPO-Math-17k, and others in verl's format", {"prompt", "reward_model"}, _from_chat),
    _row_format("math-500", "MATH-500", {"problem", "answer", "subject", "unique_id"}, _from_answer),
    _row_format("deepscaler", "DeepScaleR", {"problem", "answer", "solution"}, _from_answer),
    _row_format("aime", "AIME and others with an answer", {"problem", "answer"}, _from_answer),
    _row_format("aime-capitals", "AIME 2024 by Maxwell-Jia", {"Problem", "Answer"}, _from_columns("Problem", "Answer")),
    _row_format(
        "aime-question",
        "AIME 1983 to 2024 by di-zhang-fdu",
        {"Question", "Answer"},
        _from_columns("Question", "Answer"),
    ),
    _row_format("gsm8k", "GSM8K: the answer is behind ####", {"question", "answer"}, _from_derivation, _ends_in_answer),
    _row_format("deepmath", "DeepMath-103K", {"question", "final_answer"}, _from_columns("question", "final_answer")),
    _row_format("hendrycks", "MATH", {"problem", "solution", "level", "type"}, _from_solution),
    native("math", MathInstance),
)
"""The most specific first."""
