"""`start_python`: starts a module of this package as a program, for servers that fork what they have imported."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from .processes import ISOLATED

if TYPE_CHECKING:
    from collections.abc import Mapping


def start_python(
    module: str, *arguments: str, descriptor: int, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a module in an interpreter and a session of its own, without standard input.

    Args:
        module: what `python -m` runs.
        arguments: those of the program.
        descriptor: one that the program gets, under the same number.
        env: its environment; None: ours.
    """
    return subprocess.Popen(
        [sys.executable, *ISOLATED, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=(descriptor,),
        env=env,
        start_new_session=True,
    )
