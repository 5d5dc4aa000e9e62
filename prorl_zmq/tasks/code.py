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
"""What LiveCodeBench gives each test."""
TESTS_LIMIT = 15
"""How many tests of a problem are run, unless its instance says otherwise: as many as DeepCoder was trained with."""
TESTS_LIMIT_BYTES = 3 * 2**20
"""Most bytes of all tests of a problem together, inputs and outputs: a job may have 4 MiB by default, and LiveCodeBench
has problems with hundreds."""


class CodeTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One test: what the solution is given, and what it must answer."""

    input: str
    """What it reads from standard input; for a function, a JSON list of the arguments."""
    output: str
    """What it must write to standard output; for a function, the result as JSON."""


class CodeInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One programming problem.

    The agent sees the problem, the starter code and the limits on time and memory; the tests are kept for EVAL, and
    what they expect never enters a sandbox.
    """

    problem: Annotated[str, Meta(min_length=1)]
    """The user message says it."""
    tests: Annotated[list[CodeTest], Meta(min_length=1)]
    entry_point: Annotated[str, Meta(pattern=IDENTIFIER)] = ""
    """The function that the tests call, of the module or of its `class Solution`; empty: the solution is a program that
    reads standard input."""
    starter_code: str = ""
    """What the solution begins with, if the problem gives that."""
    wrapped_outputs: bool = False
    """Each expected result may be a list around the real one, as APPS and TACO have it: `[5]` is met by 5, too."""
    comparison: Literal["close", "any_case", "exact"] = "close"
    """How answers are compared (see `stages/handlers/code_output.py`): `close` has a tolerance for fractions where the
    expected answer has them; `any_case` is CodeContests' rule, and `exact` LiveCodeBench's own, without a tolerance."""
    reward: Literal["all", "fraction"] = "all"
    """`all`: 1.0 if all tests pass, else 0.0, and no test is run after the first that fails. `fraction`: the share of
    the tests that pass."""
    time_s: Annotated[float, Meta(gt=0, le=600)] = DEFAULT_TIME_S
    """Processor time of one test, rounded up to whole seconds; on the clock it may take some more (see the handler)."""
    memory_bytes: Annotated[int, Meta(ge=2**26, le=2**40)] = 2**30
    """Address space of one test's process, and memory of all that it starts together."""
    output_bytes: Annotated[int, Meta(ge=1, le=64 * 2**20)] = 4 * 2**20
    """Most output of one test; a test that writes more has failed."""
    max_tests: Annotated[int, Meta(ge=0, le=100_000)] = TESTS_LIMIT
    """How many tests are run at most, those with the longest inputs (see `chosen_tests`); 0: all."""
    left_out: Annotated[int, Meta(ge=0)] = 0
    """How many tests of the data set's row are not in `tests`, for the record."""
    image: str = ""
    """The sandboxes' root filesystem, with a `python3` in it, as `prorl image list` names it, or a path below one of
    the service's `image_folders`; empty: the service's default."""
    tools: tuple[Literal["bash", "ipython", "str_replace_editor", "think", "finish"], ...] = (
        "bash",
        "str_replace_editor",
        "finish",
    )
    """What the agent may call; nothing: it answers in one turn, and RUN has no sandbox."""


def chosen_tests(tests: Sequence[CodeTest], most: int = 0, limit_bytes: int = 0) -> list[CodeTest]:
    """Return the tests that are kept, in their own order: as DeepCoder does, those with the longest inputs.

    A published set has its example tests first, which are short, so a wrong solution still fails early.
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
