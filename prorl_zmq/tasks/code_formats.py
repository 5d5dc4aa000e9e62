"""Row formats of programming problems: DeepCoder, CodeContests, APPS, TACO, LiveCodeBench, and our own.

Their four forms of tests (a list of tests or parallel lists, for programs or functions) become `CodeTest`s. A job keeps
the tests with the longest inputs (`code.chosen_tests`) that fit into it. Unsupported: file input and output, solutions
in other languages, and checkers for several right answers.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import math
import pickletools
import re
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..errors import InvalidRecord
from .answer_columns import chat_problem, rule_answer
from .code import (
    DEFAULT_TIME_S,
    IDENTIFIER,
    TESTS_LIMIT,
    TESTS_LIMIT_BYTES,
    CodeInstance,
    CodeTest,
    chosen_tests,
)
from .row_format import filled, formats_of, mapping, native, parsed_json, text

if TYPE_CHECKING:
    import msgspec

    from .row_format import Record

DEEPCODER_TIME_S = 12.0
"""DeepCoder's limit of each test."""
APPS_TIME_S = 4.0
"""The limit of APPS's and TACO's graders, for rows without one."""
PYTHON_FACTOR = 5.0
"""Python gets this multiple of a judge's limit, which is for C++, and at least `LEAST_TIME_S`. DeepCoder allows even
more: 12 s for every row."""
LEAST_TIME_S, MOST_TIME_S = APPS_TIME_S, 600.0
ABILITIES = frozenset({"code", "coding", "programming"})
"""Values of verl's column `ability` for programming problems."""
CALLS = frozenset({"functional", "function_call"})
"""Types of tests that call a function (LiveCodeBench, PrimeIntellect)."""
PROGRAMS = frozenset({"stdin", "stdin_stdout"})
INFLATED_LIMIT_BYTES = 256 * 2**20
"""Largest pack of private tests, unpacked."""
TEXT_OPERATIONS = frozenset({"BINUNICODE", "BINUNICODE8", "SHORT_BINUNICODE", "UNICODE"})
HARMLESS_OPERATIONS = frozenset({"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"})
"""The opcodes of a pickled text."""
DURATION = re.compile(r"\s*(\d+(?:\.\d*)?)\s*(?:s|sec|secs|second|seconds)?\.?\s*", re.IGNORECASE)


def _deepcoder(record: Record) -> Any:
    tests = record.get("tests")
    plain = isinstance(tests, list) and all(isinstance(each, Mapping) and each.keys() <= TEST_FIELDS for each in tests)
    if plain and record.keys() <= NATIVE_FIELDS:
        return NATIVE.convert(record)
    found = _found(parsed_json(record, "tests"), "tests", _function(record))
    return _instance(record, "tests", found, filled(record, "problem"), time_s=DEEPCODER_TIME_S)


def _live_code_bench(record: Record) -> CodeInstance:
    column, function = "private_test_cases", _function(record)
    data = [parsed_json(record, "public_test_cases"), _private(record)]
    if not all(isinstance(each, list) for each in data):
        raise InvalidRecord(f"public_test_cases and {column} must be lists of tests", field=column)
    found = _found([*data[0], *data[1]], column, function)
    # The benchmark runs all tests, so all that a job can carry are kept.
    return _instance(record, column, found, filled(record, "question_content"), most=0)


def _code_contests(record: Record) -> CodeInstance:
    for column in ("input_file", "output_file"):
        if text(record, column, ""):
            message = f"{column} is set: the problem is read from and written to files, which is not supported"
            raise InvalidRecord(message, field=column)
    tests: list[CodeTest] = []
    for column in ("public_tests", "private_tests", "generated_tests"):
        if record.get(column) is not None:
            data = mapping(record, column, "of input and output")
            tests += _found({"inputs": data.get("input"), "outputs": data.get("output")}, column).tests
    problem, time_s = filled(record, "description"), _time_s(record)
    return _instance(record, "private_tests", _Found(tests), problem, time_s=time_s, comparison="any_case")


def _apps(record: Record) -> CodeInstance:
    """Convert APPS and TACO, which has a time limit."""
    if isinstance(record.get("input_output"), str):
        filled(record, "input_output")  # APPS has some problems without tests
    found = _found(mapping(record, "input_output", "of inputs and outputs"), "input_output")
    time_s = _time_s(record) or APPS_TIME_S
    return _instance(record, "input_output", found, filled(record, "question"), time_s=time_s)


