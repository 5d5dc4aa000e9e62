"""The `math` task's instances, and the data sets whose rows become such."""

from __future__ import annotations

from typing import Literal

import msgspec

from ..errors import InvalidRecord
from .answer_columns import answer_text, chat_problem, rule_answer
from .row_format import Record, RowFormat, filled, native
from .written_answers import boxed

ToolName = Literal["ipython", "bash", "think", "finish"]


GSM8K_MARK = "####"


class MathInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One math problem."""

    problem: str
    """The user message."""
    ground_truth: str
    """The right answer: LaTeX or a plain expression."""
    tools: tuple[ToolName, ...] = ()
    """What the agent may call. `bash` and `ipython` work in a sandbox, which INIT makes for them."""
    image: str = ""
    """The sandbox's root filesystem, as `prorl image list` of the node names it, or a path below one of the service's
    `image_folders`; empty: the service's default."""


def _from_chat(record: Record) -> MathInstance:
    return MathInstance(chat_problem(record), rule_answer(record))


def _from_answer(record: Record) -> MathInstance:
    return MathInstance(filled(record, "problem"), answer_text(record, "answer"))


def _from_capitals(record: Record) -> MathInstance:
    return MathInstance(filled(record, "Problem"), answer_text(record, "Answer"))


def _from_final_answer(record: Record) -> MathInstance:
    return MathInstance(filled(record, "question"), answer_text(record, "final_answer"))


def _from_question(record: Record) -> MathInstance:
    return MathInstance(filled(record, "Question"), answer_text(record, "Answer"))


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


ROW_FORMATS = (
    RowFormat(
        "dapo",
        "math",
        "DAPO-Math-17k, and others in verl's format",
        frozenset({"prompt", "reward_model"}),
        _from_chat,
    ),
    RowFormat("math-500", "math", "MATH-500", frozenset({"problem", "answer", "subject", "unique_id"}), _from_answer),
    RowFormat("deepscaler", "math", "DeepScaleR", frozenset({"problem", "answer", "solution"}), _from_answer),
    RowFormat("aime", "math", "AIME and others with an answer", frozenset({"problem", "answer"}), _from_answer),
    RowFormat("aime-capitals", "math", "AIME 2024 by Maxwell-Jia", frozenset({"Problem", "Answer"}), _from_capitals),
    RowFormat(
        "aime-question", "math", "AIME 1983 to 2024 by di-zhang-fdu", frozenset({"Question", "Answer"}), _from_question
    ),
    RowFormat(
        "gsm8k",
        "math",
        "GSM8K: the answer is behind ####",
        frozenset({"question", "answer"}),
        _from_derivation,
        _ends_in_answer,
    ),
    RowFormat("deepmath", "math", "DeepMath-103K", frozenset({"question", "final_answer"}), _from_final_answer),
    RowFormat("hendrycks", "math", "MATH", frozenset({"problem", "solution", "level", "type"}), _from_solution),
    native("math", MathInstance),
)
"""The special ones first."""
