"""Run the tests of one solution one after another, each in a process with its own limits.

Expected answers never enter a sandbox; each answer is judged outside. The driver (`code_driver.py`) looks for leftovers
of earlier tests; after any such finding or failure, the test gets a new sandbox. A solution that exceeds a limit, ends
its sandbox or answers nonsense fails the test. A sandbox that cannot be made, or fails twice when new, raises
`SandboxFailed`.
"""

from __future__ import annotations

import re
import signal
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import SandboxFailed, SandboxLimitExceeded
from ...tools.containers.specification import Limits, SandboxSpec
from ...tools.sandbox.sandbox import CHECK_ENVIRONMENT
from ..cut_text import cut_text
from .code_output import same_result, same_text
from .code_seccomp import childless_program
from .code_source import needed_imports

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...tasks.code import CodeInstance, CodeTest
    from ...tools.execution.messages import ExecResult
    from ...tools.sandbox.sandbox import Sandbox
    from ..handler import EvalPhase

CLOCK_FACTOR, CLOCK_SLACK_S = 2.0, 2.0
"""Clock time of a test, from its CPU time: a factor and seconds on top, since other jobs use the cores too."""
REST_BYTES = 64 * 2**20
"""Memory of a sandbox in addition to the test's."""
FILE_BYTES = 64 * 2**20
HEADER = re.compile(rb"^prorl (?:(dirty)|([0-9]+ [0-9]+))$", re.MULTILINE)
HEADER_BYTES = 2048
"""The driver's line is within this many bytes of the error output; an interpreter may print before it."""
DIRTY = "dirty"
FRESH_TRIES = 2
QUICK_CHARACTERS = 32 * 1024
"""Answers up to this length are compared at once, in a few milliseconds; longer ones in a grader process."""
SHOWN_CHARACTERS = 600
ENVIRONMENT = {
    **CHECK_ENVIRONMENT,
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONINTMAXSTRDIGITS": "0",
}
"""Makes rewards repeatable, limits NumPy to one thread, and removes the limit on integer digits, as in the Python for
which the problems were made."""
NO_PYTHON = (126, 127)


@dataclass(frozen=True, slots=True)
class Verdict:
    passed: bool
    kind: str = ""
    """Why it failed: `wrong answer`, `time limit`, `memory limit`, `output limit`, `runtime error`, `not run`."""
    said: str = ""
    """The solution's answer in short, or the end of its traceback."""


class SolutionRunner:
    """Runs tests one after another. Its last sandbox is closed with the phase."""

    def __init__(self, phase: EvalPhase[CodeInstance], source: str) -> None:
        instance = phase.instance
        self._phase = phase
        self._instance = instance
        self._seconds = ceil(instance.time_s)
        self._command = (
            *("python3", "-c", _driver(), source, needed_imports(source), instance.entry_point),
            *(str(self._seconds), str(instance.memory_bytes), childless_program().hex()),
        )
        limits = Limits(memory_bytes=instance.memory_bytes + REST_BYTES, file_bytes=FILE_BYTES)
        self._spec = SandboxSpec(image=instance.image, limits=limits)
        self._sandbox: Sandbox | None = None
        self._first = ""
        """The driver's line from the first run in the sandbox; empty: there was no run."""

    async def run(self, test: CodeTest, within_s: float) -> Verdict:
        clock_s = min(within_s, self._seconds * CLOCK_FACTOR + CLOCK_SLACK_S)
        try:
            result = await self._ran(test, clock_s)
        except SandboxLimitExceeded as error:
            await self._drop()
            return Verdict(False, "memory limit" if error.limit == "memory_bytes" else "runtime error", error.message)
        if problem := self._problem(result):
            return Verdict(False, problem, _complaint(result) or shown(result.stdout.decode(errors="replace")))
        answer = result.stdout.decode(errors="replace")
        return Verdict(True) if await self._is_right(test, answer) else Verdict(False, "wrong answer", shown(answer))

    async def _ran(self, test: CodeTest, clock_s: float) -> ExecResult:
        """Run a test in the current sandbox; in a new one if that is dirty, or fails."""
        fresh_tries = 0
        while True:
            if self._sandbox is None:
                self._sandbox = await self._phase.create_sandbox(self._spec)
            sandbox, first = self._sandbox, self._first
            fresh_tries += not first
            try:
                result = await sandbox.exec(
                    (*self._command, first),
                    clock_s,
                    stdin=test.input.encode(errors="replace"),
                    output_limit_bytes=self._instance.output_bytes + 2 * HEADER_BYTES,
                    environment=ENVIRONMENT,
                )
                said = _header(result)
                if said not in ("", DIRTY):
                    self._first = first or said
                    if not sandbox.isolated:
                        await self._drop()  # it shares the host, where leftovers of a test cannot be found
                    return result
                if not first:
                    raise _not_started(result, clock_s)
            except SandboxFailed as error:
                if fresh_tries >= FRESH_TRIES or error.fields.get("reason") in ("image", "no_image"):
                    raise
            await self._drop()

    def _problem(self, result: ExecResult) -> str:
        """Return why a test failed regardless of its answer; empty: compare the answer."""
        if result.timed_out or result.exit_code == 128 + signal.SIGXCPU:
            return "time limit"
        if len(result.stdout) > self._instance.output_bytes:
            return "output limit"
        if result.exit_code == 0:
            return ""
        last = result.stderr.rstrip().rpartition(b"\n")[2]
        return "memory limit" if last.startswith(b"MemoryError") else "runtime error"

    async def _is_right(self, test: CodeTest, answer: str) -> bool:
        compare: Callable[..., bool] = same_text
        more: tuple[bool | str, ...] = (self._instance.comparison,)
        if self._instance.entry_point:
            compare, more = same_result, (self._instance.wrapped_outputs, *more)
        if len(test.output) + len(answer) <= QUICK_CHARACTERS:
            return compare(test.output, answer, *more)
        right: bool = await self._phase.grade(compare, test.output, answer, *more, returns=bool)
        return right

    async def _drop(self) -> None:
        sandbox, self._sandbox, self._first = self._sandbox, None, ""
        if sandbox is not None:
            with suppress(SandboxFailed):  # the service retries when the phase ends, and logs it
                await sandbox.close()


def shown(text: str) -> str:
    return cut_text(text, SHOWN_CHARACTERS)


def _header(result: ExecResult) -> str:
    """Return the line that the driver wrote before the solution began; empty: there is none."""
    match = HEADER.search(result.stderr[:HEADER_BYTES])
    return "" if match is None else (match[1] or match[2]).decode()


def _complaint(result: ExecResult) -> str:
    """Return the end of a solution's error output after the driver's line."""
    match = HEADER.search(result.stderr[:HEADER_BYTES])
    return result.stderr[match.end() if match else 0 :].decode(errors="replace").strip()[-SHOWN_CHARACTERS:]


def _not_started(result: ExecResult, clock_s: float) -> SandboxFailed:
    words = result.stderr.decode(errors="replace").strip()[-SHOWN_CHARACTERS:]
    if result.exit_code in NO_PYTHON:
        return SandboxFailed(f"the image has no python3 that can be run: {words}", reason="image")
    why = f"was not ready within {clock_s:g} s" if result.timed_out else f"ended with {result.exit_code}"
    return SandboxFailed(f"python3 {why} before a test began: {words}", reason="start")


@cache
def _driver() -> str:
    return Path(__file__).with_name("code_driver.py").read_text("utf-8")
