"""Which answers of programs and functions are the expected ones."""

from __future__ import annotations

import pytest

from prorl_zmq.stages.handlers.code_output import same_result, same_text


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        ("5\n", "5", True),
        ("1 2\n3\n", " 1  2 \r\n3\n\n", True),
        ("1 2 3", "1\n2\n3\n", True),
        ("YES", "Yes", False),
        ("1 2", "1 2 3", False),
        ("1 2", "2 1", False),
        ("5", "", False),
        ("", "\n", True),
        ("5", "5.0", True),
        ("5.0", "5", True),
        ("007", "7", True),
        ("1e3", "1000", True),
        ("0.333333", "0.3333333333", True),
        ("0.5", "0.50001", False),
        ("2.0000", "1.99999", True),
        ("100000000000000000", "100000000000000001", False),
        ("5", "5.0000001", False),
        ("2", "1.9999999999999998", True),
        ("5", "10e999999", False),
        ("5", "9" * 1_000_000 + ".5", False),
        ("123456789", "123456790.0", False),
        ("100000000000000000", "100000000000000001.0", False),
        ("5.0", "nan", False),
        ("5.0", "inf", False),
        ("nan", "nan", True),
        ("nan", "NaN", False),
        ("1e999999", "2e999999", False),
        ("1e999", "5", False),
        ("5", "5e999999999999", False),
        ("5", "٥", False),
        ("50", "5_0", False),
        ("5", "+5", True),
        ("0", "-0", True),
        (".5", "0.5", True),
        ("5", "0x5", False),
    ],
)
def test_output_of_a_program(expected: str, got: str, same: bool) -> None:
    assert same_text(expected, got) is same


@pytest.mark.parametrize(
    ("comparison", "expected", "got", "same"),
    [
        ("close", "YES", "Yes", False),
        ("any_case", "YES 5", "Yes\n5", True),
        ("any_case", "YES", "NO", False),
        ("any_case", "2", "1.9999999999999998", True),
        ("any_case", "2.5", "2.500009", True),
        ("any_case", "2", "3", False),
        ("any_case", "100000000000000000", "100000000000000001.0", False),
        ("exact", "1 2\n3", " 1 2 \n3\n\n", True),
        ("exact", "1 2 3", "1 2\n3", False),
        ("exact", "1 2\n3", "1.0 2.00\n3e0", True),
        ("exact", "0.333333", "0.3333333333", False),
        ("exact", "YES", "Yes", False),
        ("exact", "a  b", "a b", False),
        ("exact", "", "\n", True),
    ],
)
def test_sets_compare_in_their_own_ways(comparison: str, expected: str, got: str, same: bool) -> None:
    assert same_text(expected, got, comparison) is same


@pytest.mark.parametrize(
    ("expected", "got", "wrapped", "same"),
    [
        ("5", "5", False, True),
        ("5", "5.0", False, True),
        ("5", '"5"', False, False),
        ("5", "[5]", False, False),
        ("[5]", "5", False, False),
        ("[5]", "5", True, True),
        ("[5]", "[5]", True, True),
        ("[[1,2]]", "[1,2]", True, True),
        ("[1,2]", "1", True, False),
        ("5", "[5]", True, False),
        ("true", "1", False, True),
        ("[0.1,2]", "[0.10000000000000003,2]", False, True),
        ("[0.1,2]", "[0.1,2.0000001]", False, False),
        ("0.5", "NaN", False, False),
        ("0.5", "true", False, False),
        ("NaN", "NaN", False, False),
        ("Infinity", "Infinity", False, True),
        ("Infinity", "5", False, False),
        ("null", "null", False, True),
        ("null", "0", False, False),
        ('{"1":[2]}', '{"1":[2]}', False, True),
        ('{"1":[2]}', '{"1":[2],"2":3}', False, False),
        ('{"1":[2]}', "[2]", False, False),
        ('"a b"', '"a  b"', False, False),
        ("5", "", False, False),
        ("5", "5 5", False, False),
        ("5", "5}", False, False),
        ("5", "[" * 100_000, False, False),
        ("5", "[" * 500 + "]" * 500, False, False),
        ("5", "1" * 10_000, False, False),
        ("0.5", "1" * 1000, False, False),
    ],
)
def test_result_of_a_function(expected: str, got: str, wrapped: bool, same: bool) -> None:
    assert same_result(expected, got, wrapped) is same


def test_results_of_livecodebench_are_equal_or_not() -> None:
    assert not same_result("[0.1,2]", "[0.10000000000000003,2]", False, "exact")
    assert same_result("[0.1,2]", "[0.1,2.0]", False, "exact")


def test_integers_may_have_more_digits_than_python_reads_by_itself() -> None:
    number = "7" * 9131
    assert same_result(f"[{number}]", f"[{number}]", False)
    assert not same_result(f"[{number}]", f"[{number[:-1]}8]", False)
    assert same_text(number, number)


def test_expectation_that_is_no_json_is_no_answers_fault() -> None:
    with pytest.raises(ValueError, match="Expecting"):
        same_result("five", "5", False)


@pytest.mark.parametrize("word", ["1", "1e", "1.", "9" * 1000 + " ", "-", "1 ", "\n"])
def test_hostile_output_is_wrong_before_anybody_is_tired_of_it(word: str) -> None:
    text = word * (400_000 // len(word))
    assert not same_text("1.5 " * 1000, text)
    assert not same_text(text, "1.5" + text)
    assert not same_result("1.5", text, wrapped=False)
