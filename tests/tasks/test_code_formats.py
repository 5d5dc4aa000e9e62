"""The forms of programming problems: what rows become, and what is wrong with others."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
from code_rows import (
    EXAMPLES,
    LINES,
    SUMS,
    WRAPPED,
    Example,
    apps,
    calls,
    code_contests,
    listed,
    live_code_bench,
    packed,
    taco,
)

from prorl_zmq.errors import InvalidRecord
from prorl_zmq.tasks.code import TESTS_LIMIT, TESTS_LIMIT_BYTES, CodeInstance, CodeTest, chosen_tests
from prorl_zmq.tasks.code_formats import APPS_TIME_S, DEEPCODER_TIME_S, ROW_FORMATS
from prorl_zmq.tasks.row_format import recognise
from prorl_zmq.tasks.row_formats import ROW_FORMATS as ALL_ROW_FORMATS


def converted(row: dict[str, Any]) -> CodeInstance:
    instance = recognise(row, ROW_FORMATS).convert(row)
    assert isinstance(instance, CodeInstance)
    return instance


def wrong(row: dict[str, Any]) -> InvalidRecord:
    with pytest.raises(InvalidRecord) as caught:
        converted(row)
    return caught.value


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_row_becomes_an_instance_with_its_tests_as_text(example: Example) -> None:
    instance = converted(example.row)
    if "function" in example.name or "class Solution" in example.right or "def add" in example.right:
        assert instance.entry_point == "add"
        assert {json.loads(test.input)[0] for test in instance.tests} == {1, -5, 10}
    else:
        assert instance.entry_point == ""
        assert [test.input.strip() for test in instance.tests][-3:] == [line.strip() for line in LINES]
        assert [test.output.strip() for test in instance.tests][-3:] == [total.strip() for total in SUMS]
    assert instance.problem.startswith("Add")
    assert instance.left_out == 0


@pytest.mark.parametrize(
    "example", [each for each in EXAMPLES if each.form != "code"], ids=lambda example: example.name
)
def test_row_is_recognised_by_its_columns(example: Example) -> None:
    assert recognise(example.row, ROW_FORMATS).name == example.form


@pytest.mark.parametrize(
    "tests", [[{"input": "1 2", "output": "3", "type": "stdin_stdout"}], {"inputs": ["1 2"], "outputs": ["3"]}]
)
def test_tests_of_deepcoder_may_be_plain_data(tests: Any) -> None:
    assert converted({"problem": "Add.", "tests": tests}).tests == [CodeTest("1 2", "3")]
    assert converted({"problem": "Add.", "tests": [{"input": "1 2", "output": "3"}], "time_s": 2.5}).time_s == 2.5


def test_limits_on_time_are_those_of_the_row() -> None:
    assert converted(code_contests()).time_s == 7.5  # 1.5 s of a judge, for Python
    assert converted(code_contests(time_limit=None)).time_s == 6.0
    assert converted(taco({"inputs": LINES, "outputs": SUMS})).time_s == 10.0  # 2 s of a judge
    assert converted(taco({"inputs": LINES, "outputs": SUMS}) | {"time_limit": None}).time_s == APPS_TIME_S
    assert converted(taco({"inputs": LINES, "outputs": SUMS}) | {"time_limit": "0.5 second"}).time_s == APPS_TIME_S
    assert converted(apps({"inputs": LINES, "outputs": SUMS})).time_s == APPS_TIME_S
    assert converted(EXAMPLES[0].row).time_s == DEEPCODER_TIME_S


def test_sets_have_their_own_comparison() -> None:
    assert converted(code_contests()).comparison == "any_case"
    assert converted(live_code_bench(listed("stdin"), "[]", {})).comparison == "close"
    assert converted(apps({"inputs": LINES, "outputs": SUMS})).comparison == "close"


def test_lines_may_be_numbers_and_integers_long() -> None:
    tests = converted(taco({"inputs": [[1, 2.5], "3"], "outputs": [["4"], [5]]})).tests
    assert [(test.input, test.output) for test in tests] == [("1\n2.5", "4"), ("3", "5")]
    assert wrong(taco({"inputs": [[None]], "outputs": ["4"]})).field == "input_output"


def test_problems_in_verls_form_are_told_by_their_ability() -> None:
    row = {
        "prompt": [{"role": "user", "content": "Add two numbers."}],
        "reward_model": {"style": "rule", "ground_truth": json.dumps({"inputs": LINES, "outputs": SUMS})},
        "ability": "code",
    }
    instance = converted(row)
    assert (instance.problem, len(instance.tests)) == ("Add two numbers.", len(LINES))
    assert recognise(row | {"ability": "math"}, ALL_ROW_FORMATS).task == "math"
    assert wrong(row | {"reward_model": {"ground_truth": "5"}}).field == "reward_model.ground_truth"


def test_results_count_as_wrapped_only_if_all_are() -> None:
    assert converted(apps(WRAPPED)).wrapped_outputs
    assert not converted(apps({**WRAPPED, "outputs": [[3], [-2], [30, 31]]})).wrapped_outputs
    assert not converted(apps({"inputs": LINES, "outputs": [[total] for total in SUMS]})).wrapped_outputs
    functional = live_code_bench([], packed(calls("functional")), {"func_name": "add"})
    assert not converted(functional).wrapped_outputs


def test_private_tests_may_be_plain_json() -> None:
    row = live_code_bench(listed("stdin")[:1], json.dumps(listed("stdin")), {})
    assert len(converted(row).tests) == 4


class Evil:
    """A pickle of it runs a function when it is read."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("/tmp/prorl-evil-pickle"),)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Evil()),
        pickle.dumps([1, 2]),
        pickle.dumps(Path("a")),
        pickle.dumps("not json"),
        pickle.dumps("[" * 100_000),
        b"",
        b"\x80\x04",
        b"garbage",
        b"\x80\x04\x8c\x00N\x85R.",
    ],
    ids=["code", "list", "class", "no-json", "deep", "empty", "cut", "garbage", "call"],
)
def test_pickle_of_anything_but_tests_is_refused(content: bytes) -> None:
    error = wrong(live_code_bench([], base64.b64encode(zlib.compress(content)).decode(), {}))
    assert error.field == "private_test_cases"
    assert not Path("/tmp/prorl-evil-pickle").exists()


