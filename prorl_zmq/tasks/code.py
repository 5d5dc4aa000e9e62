"""Instances of the `code` task: a programming problem, and the hidden tests that a Python solution must pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Sequence

IDENTIFIER = r"^([^\W\d]\w*)?\Z"
"""A function's name, or nothing."""
DEFAULT_TIME_S = 6.0
"""LiveCodeBench's limit of each test."""
TESTS_LIMIT = 15
"""Default limit of tests of a problem, as in DeepCoder's training."""
TESTS_LIMIT_BYTES = 3 * 2**20
"""Most bytes of a problem's tests; a job may have 4 MiB by default, and LiveCodeBench has problems with hundreds."""


class CodeTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One test: the input of the solution, and the expected output."""

    input: str
    """Standard input; for a function, a JSON list of the arguments."""
    output: str
    """Expected standard output; for a function, the result as JSON."""


class CodeInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One programming problem.

    The agent sees the problem, the starter code and the limits on time and memory; the tests are kept for EVAL, and
    what they expect never enters a sandbox.
    """

    problem: Annotated[str, Meta(min_length=1)]
    """The user message."""
    tests: Annotated[list[CodeTest], Meta(min_length=1)]
    entry_point: Annotated[str, Meta(pattern=IDENTIFIER)] = ""
    """The function that the tests call, in the module or in its `class Solution`; empty: the solution is a program that
    reads standard input."""
    starter_code: str = ""
    """The given beginning of the solution."""
    wrapped_outputs: bool = False
    """Each expected result may be in a list, as in APPS and TACO: `5` equals `[5]`."""
    comparison: Literal["close", "any_case", "exact"] = "close"
    """How answers are compared (see `stages/handlers/code_output.py`): `close` tolerates rounding where the expected
    answer has fractions; `any_case` is CodeContests' rule, `exact` LiveCodeBench's."""
    reward: Literal["all", "fraction"] = "all"
    """`all`: 1.0 if all tests pass, else 0.0, stopping at the first failure. `fraction`: the share of passed tests."""
    time_s: Annotated[float, Meta(gt=0, le=600)] = DEFAULT_TIME_S
    """CPU seconds of one test, rounded up; the wall-clock limit is higher (see the handler)."""
    memory_bytes: Annotated[int, Meta(ge=2**26, le=2**40)] = 2**30
    """Address space of one test's process, and total memory of the processes it starts."""
    output_bytes: Annotated[int, Meta(ge=1, le=64 * 2**20)] = 4 * 2**20
    """Most output of one test; a test that writes more fails."""
    max_tests: Annotated[int, Meta(ge=0, le=100_000)] = TESTS_LIMIT
    """Most tests that are run: those with the longest inputs (see `chosen_tests`); 0: all."""
    left_out: Annotated[int, Meta(ge=0)] = 0
    """Number of the row's tests that are not in `tests`."""
    image: str = ""
    """The sandboxes' root filesystem, with a `python3` in it, as `prorl image list` names it, or a path below one of
    the service's `image_folders`; empty: the service's default."""
    tools: tuple[Literal["bash", "ipython", "str_replace_editor", "think", "finish"], ...] = (
        "bash",
        "str_replace_editor",
        "finish",
    )
    """The agent's tools; none: it answers in one turn, and RUN has no sandbox."""


def chosen_tests(tests: Sequence[CodeTest], most: int = 0, limit_bytes: int = 0) -> list[CodeTest]:
    """Return the tests to keep, in their own order: as in DeepCoder, those with the longest inputs.

    Published sets begin with short example tests, so a wrong solution still fails early.
    """
    kept: set[int] = set()
    room = limit_bytes
    for index in sorted(range(len(tests)), key=lambda index: -len(tests[index].input)):
        if most and len(kept) == most:
            break
        test = tests[index]
        size = len(test.input.encode("utf-8", "replace")) + len(test.output.encode("utf-8", "replace"))
        if not limit_bytes or size <= room:
            kept.add(index)
            room -= size
    return [test for index, test in enumerate(tests) if index in kept]
