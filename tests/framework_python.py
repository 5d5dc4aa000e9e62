"""A Python with a training framework that cannot live in this one's environment: where it is."""

from __future__ import annotations

import os
from pathlib import Path

from needed import lacking
from vllm_python import environment

__all__ = ["environment", "framework_python"]

ROOT = Path(__file__).parent.parent


def framework_python(name: str) -> str:
    """Give the interpreter that has a framework, or skip the test."""
    variable = f"PRORL_{name.upper()}_PYTHON"
    named = os.environ.get(variable, "")
    beside = ROOT / f".{name}" / "bin" / "python"
    if not named and not beside.is_file():
        lacking(name, f"no {name}: neither {variable} names a Python that has it nor is there .{name}/bin/python")
    return named or str(beside)