def test_tests_that_grow_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_zmq.tasks.code_formats.INFLATED_LIMIT_BYTES", 10_000)
    content = base64.b64encode(zlib.compress(pickle.dumps("[" + " " * 10_000_000 + "]"))).decode()
    assert "larger than" in wrong(live_code_bench([], content, {})).message


STDIN = {"inputs": LINES, "outputs": SUMS}


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"problem": "p", "tests": "[]"}, "tests"),
        ({"problem": "p", "tests": "{nope"}, "tests"),
        ({"problem": "p", "tests": "5"}, "tests"),
        ({"problem": "p", "tests": '[{"input": "1"}]'}, "tests"),
        ({"problem": "p", "tests": '[{"input": 1, "output": "2"}]'}, "tests"),
        ({"problem": " ", "tests": json.dumps(STDIN)}, "problem"),
        ({"problem": None, "tests": json.dumps(STDIN)}, "problem"),
        ({"problem": "p", "tests": json.dumps(calls("functional"))}, "tests"),
        ({"problem": "p", "tests": json.dumps(calls("functional")), "metadata": {"func_name": "a b"}}, "tests"),
        ({"problem": "p", "tests": json.dumps(calls("functional")), "metadata": "[]"}, "metadata"),
        ({"problem": "p", "tests": json.dumps(calls("functional", fn_name="f") + listed("stdin"))}, "tests"),
        ({"problem": "p", "tests": json.dumps([{"input": "{", "output": "1", "fn_name": "f"}])}, "tests"),
        ({"problem": "p", "tests": json.dumps([{"input": {"a": 1}, "output": "1", "fn_name": "f"}])}, "tests"),
        ({"problem": "p", "tests": []}, "tests"),
        ({"problem": "p", "tests": [{"input": "1", "output": 2}]}, "tests[0].output"),
        ({"problem": "p", "tests": [{"input": "1", "output": "2"}], "entry_point": "f"}, "tests"),
        ({"problem": "p", "tests": [{"input": "[1]", "output": "{"}], "entry_point": "f"}, "tests"),
        ({"problem": "p", "tests": [{"input": "1", "output": "2"}], "reward": "some"}, "reward"),
        (apps(STDIN) | {"input_output": ""}, "input_output"),
        (apps(STDIN) | {"input_output": "[]"}, "input_output"),
        (apps({"inputs": LINES, "outputs": SUMS[:1]}), "input_output"),
        (apps({"inputs": [], "outputs": []}), "input_output"),
        (apps(STDIN) | {"question": ""}, "question"),
        (taco(STDIN) | {"time_limit": "soon"}, "time_limit"),
        (taco(STDIN) | {"time_limit": float("nan")}, "time_limit"),
        (code_contests(input_file="input.txt"), "input_file"),
        (code_contests(time_limit={"seconds": "1"}), "time_limit"),
        (code_contests(public_tests=[]), "public_tests"),
        (code_contests(description=""), "description"),
        (live_code_bench({}, packed([]), {}), "private_test_cases"),
        (live_code_bench([], packed([]), {}), "private_test_cases"),
        (live_code_bench([], packed(calls("functional")), {}), "private_test_cases"),
        (live_code_bench([], "%%%", {}), "private_test_cases"),
    ],
)
def test_wrong_row_names_its_field(row: dict[str, Any], field: str) -> None:
    assert wrong(row).field == field


def test_row_with_many_tests_keeps_those_with_the_longest_inputs() -> None:
    inputs = [str(10**index) for index in range(40)]
    instance = converted({"problem": "p", "tests": json.dumps({"inputs": inputs, "outputs": inputs})})
    assert [test.input for test in instance.tests] == inputs[-TESTS_LIMIT:]
    assert instance.left_out == 40 - TESTS_LIMIT


def test_row_that_no_job_could_carry_keeps_what_fits() -> None:
    large = "7" * (TESTS_LIMIT_BYTES // 2)
    tests = [{"input": text, "output": "1", "testtype": "stdin"} for text in (large + "1", "1", large, large, "2")]
    instance = converted(live_code_bench([], packed(tests), {}))
    assert [len(test.input) < 10 for test in instance.tests] == [False, True, True]
    assert (instance.left_out, instance.max_tests) == (2, 0)
    tests = [{"input": large * 3, "output": "1", "testtype": "stdin"}]
    assert wrong(live_code_bench([], packed(tests), {})).field == "private_test_cases"


def test_chosen_tests_keep_their_order() -> None:
    tests = [CodeTest(text, "") for text in ("bb", "a", "cccc", "ddd")]
    assert [test.input for test in chosen_tests(tests, 2)] == ["cccc", "ddd"]
    assert [test.input for test in chosen_tests(tests, 3)] == ["bb", "cccc", "ddd"]
    assert [test.input for test in chosen_tests(tests, 0, 5)] == ["a", "cccc"]
    assert chosen_tests(tests) == tests
