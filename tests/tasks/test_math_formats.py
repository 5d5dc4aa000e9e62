"""Rows of the published math data sets become instances of the `math` task, or are refused with the column's name."""

from __future__ import annotations

from typing import Any

import pytest

from prorl_zmq.errors import InvalidRecord
from prorl_zmq.tasks.answer_columns import DAPO_CLOSING, DAPO_OPENING
from prorl_zmq.tasks.math import ROW_FORMATS, MathInstance
from prorl_zmq.tasks.row_format import recognise
from prorl_zmq.tasks.written_answers import boxed

DEEPSCALER = {"problem": "What is 1/2 + 1/2?", "answer": "1", "solution": "It is \\boxed{1}."}
DAPO: dict[str, Any] = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": f"{DAPO_OPENING}\n\nWhat is 6 times 7?\n\n{DAPO_CLOSING}"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "42", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}
HENDRYCKS = {
    "problem": "Solve it.",
    "level": "Level 5",
    "type": "Algebra",
    "solution": "First \\boxed{3}. So the answer is $\\boxed{\\frac{1}{\\sqrt{2}}}$.",
}
MATH_500 = {
    "problem": "Convert the point.",
    "solution": "We get \\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}.",
    "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
    "subject": "Precalculus",
    "level": 2,
    "unique_id": "test/precalculus/807.json",
}
ROWS: list[tuple[str, dict[str, Any], MathInstance]] = [
    ("deepscaler", DEEPSCALER, MathInstance("What is 1/2 + 1/2?", "1")),
    ("dapo", DAPO, MathInstance("What is 6 times 7?", "42")),
    ("dapo", DAPO | {"prompt": "What is 6 times 7?"}, MathInstance("What is 6 times 7?", "42")),
    (
        "dapo",
        DAPO | {"prompt": '[{"role": "user", "content": "6 · 7?"}]', "reward_model": '{"ground_truth": 42}'},
        MathInstance("6 · 7?", "42"),
    ),
    ("dapo", DAPO | {"prompt": "[0, 1] is how long?"}, MathInstance("[0, 1] is how long?", "42")),
    ("hendrycks", HENDRYCKS, MathInstance("Solve it.", "\\frac{1}{\\sqrt{2}}")),
    ("math-500", MATH_500, MathInstance("Convert the point.", "\\left( 3, \\frac{\\pi}{2} \\right)")),
    ("aime", {"id": 60, "problem": "Find n.", "answer": 204, "year": "2024"}, MathInstance("Find n.", "204")),
    ("aime-capitals", {"ID": "2024-I-1", "Problem": "Find n.", "Answer": 204}, MathInstance("Find n.", "204")),
    ("aime-question", {"ID": "1983-1", "Question": "Find n.", "Answer": "60"}, MathInstance("Find n.", "60")),
    ("gsm8k", {"question": "How many?", "answer": "3 + 4 = 7.\n#### 1,007"}, MathInstance("How many?", "1,007")),
    ("deepmath", {"question": "Is it?", "final_answer": "Yes", "difficulty": 5.0}, MathInstance("Is it?", "Yes")),
    ("math", {"problem": "1 + 1", "ground_truth": "2"}, MathInstance("1 + 1", "2")),
    (
        "math",
        {"problem": "1 + 1", "ground_truth": "2", "tools": ["ipython"], "image": "python"},
        MathInstance("1 + 1", "2", tools=("ipython",), image="python"),
    ),
]


@pytest.mark.parametrize(("name", "row", "instance"), ROWS)
def test_rows_become_instances(name: str, row: dict[str, Any], instance: MathInstance) -> None:
    form = recognise(row, ROW_FORMATS)
    assert (form.name, form.task) == (name, "math")
    assert form.convert(row) == instance


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (DEEPSCALER | {"answer": ""}, "answer"),
        (DEEPSCALER | {"answer": None}, "answer"),
        (DEEPSCALER | {"answer": ["1"]}, "answer"),
        (DEEPSCALER | {"answer": True}, "answer"),
        (DEEPSCALER | {"answer": float("nan")}, "answer"),
        (DAPO | {"reward_model": {"ground_truth": float("inf")}}, "reward_model.ground_truth"),
        (DEEPSCALER | {"problem": " "}, "problem"),
        (DEEPSCALER | {"problem": 5}, "problem"),
        (DAPO | {"prompt": []}, "prompt"),
        (DAPO | {"prompt": [{"role": "system", "content": "Solve."}]}, "prompt"),
        (DAPO | {"prompt": [{"role": "user"}]}, "prompt"),
        (DAPO | {"prompt": [{"role": "user", "content": None}]}, "prompt"),
        (DAPO | {"prompt": 5}, "prompt"),
        (DAPO | {"prompt": "[{"}, "prompt"),
        (DAPO | {"prompt": [{"role": "user", "content": f"{DAPO_OPENING}\n\n{DAPO_CLOSING}"}]}, "prompt"),
        (DAPO | {"reward_model": None}, "reward_model"),
        (DAPO | {"reward_model": "none"}, "reward_model"),
        (DAPO | {"reward_model": ["42"]}, "reward_model"),
        (DAPO | {"reward_model": {"style": "rule"}}, "reward_model.ground_truth"),
        (DAPO | {"reward_model": {"ground_truth": ""}}, "reward_model.ground_truth"),
        (HENDRYCKS | {"solution": "It is 5."}, "solution"),
        (HENDRYCKS | {"solution": "It is \\boxed{5"}, "solution"),
        (HENDRYCKS | {"solution": "It is \\boxed{}"}, "solution"),
        (HENDRYCKS | {"solution": None}, "solution"),
        ({"question": "1", "answer": "so #### "}, "answer"),
        ({"problem": "1", "ground_truth": 2}, "ground_truth"),
        ({"problem": "1", "ground_truth": "2", "tools": ["editor"]}, "tools[0]"),
    ],
)
def test_wrong_rows_are_refused_with_the_column(row: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRecord) as caught:
        recognise(row, ROW_FORMATS).convert(row)
    assert caught.value.fields["field"] == field


def test_a_row_of_no_form() -> None:
    with pytest.raises(InvalidRecord, match="no known row format"):
        recognise({"problem": "1 + 1"}, ROW_FORMATS)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("no box", "no box"),
        ("so $\\boxed 2$.", "2"),
        ("\\boxed{5}", "5"),
        ("\\boxed{1} and \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}} is it", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\{}", "\\{"),
        ("\\boxed{\\text{a} b {c} d}", "\\text{a} b {c} d"),
        ("\\fbox{5}", "5"),
        ("\\boxed  {5}", "5"),
        ("\\boxed{5", ""),
        ("\\boxed{{5}", ""),
        ("\\boxed 5", "5"),
        ("\\boxed{}", ""),
    ],
)
def test_the_last_box(text: str, content: str) -> None:
    assert boxed(text) == content
