"""A Python with training frameworks that cannot live in this one's environment: where it is (see `make trainers`)."""

from __future__ import annotations

import os
from pathlib import Path

from needed import lacking

ROOT = Path(__file__).parent.parent


def framework_python(name: str) -> str:
    """Give the interpreter of an environment, or skip the test.

    Args:
        name: `trainers`, which has verl and SkyRL, `gym`, which has NeMo Gym, `mcp`, which has FastMCP, `openenv`,
            or `harbor`.
    """
    variable = f"PRORL_{name.upper()}_PYTHON"
    named = os.environ.get(variable, "")
    beside = ROOT / f".{name}" / "bin" / "python"
    if not named and not beside.is_file():
        lacking(name, f"neither {variable} names a Python of {name} nor is there .{name}/bin/python: make trainers")
    return named or str(beside)
