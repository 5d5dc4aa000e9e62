"""A Python program that runs beside a test."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from prorl_zmq.system.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def beside(arguments: list[str], environment: dict[str, str] | None = None) -> Iterator[None]:
    """Run a program of Python's while the context does."""
    process = subprocess.Popen(
        [sys.executable, "-P", *arguments],
        env={**os.environ, **(environment or {})},
        preexec_fn=partial(die_with_parent, os.getpid()),
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