def _chat(record: Record) -> CodeInstance:
    try:
        data = json.loads(rule_answer(record))
    except (ValueError, RecursionError) as error:
        message = f"reward_model.ground_truth is no JSON of tests: {error}"
        raise InvalidRecord(message, field="reward_model.ground_truth") from error
    found = _found(data, "reward_model.ground_truth")
    return _instance(record, "reward_model.ground_truth", found, chat_problem(record), time_s=DEEPCODER_TIME_S)


def _is_code(record: Record) -> bool:
    return str(record["ability"]).casefold() in ABILITIES


def _native(record: Record) -> msgspec.Struct:
    instance = GENERIC.convert(record)
    assert isinstance(instance, CodeInstance)
    if instance.entry_point:
        for number, test in enumerate(instance.tests, start=1):
            _call(test.input, test.output, "tests", number, whole=True)
    return instance


GENERIC = native("code", CodeInstance)
NATIVE = dataclasses.replace(GENERIC, convert=_native)
NATIVE_FIELDS = frozenset(CodeInstance.__struct_fields__)
TEST_FIELDS = frozenset(CodeTest.__struct_fields__)
_row_format = formats_of("code")
ROW_FORMATS = (
    _row_format(
        "livecodebench",
        "LiveCodeBench (livecodebench/code_generation and code_generation_lite)",
        {"question_content", "public_test_cases", "private_test_cases"},
        _live_code_bench,
    ),
    _row_format(
        "codecontests",
        "CodeContests (deepmind/code_contests)",
        {"description", "public_tests", "private_tests"},
        _code_contests,
    ),
    _row_format("taco", "TACO (BAAI/TACO)", {"question", "input_output", "time_limit"}, _apps),
    _row_format("apps", "APPS (codeparrot/apps)", {"question", "input_output"}, _apps),
    _row_format(
        "deepcoder",
        "DeepCoder (agentica-org/DeepCoder-Preview-Dataset, all four subsets)",
        {"problem", "tests"},
        _deepcoder,
    ),
    _row_format(
        "code-chat",
        "programming problems in verl's format, such as those of Eurus-2: `ability` says so",
        {"prompt", "reward_model", "ability"},
        _chat,
        _is_code,
    ),
    NATIVE,
)


class _Found(NamedTuple):
    """The tests of one row."""

    tests: list[CodeTest]
    function: str = ""
    """The function that they call; empty: they run a program."""
    wrapped: bool = False
    """Each result is in its own list."""


def _instance(
    record: Record,
    column: str,
    found: _Found,
    problem: str,
    *,
    time_s: float = 0.0,
    most: int = TESTS_LIMIT,
    comparison: Literal["close", "any_case"] = "close",
) -> CodeInstance:
    if not found.tests:
        raise InvalidRecord(f"there is no test in {column}", field=column)
    kept = chosen_tests(found.tests, most, TESTS_LIMIT_BYTES)
    if not kept:
        raise InvalidRecord(f"each test of {column} is larger than {TESTS_LIMIT_BYTES} bytes", field=column)
    if not re.fullmatch(IDENTIFIER, found.function):
        raise InvalidRecord(f"{found.function[:80]!r} is not a name of a function", field=column)
    return CodeInstance(
        problem,
        kept,
        entry_point=found.function,
        starter_code=text(record, "starter_code", "").rstrip(),
        wrapped_outputs=found.wrapped,
        comparison=comparison,
        time_s=time_s or DEFAULT_TIME_S,
        max_tests=most,
        left_out=len(found.tests) - len(kept),
    )


def _found(data: Any, column: str, function: str = "") -> _Found:
    """Read tests of either shape."""
    kinds: set[str] = set()
    if isinstance(data, Mapping):
        inputs, outputs = data.get("inputs"), data.get("outputs")
        named = str(data.get("fn_name") or "")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise InvalidRecord(f"{column} must have a list of inputs, and one of as many outputs", field=column)
        pairs = list(zip(inputs, outputs, strict=True))
    elif isinstance(data, list) and all(isinstance(each, Mapping) and {*each} >= {"input", "output"} for each in data):
        kinds = {str(each.get("testtype") or each.get("type") or "") for each in data}
        named = next(filter(None, map(_named_by_test, data)), "")
        pairs = [(each["input"], each["output"]) for each in data]
    else:
        raise InvalidRecord(f"{column} must be a list of tests, each with input and output", field=column)
    calls = bool(kinds & CALLS or named or (function and kinds == {""}))
    function = named or function
    if not calls:
        return _Found([_program(*pair, column, number) for number, pair in enumerate(pairs, start=1)])
    if kinds & PROGRAMS:
        raise InvalidRecord(f"{column} has tests of programs and of functions together", field=column)
    if not function:
        raise InvalidRecord(f"the tests of {column} call a function, and nothing names it", field=column)
    tests = [_call(*pair, column, number) for number, pair in enumerate(pairs, start=1)]
    return _Found(tests, function, all(isinstance(expected, list) and len(expected) == 1 for _, expected in pairs))


