"""Runs of state machines: a few examples in each run of the tests, and the profile `thorough` in the proofs."""

from __future__ import annotations

import pytest
from hypothesis import settings

PARTS = 4
"""The thorough run is split, so that workers share it."""
LIMIT_S = 900
"""A part takes half a minute on an idle core."""


def few_and_many(examples: int, steps: int = 40) -> pytest.MarkDecorator:
    """Parametrise a test of a state machine by its settings, `runs`: a few examples, and some thousand as proofs.

    Args:
        examples: how many `make test` runs.
        steps: the most steps of each of these examples.
    """
    thorough = settings.get_profile("thorough")
    few = settings(max_examples=examples, stateful_step_count=steps)
    # Random seeds, or each part would run the same examples.
    part = settings(thorough, max_examples=thorough.max_examples // PARTS, derandomize=False)
    marks = [pytest.mark.proof, pytest.mark.timeout(LIMIT_S)]
    many = [pytest.param(part, id=f"many-{number}", marks=marks) for number in range(1, PARTS + 1)]
    return pytest.mark.parametrize("runs", [pytest.param(few, id="few"), *many])
