"""`start_python`: starts a module of this package as a program, for servers that fork what they have imported."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from .processes import ISOLATED

if TYPE_CHECKING:
    from collections.abc import Mapping


def start_python(
    module: str,
    *arguments: str,
    descriptor: int,
    env: Mapping[str, str] | None = None,
    output: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a module in its own interpreter and session, without standard input.

    Args:
        module: what `python -m` runs.
        arguments: of the program.
        descriptor: passed to the program under the same number.
        env: its environment; None: this process's.
        output: where its standard output and errors go, as for `subprocess.Popen`; None: where this process's go.
    """
    return subprocess.Popen(
        [sys.executable, *ISOLATED, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(descriptor,),
        env=env,
        start_new_session=True,
    )
