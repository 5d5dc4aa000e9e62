"""Columns that question data sets share: the answer, and verl's `prompt` and `reward_model`."""

from __future__ import annotations

import math
import re

from ..errors import InvalidRecord
from .row_format import Record, filled, mapping, parsed_json

_MESSAGES = re.compile(r"\s*\[\s*\{")
"""The beginning of a JSON list of messages; an interval also begins with a bracket."""
DAPO_OPENING = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem."
)
DAPO_CLOSING = 'Remember to put your answer on its own line after "Answer:".'
"""What DAPO-Math-17k adds to each problem; the handler's system message says where the answer goes."""


def answer_text(record: Record, name: str) -> str:
    """Return a column with an answer: a text or a number."""
    value = record.get(name)
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRecord(f"{name} is {value}, which is not an answer", field=name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return filled(record, name)


def chat_problem(record: Record) -> str:
    """Return the problem of a column `prompt`: the user's messages, or a text."""
    value = record.get("prompt")
    if isinstance(value, str) and not _MESSAGES.match(value):
        return filled(record, "prompt")
    messages = parsed_json(record, "prompt")
    try:
        contents = [each["content"].strip() for each in messages if each["role"] == "user"]
    except (TypeError, KeyError, AttributeError):
        raise InvalidRecord("prompt must be a list of messages, with role and content", field="prompt") from None
    problem = "\n\n".join(contents).removeprefix(DAPO_OPENING).removesuffix(DAPO_CLOSING).strip()
    if not problem:
        raise InvalidRecord("prompt has no message of a user", field="prompt")
    return problem


def rule_answer(record: Record) -> str:
    """Return the ground truth of a column `reward_model`."""
    model = mapping(record, "reward_model", "with ground_truth")
    try:
        return answer_text(model, "ground_truth")
    except InvalidRecord as error:
        raise InvalidRecord(f"reward_model.{error.message}", field="reward_model.ground_truth") from error
