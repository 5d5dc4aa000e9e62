"""What a test needs of its machine: it is skipped without it, or fails where CI says that the machine has it."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest
from support.bare import guarded

from prorl_zmq.tools.containers.kinds import problem_with


def usable(kind: str) -> None:
    """Skip the test where this machine cannot make sandboxes of the kind."""
    guarded(kind)
    if problem := problem_with(kind):
        lacking(kind, problem)


def lacking(what: str, problem: str) -> NoReturn:
    """Skip the test; fail it if the environment variable PRORL_REQUIRE names what is lacking."""
    guarded(what)
    if what in os.environ.get("PRORL_REQUIRE", "").split():
        pytest.fail(f"{what} is required here: {problem}")
    pytest.skip(problem)
