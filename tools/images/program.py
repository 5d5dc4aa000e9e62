"""Runs a building program under a guard: reads its output line by line and limits its time.

The program has no terminal and no input. It inherits the build's lock, which is free only after the program and all
that it started have ended (see `guard`). ^C of the terminal reaches only the builder, which stops the program.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from ...errors import SandboxFailed
from ...system.processes import ISOLATED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from .guard import Namespaces

GUARD = (sys.executable, *ISOLATED, "-m", f"{__package__}.guard")
STOP_LIMIT_S = 10.0
"""How long a guard may take to kill what it started."""
CHUNK_BYTES = 64 * 1024
LINE_LIMIT = 400
"""Most characters of a line that are kept; a broken tool may print megabytes without an end of line."""
LAST_LINES = 12
"""How many of a failed program's last lines its error has."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
CHATTER = re.compile(r"INFO: |WARNING: (Skipping mount|Error changing the container working directory)|\+ |I: ")
"""Lines that explain no failure."""


def run_program(
    argv: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    timeout_s: float,
    heard: Callable[[str], None],
    inherited: Sequence[int] = (),
    namespaces: Namespaces = "none",
    mounts: Mapping[str, Path] | None = None,
) -> None:
    """Run a program to its end; call `heard` with each line that it prints to standard output or error.

    It is killed with all that it started after `timeout_s`. `environment` is its whole environment; it and its children
    inherit the descriptors `inherited`. `mounts`, for `contained`: the folder of each target; that of `/` is the root.
    """
    name = os.path.basename(argv[0])  # noqa: PTH119 - of an argument
    last: deque[str] = deque(maxlen=LAST_LINES)
    mounted = [f"{target}={source}" for target, source in (mounts or {}).items()]
    with subprocess.Popen(
        [*GUARD, namespaces, *map(str, inherited), *mounted, "--", *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env=dict(environment),
        pass_fds=inherited,
        start_new_session=True,
    ) as guard:
        try:
            for line in _lines(guard, time.monotonic() + timeout_s):
                heard(line)
                if not CHATTER.match(line):
                    last.append(line)
        except TimeoutError:
            raise SandboxFailed(
                f"{name} took longer than {round(timeout_s, 1):g} s and was stopped{_words(last)}"
            ) from None
        finally:
            _stop(guard)
    if guard.returncode != 0:
        raise SandboxFailed(
            f"{name} failed with exit code {guard.returncode}{_words(last)}", exit_code=guard.returncode
        )


def _lines(guard: subprocess.Popen[bytes], deadline: float) -> Iterator[str]:
    assert guard.stdout is not None
    source = guard.stdout.fileno()
    watched = select.poll()
    watched.register(source, select.POLLIN)
    rest = b""
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not watched.poll(left_s * 1000):
            raise TimeoutError
        chunk = os.read(source, CHUNK_BYTES)
        *lines, rest = re.split(rb"[\r\n]+", rest + chunk)
        for line in lines if chunk else [rest]:
            if text := _plain(line):
                yield text
        if not chunk:
            return
        rest = rest[:CHUNK_BYTES]


def _plain(line: bytes) -> str:
    text = COLOURS.sub("", line[: 4 * LINE_LIMIT].decode("utf-8", "replace"))[:LINE_LIMIT]
    return "".join(each if each.isprintable() else " " for each in text).strip()


def _words(last: deque[str]) -> str:
    return f": {' / '.join(last)}" if last else "; it said nothing"


def _stop(guard: subprocess.Popen[bytes]) -> None:
    """Close the guard's input, upon which it kills what still runs, and wait for that."""
    assert guard.stdin is not None
    guard.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        guard.wait(STOP_LIMIT_S)
        return
    guard.kill()
    guard.wait()
