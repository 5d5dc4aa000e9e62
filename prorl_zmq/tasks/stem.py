"""Instances of the `stem` task, and the row formats of its data sets."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..errors import InvalidRecord
from .answer_columns import answer_text, chat_problem, rule_answer
from .row_format import Record, filled, formats_of, native, text, texts
from .written_answers import boxed

ToolName = Literal["search", "bash", "ipython", "think", "finish"]
Kind = Literal["auto", "number", "choice", "expression", "text"]
TOLERANCE = 0.01
"""Default. Textbooks give three significant digits (0.5 % at worst), and 9.8 or 9.81, 8.31 or 8.314 as constants: that
is within 1 %. At the 5 % of SciBench, 2.1 would pass for 2.2."""
CHOICES_LIMIT = 10
"""(A) to (J)."""
SHORT_SOLUTION = 200
"""A solution with more characters is a derivation, whose result a judge finds."""


class StemInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One question of science."""

    problem: str
    """The user message; `choices` are added to it."""
    ground_truth: str
    """The right answer: a number with its unit, a choice's letter or text, an expression, or words, such as a whole
    solution."""
    kind: Kind = "auto"
    """What the answer is. `auto`: what the ground truth looks like."""
    choices: Annotated[tuple[str, ...], Meta(max_length=CHOICES_LIMIT)] = ()
    """The choices' texts, that of (A) first."""
    tolerance: Annotated[float, Meta(ge=0, lt=1)] = TOLERANCE
    """Of numbers, relative to the ground truth. A rounded ground truth is met by all that rounds to it besides."""
    tools: tuple[ToolName, ...] = ()
    """What the agent may call. `bash` and `ipython` work in a sandbox, which INIT makes for them; `search` needs a
    provider in the service's environment."""
    image: str = ""
    """The sandbox's root filesystem, as `prorl image list` of the node names it, or a path below one of the service's
    `image_folders`; empty: the service's default."""
    judge: Literal["undecided", "always", "never"] = "undecided"
    """When the service's judge model is asked: where rules cannot decide; for all answers; or not at all, so that what
    rules cannot decide is wrong."""


def _letter(record: Record, name: str, choices: list[str]) -> str:
    letter = filled(record, name).strip().strip("()").upper()
    if len(letter) != 1 or not 0 <= ord(letter) - ord("A") < len(choices):
        raise InvalidRecord(f"{name} must be the letter of one of {len(choices)} choices", field=name)
    return letter


def _choices(record: Record, name: str) -> list[str]:
    choices = texts(record, name)
    if not 2 <= len(choices) <= CHOICES_LIMIT:
        raise InvalidRecord(f"{name} must have from 2 to {CHOICES_LIMIT} texts, and has {len(choices)}", field=name)
    return choices


def _chosen(problem: str, choices: list[str], letter: str) -> StemInstance:
    return StemInstance(problem, letter, kind="choice", choices=tuple(choices))


def _from_letter(record: Record) -> StemInstance:
    choices = _choices(record, "options")
    name = "answer_letter" if "answer_letter" in record else "answer"
    return _chosen(filled(record, "question"), choices, _letter(record, name, choices))


def _from_index(record: Record) -> StemInstance:
    choices, index = _choices(record, "choices"), record.get("answer")
    if isinstance(index, str):
        return _chosen(filled(record, "question"), choices, _letter(record, "answer", choices))
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(choices):
        raise InvalidRecord(f"answer must be the number of one of {len(choices)} choices, from 0", field="answer")
    return _chosen(filled(record, "question"), choices, chr(ord("A") + index))


def _from_gpqa(record: Record) -> StemInstance:
    problem, right = filled(record, "Question").strip(), filled(record, "Correct Answer").strip()
    wrong = [filled(record, f"Incorrect Answer {number}").strip() for number in (1, 2, 3)]
    # The right one comes first in the data: it gets a place that differs between questions, and is always the same.
    place = hashlib.sha256(problem.encode()).digest()[0] % 4
    return _chosen(problem, [*wrong[:place], right, *wrong[place:]], chr(ord("A") + place))


def _from_scp(record: Record) -> StemInstance:
    name = next(name for name in SCP_SOLUTIONS if name in record)
    solution = filled(record, name).strip()
    answer = boxed(solution).strip()
    if not answer:
        raise InvalidRecord(f"{name} has a \\boxed{{}} with nothing in it", field=name)
    kind: Kind = "auto" if len(answer) <= SHORT_SOLUTION else "text"
    return StemInstance(filled(record, "problem"), answer, kind=kind)


def _from_chat(record: Record) -> StemInstance:
    return StemInstance(chat_problem(record), rule_answer(record))


def _from_scibench(record: Record) -> StemInstance:
    """Convert SciBench: its units may begin with a power of ten, or be no units but what the number multiplies."""
    number, unit = answer_text(record, "answer_number").strip(), text(record, "unit", "").strip()
    if power := _POWER.match(unit):
        number = f"{number} \\times 10^{{{power[2] or power[3]}}}"
        unit = unit[power.end() :].strip()
        if power[1]:
            unit = unit.removeprefix("$").strip() if unit.startswith("$") else f"${unit}"
    problem = filled(record, "problem_text").rstrip()
    if unit.strip("$ "):
        problem += f" The unit of the answer is {unit}."
    is_factor = _FACTOR.search(unit) and re.search(r"[A-Za-z]", _COMMANDS.sub("", unit))
    return StemInstance(problem, number if is_factor else f"{number} {unit}".strip(), kind="number")


def _from_question(record: Record) -> StemInstance:
    return StemInstance(filled(record, "question"), answer_text(record, "answer"))


_POWER = re.compile(r"(\$?)\s*10\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|([+-]?\d+))")
_FACTOR = re.compile(r"\\(?:frac|sqrt)(?![A-Za-z])")
_COMMANDS = re.compile(r"\\(?:math|text)[a-z]*\s*\{[^{}]*\}|\\[A-Za-z]+")
"""Units stand in `\\mathrm` and its kin; letters outside of them are quantities."""
SCP_SOLUTIONS = ("matched_solution", "extract_solution", "extracted_solution")
"""The column with the solution, in the data set's versions."""
GPQA = {"Question", "Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3))}


_row_format = formats_of("stem")
ROW_FORMATS = (
    *(
        _row_format(name, f"SCP-116K, with {column}", {"problem", column}, _from_scp)
        for name, column in zip(("scp-116k", "scp-116k-r1", "scp-116k-extracted"), SCP_SOLUTIONS, strict=True)
    ),
    _row_format("gpqa", "GPQA", GPQA, _from_gpqa),
    _row_format("supergpqa", "SuperGPQA", {"question", "options", "answer_letter"}, _from_letter),
    _row_format("mmlu-pro", "MMLU-Pro", {"question", "options", "answer", "answer_index"}, _from_letter),
    _row_format("mmlu", "MMLU, and others with choices", {"question", "choices", "answer"}, _from_index),
    _row_format("scibench", "SciBench", {"problem_text", "answer_number", "unit"}, _from_scibench),
    _row_format("stem-chat", "science questions in verl's format", {"prompt", "reward_model"}, _from_chat),
    _row_format("question", "questions with an answer", {"question", "answer"}, _from_question),
    native("stem", StemInstance),
)
"""The special ones first. `stem-chat` looks like the math row format `dapo`: name the task to have it."""
