"""Rows of the published data sets of science questions become instances of the `stem` task."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from prorl_zmq.errors import InvalidRecord
from prorl_zmq.tasks.row_format import recognise
from prorl_zmq.tasks.stem import ROW_FORMATS, StemInstance

SCP = {
    "domain": "physics",
    "problem": "How fast is it?",
    "matched_solution": "By energy, $v = \\boxed{3.0 \\text{ m/s}}$.",
    "o1_solution": "…",
    "is_o1_solution_same_with_matched_solution": True,
    "qwq_solution": "…",
    "is_qwq_solution_same_with_matched_solution": False,
}
LONG = "Since the entropy grows, the reaction goes on by itself. " * 10
MMLU_PRO = {
    "question_id": 70,
    "question": "Which metal?",
    "options": ["Iron", "Copper", "Gold"],
    "answer": "B",
    "answer_index": 1,
    "cot_content": "",
    "category": "chemistry",
    "src": "stemez",
}
GPQA = {
    "Question": "Which metal?",
    "Correct Answer": "Copper\n",
    "Incorrect Answer 1": "Iron",
    "Incorrect Answer 2": "Gold",
    "Incorrect Answer 3": "Lead",
    "High-level domain": "Chemistry",
    "Record ID": "rec1",
}
METALS = StemInstance("Which metal?", "B", kind="choice", choices=("Iron", "Copper", "Gold"))
SUPERGPQA = {
    "question": "Which metal?",
    "options": ["Iron", "Copper", "Gold"],
    "answer": "Copper",
    "answer_letter": "B",
}
MMLU = {"question": "Which metal?", "choices": ["Iron", "Copper", "Gold"], "answer": 1, "subject": "chemistry"}
SCIBENCH = {
    "problem_text": "How fast?",
    "answer_number": "3.0",
    "unit": "$\\mathrm{~m} / \\mathrm{s}$",
    "source": "atkins",
}
CHAT = {"prompt": [{"role": "user", "content": "How fast?"}], "reward_model": {"ground_truth": "3 m/s"}}
ROWS: list[tuple[str, dict[str, Any], StemInstance]] = [
    ("scp-116k", SCP, StemInstance("How fast is it?", "3.0 \\text{ m/s}")),
    ("scp-116k", SCP | {"matched_solution": "3.0 m/s"}, StemInstance("How fast is it?", "3.0 m/s")),
    ("scp-116k", SCP | {"matched_solution": LONG}, StemInstance("How fast is it?", LONG.strip(), kind="text")),
    ("scp-116k-r1", {"problem": "How?", "extract_solution": "3 m", "r1_response": ""}, StemInstance("How?", "3 m")),
    ("scp-116k-extracted", {"problem": "How?", "extracted_solution": "3 m"}, StemInstance("How?", "3 m")),
    ("mmlu-pro", MMLU_PRO, METALS),
    ("supergpqa", SUPERGPQA, METALS),
    ("mmlu", MMLU, METALS),
    ("mmlu", MMLU | {"answer": "B"}, METALS),
    (
        "scibench",
        SCIBENCH,
        StemInstance(
            "How fast? The unit of the answer is $\\mathrm{~m} / \\mathrm{s}$.",
            "3.0 $\\mathrm{~m} / \\mathrm{s}$",
            kind="number",
        ),
    ),
    (
        "scibench",
        SCIBENCH | {"unit": "$10^{-35} \\mathrm{~J} \\mathrm{~s}$"},
        StemInstance(
            "How fast? The unit of the answer is $\\mathrm{~J} \\mathrm{~s}$.",
            "3.0 \\times 10^{-35} $\\mathrm{~J} \\mathrm{~s}$",
            kind="number",
        ),
    ),
    (
        "scibench",
        SCIBENCH | {"unit": "$10^6$ m"},
        StemInstance("How fast? The unit of the answer is m.", "3.0 \\times 10^{6} m", kind="number"),
    ),
    ("scibench", SCIBENCH | {"unit": "$10^{28} $"}, StemInstance("How fast?", "3.0 \\times 10^{28}", kind="number")),
    (
        "scibench",
        SCIBENCH | {"unit": "$\\sqrt{\\frac{b}{a+g}}$"},
        StemInstance("How fast? The unit of the answer is $\\sqrt{\\frac{b}{a+g}}$.", "3.0", kind="number"),
    ),
    ("stem-chat", CHAT, StemInstance("How fast?", "3 m/s")),
    ("question", {"question": "How fast?", "answer": 3.5}, StemInstance("How fast?", "3.5")),
    (
        "stem",
        {"problem": "How fast?", "ground_truth": "3 m/s", "tolerance": 0.05, "tools": ["search"]},
        StemInstance("How fast?", "3 m/s", tolerance=0.05, tools=("search",)),
    ),
]


@pytest.mark.parametrize(("name", "row", "instance"), ROWS)
def test_rows_become_instances(name: str, row: dict[str, Any], instance: StemInstance) -> None:
    form = recognise(row, ROW_FORMATS)
    assert (form.name, form.task) == (name, "stem")
    assert form.convert(row) == instance


def test_gpqa_puts_the_right_answer_in_places_that_differ_and_stay() -> None:
    form = recognise(GPQA, ROW_FORMATS)
    places = set()
    for number in range(40):
        row = GPQA | {"Question": f"Which metal {number}?"}
        instance = form.convert(row)
        assert isinstance(instance, StemInstance)
        assert instance == form.convert(row)
        assert sorted(instance.choices) == ["Copper", "Gold", "Iron", "Lead"]
        assert instance.choices[ord(instance.ground_truth) - ord("A")] == "Copper"
        places.add(instance.ground_truth)
    assert places == set("ABCD")


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (SCP | {"matched_solution": ""}, "matched_solution"),
        (SCP | {"matched_solution": "\\boxed{"}, "matched_solution"),
        (SCP | {"problem": None}, "problem"),
        (MMLU_PRO | {"options": ["Iron"]}, "options"),
        (MMLU_PRO | {"options": ["Iron"] * 11}, "options"),
        (MMLU_PRO | {"options": "Iron"}, "options"),
        (MMLU_PRO | {"answer": "D"}, "answer"),
        (MMLU_PRO | {"answer": "Copper"}, "answer"),
        (SUPERGPQA | {"answer_letter": ""}, "answer_letter"),
        (MMLU | {"answer": 3}, "answer"),
        (MMLU | {"answer": -1}, "answer"),
        (MMLU | {"answer": True}, "answer"),
        (MMLU | {"answer": None}, "answer"),
        (GPQA | {"Incorrect Answer 2": ""}, "Incorrect Answer 2"),
        (SCIBENCH | {"answer_number": None}, "answer_number"),
        (CHAT | {"reward_model": {}}, "reward_model.ground_truth"),
        ({"question": "How?", "answer": ""}, "answer"),
        ({"problem": "How?", "ground_truth": "3", "tolerance": 1.5}, "tolerance"),
        ({"problem": "How?", "ground_truth": "3", "kind": "guess"}, "kind"),
    ],
)
def test_wrong_rows_are_refused_with_the_column(row: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRecord) as caught:
        recognise(row, ROW_FORMATS).convert(row)
    assert caught.value.fields["field"] == field


def test_instances_cross_the_wire() -> None:
    for _, row, instance in ROWS:
        del row
        assert msgspec.convert(msgspec.to_builtins(instance), StemInstance) == instance
