"""A Python program that runs beside a test."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

from support import forks

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def beside(arguments: list[str], environment: dict[str, str] | None = None) -> Iterator[None]:
    """Run a program of Python's while the context does."""
    process = forks.start(*arguments, env={**os.environ, **(environment or {})})
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
