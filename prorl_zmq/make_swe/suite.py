"""One run of a project's tests in a sandbox: the command, and what its log says by swebench's own parser.

    python3 -I -B -m pytest … PATHS

`-I` keeps Python from importing anything from the working directory or the environment before the project's own files,
`-B` from writing bytecode: a mutant of the same size within the same second would otherwise run as the one before it.
Captured output is not printed, so that no test can print lines that look like results. The settings of the project
hold but for `addopts`, which name plugins that are not there (`--cov`, `-n`).
"""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec

from .environment import TESTBED

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ..tools.execution.messages import ExecResult
    from ..tools.sandbox.sandbox import Sandbox

LOG_PARSER = "parse_log_pytest"
OPTIONS = (
    *("-rA", "-q", "--tb=no", "--show-capture=no", "--color=no", "-p", "no:cacheprovider", "-o", "addopts="),
    *("--rootdir=.", "--continue-on-collection-errors"),
)
OUTPUT_BYTES = 32 * 2**20
PLUGIN = "prorl_probe"
ORDER, REPORT = "/workspace/probe.json", "/workspace/report.json"
PASSED = "PASSED"
FAILING = ("FAILED", "ERROR")


class Failure(msgspec.Struct, frozen=True):
    """What a failing test said."""

    line: int
    """Of the test's file, counted from 1; 0 if no line of it was on the way to the exception."""
    function_line: int
    path: str
    """Relative to the repository; empty for one outside of it."""
    exception: str
    """The exception's class."""
    message: str
    variables: dict[str, str]
    """Representations of the function's simple variables."""


class Report(msgspec.Struct, frozen=True):
    """What the probe saw."""

    tests: list[str]
    """Node ids; the numbers in `calls` are places in this list."""
    calls: dict[str, dict[int, list[int]]]
    """By file and first line of a function: which tests call it."""
    lines: dict[str, list[int]]
    """By file: the lines that ran."""
    failures: dict[str, Failure]
    """By node id."""


@dataclass(frozen=True)
class SuiteRun:
    """What became of a run of tests."""

    statuses: Mapping[str, str]
    """By node id as swebench reads it from the log: PASSED, FAILED, ERROR, SKIPPED, XFAIL."""
    unclear: frozenset[str]
    """Ids that swebench cannot tell apart or cuts short, such as those with spaces."""
    exit_code: int
    """Of pytest: 0 all passed, 1 some failed, 2 interrupted, 4 wrong usage, 5 no tests."""
    timed_out: bool
    took_s: float
    tail: str
    """The log's end."""

    @property
    def passed(self) -> frozenset[str]:
        """Tests that passed and have a clear id."""
        return frozenset(name for name, status in self.statuses.items() if status == PASSED) - self.unclear

    def failing(self, tests: Collection[str]) -> frozenset[str]:
        """Return which of these tests failed or met an error."""
        return frozenset(name for name in tests if self.statuses.get(name) in FAILING)

    def missing(self, tests: Collection[str]) -> frozenset[str]:
        """Return which of these tests neither passed nor failed."""
        return frozenset(name for name in tests if self.statuses.get(name) not in (PASSED, *FAILING))


def suite_command(paths: Sequence[str], options: Sequence[str] = ()) -> str:
    """Return the bash line that runs the tests in `/testbed`."""
    return shlex.join(["python3", "-I", "-B", "-m", "pytest", *OPTIONS, *options, *paths])


async def run_suite(sandbox: Sandbox, command: str, timeout_s: float) -> SuiteRun:
    """Run the tests as an instance's evaluation does.

    Raises:
        SandboxFailed: the sandbox is gone.
        SandboxLimitExceeded: the tests used more than a sandbox may.
    """
    started = time.monotonic()
    result = await sandbox.exec(["bash", "-c", f"{command} 2>&1"], timeout_s, b"", OUTPUT_BYTES, directory=TESTBED)
    return _read(result, time.monotonic() - started)


async def probe_suite(
    sandbox: Sandbox,
    paths: Sequence[str],
    timeout_s: float,
    *,
    options: Sequence[str] = (),
    keep: Collection[str] | None = None,
    reach: bool = False,
) -> tuple[SuiteRun, Report | None]:
    """Run tests with the probe; the report is None if the run did not come to its end.

    Raises:
        SandboxFailed: the sandbox is gone.
        SandboxLimitExceeded: the tests used more than a sandbox may.
    """
    kept = None if keep is None else sorted(keep)
    order = msgspec.json.encode({"root": TESTBED, "keep": kept, "reach": reach, "report": REPORT})
    plugin = files(__package__).joinpath("probe.py").read_bytes()
    await sandbox.write_files({ORDER: order, f"/workspace/plugin/{PLUGIN}.py": plugin, REPORT: b""})
    argv = ["python3", "-B", "-m", "pytest", "-p", PLUGIN, *OPTIONS, *options, *paths]
    started = time.monotonic()
    result = await sandbox.exec(
        ["bash", "-c", f"{shlex.join(argv)} 2>&1"],
        timeout_s,
        b"",
        OUTPUT_BYTES,
        {"PYTHONPATH": "/workspace/plugin", "PRORL_PROBE": ORDER},
        TESTBED,
    )
    run = _read(result, time.monotonic() - started)
    try:
        return run, msgspec.json.decode(await sandbox.read_file(REPORT, OUTPUT_BYTES), type=Report)
    except msgspec.MsgspecError:
        return run, None


def _read(result: ExecResult, took_s: float) -> SuiteRun:
    log = result.stdout.decode(errors="replace")
    return SuiteRun(
        statuses=parse_log(log),
        unclear=unclear_ids(log),
        exit_code=result.exit_code,
        timed_out=result.timed_out,
        took_s=took_s,
        tail=log[-2000:],
    )


def parse_log(log: str) -> dict[str, str]:
    """Return the tests' statuses as swebench reads them."""
    # swebench takes two seconds to import.
    from swebench.harness.log_parsers.python import parse_log_pytest

    statuses: dict[str, str] = parse_log_pytest(log, None)
    return statuses


def unclear_ids(log: str) -> frozenset[str]:
    """Return the ids of a log that swebench gives to several tests, or that are only a part of a test's id."""
    seen: set[str] = set()
    unclear: set[str] = set()
    for line in log.split("\n"):
        words = line.split()
        if len(words) < 2 or words[0] not in (PASSED, *FAILING):
            continue
        if words[1] in seen or (words[0] == PASSED and line != f"{PASSED} {words[1]}") or "::" not in words[1]:
            unclear.add(words[1])
        seen.add(words[1])
    return frozenset(unclear)