def _named_by_test(test: Mapping[str, Any]) -> str:
    """Return the function that a test names: PrimeIntellect does in each, LiveCodeBench's relatives in metadata."""
    metadata = test.get("metadata")
    named = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    return str(test.get("fn_name") or named or "")


def _function(record: Record) -> str:
    if record.get("metadata") in (None, ""):
        return ""
    return str(mapping(record, "metadata", "with func_name").get("func_name") or "")


def _program(given: Any, expected: Any, column: str, number: int) -> CodeTest:
    """Make the test of a program: texts, or lists of lines, of which some may be numbers."""
    parts = [given, expected]
    for index, what in enumerate(parts):
        if isinstance(what, list) and all(isinstance(line, str | int | float) for line in what):
            parts[index] = "\n".join(map(str, what))
        elif not isinstance(what, str):
            raise InvalidRecord(f"{column}: test {number} must be of text, or lists of lines", field=column)
    return CodeTest(*parts)


def _call(given: Any, expected: Any, column: str, number: int, *, whole: bool = False) -> CodeTest:
    """Make the test of a function: a list of arguments, or (LiveCodeBench) their JSON line by line, or as a `whole`."""
    try:
        if whole:
            arguments, expected = json.loads(given), json.loads(expected)
        elif isinstance(given, str):
            arguments = [json.loads(line) for line in given.split("\n") if line.strip()]
            expected = json.loads(expected) if isinstance(expected, str) else expected
        else:
            arguments = given
        if not isinstance(arguments, list):
            raise InvalidRecord(f"{column}: test {number} must have a list of arguments", field=column)
        return CodeTest(_json(arguments), _json(expected))
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRecord(f"{column}: test {number} is not JSON: {error}", field=column) from error


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _private(record: Record) -> Any:
    """Read LiveCodeBench's private tests: JSON, or a pickle of JSON's text, compressed, in base64."""
    column = "private_test_cases"
    packed = record.get(column)
    if not isinstance(packed, str) or packed.lstrip()[:1] in ("[", ""):
        return parsed_json(record, column)
    try:
        inflater = zlib.decompressobj()
        pickled = inflater.decompress(base64.b64decode(packed, validate=True), INFLATED_LIMIT_BYTES)
        if inflater.unconsumed_tail:
            raise InvalidRecord(f"{column} is larger than {INFLATED_LIMIT_BYTES} bytes when unpacked", field=column)
        return json.loads(_pickled_text(pickled))
    except _DAMAGE as error:
        raise InvalidRecord(f"{column} cannot be unpacked: {error}", field=column) from error


def _pickled_text(pickled: bytes) -> str:
    """Return a pickled text without unpickling, so that nothing is executed."""
    found: list[str] = []
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name in TEXT_OPERATIONS:
            found.append(str(argument))
        elif operation.name not in HARMLESS_OPERATIONS:
            raise ValueError(f"it is a pickle of more than one text ({operation.name})")
    if len(found) != 1:
        raise ValueError(f"it is a pickle of {len(found)} texts")
    return found[0]


_DAMAGE = (
    *(binascii.Error, zlib.error, ValueError, EOFError, LookupError, TypeError),
    *(OverflowError, MemoryError, RecursionError),
)
"""Errors of damaged data."""


def _time_s(record: Record) -> float:
    """Return the limit of a Python solution, from the judge's in the column `time_limit`; 0: there is none."""
    limit = record.get("time_limit")
    if isinstance(limit, Mapping):
        limit_s = _seconds(limit.get("seconds") or 0) + _seconds(limit.get("nanos") or 0) / 1e9
    elif isinstance(limit, str):
        limit_s = float(match[1]) if (match := DURATION.fullmatch(limit)) else _seconds(limit.strip() or 0)
    else:
        limit_s = 0.0 if limit is None else _seconds(limit)
    return min(max(limit_s * PYTHON_FACTOR, LEAST_TIME_S), MOST_TIME_S) if limit_s else 0.0


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        message = f"time_limit must be a number of seconds, and is {str(value)[:40]!r}"
        raise InvalidRecord(message, field="time_limit")
    return float(value)
