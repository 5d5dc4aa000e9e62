"""Runs a project's tests in a sandbox, and reads the log with swebench's parser.

    python3 -I -B -m pytest … PATHS

`-I` keeps Python from importing from the working directory, `-B` from writing bytecode, which a mutant of the same size
and second would share. Captured output is not printed, so no test can print lines that look like results. The project's
settings apply except `addopts`, which may name missing plugins.

`measure` runs the tests three times before any change: twice, in opposite order of files, to find those that pass
reliably, and once to record what each test calls.
"""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import msgspec

from ..errors import ConfigError, SandboxFailed
from .project_image import TESTBED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ..tools.sandbox.sandbox import Sandbox
    from .project import Project

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
GIT_LIMIT_S = 60.0
TEST_FOLDERS = ("test", "tests", "testing")
SETTINGS = ("pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml")
HELPERS = ("conftest.py", "*/conftest.py", "*sitecustomize.py", "*usercustomize.py")
"""Git pathspecs of files outside the tests that affect tests."""
LEAST_PASSING = 0.6
"""Least share of tests that pass before any change."""
TRACE_FACTOR = 60
"""Times the duration of the tests while their calls are recorded."""
COMMAND_LIMIT = 100_000
"""Most characters of files in one command: Linux allows 128 KiB per argument."""


class Failure(msgspec.Struct, frozen=True):
    line: int
    """Of the test's file, from 1; 0: no line of it is in the traceback."""
    function_line: int
    path: str
    """Relative to the repository; empty: outside of it."""
    exception: str
    message: str
    variables: dict[str, str]
    """Representations of simple local variables."""


class Report(msgspec.Struct, frozen=True):
    tests: list[str]
    """Node ids; `calls` has indices of this list."""
    calls: dict[str, dict[int, list[int]]]
    """Calling tests by file and first line of a function."""
    lines: dict[str, list[int]]
    """Executed lines by file."""
    failures: dict[str, Failure]


@dataclass(frozen=True)
class SuiteRun:
    statuses: Mapping[str, str]
    """By node id: PASSED, FAILED, ERROR, SKIPPED, XFAIL."""
    unclear: frozenset[str]
    """Ids that swebench confuses or truncates, such as those with spaces."""
    exit_code: int
    """Of pytest: 0 all passed, 1 some failed, 2 interrupted, 4 wrong usage, 5 no tests."""
    timed_out: bool
    took_s: float
    tail: str

    @property
    def passed(self) -> frozenset[str]:
        """Tests that passed, without unclear ids."""
        return frozenset(name for name, status in self.statuses.items() if status == PASSED) - self.unclear

    def failing(self, tests: Collection[str]) -> frozenset[str]:
        """Return the tests that failed or met an error."""
        return frozenset(name for name in tests if self.statuses.get(name) in FAILING)

    def missing(self, tests: Collection[str]) -> frozenset[str]:
        """Return the tests that neither passed nor failed."""
        return frozenset(name for name in tests if self.statuses.get(name) not in (PASSED, *FAILING))


def suite_command(paths: Sequence[str], options: Sequence[str] = ()) -> str:
    return shlex.join(["python3", "-I", "-B", "-m", "pytest", *OPTIONS, *options, *paths])


async def run_suite(
    sandbox: Sandbox, command: str, timeout_s: float, environment: Mapping[str, str] | None = None
) -> SuiteRun:
    started = time.monotonic()
    argv = ["bash", "-c", f"{command} 2>&1"]
    result = await sandbox.exec(argv, timeout_s, b"", OUTPUT_BYTES, environment, TESTBED)
    log = result.stdout.decode(errors="replace")
    return SuiteRun(
        statuses=parse_log(log),
        unclear=unclear_ids(log),
        exit_code=result.exit_code,
        timed_out=result.timed_out,
        took_s=time.monotonic() - started,
        tail=log[-2000:],
    )


async def probe_suite(
    sandbox: Sandbox,
    paths: Sequence[str],
    timeout_s: float,
    *,
    options: Sequence[str] = (),
    keep: Collection[str] | None = None,
    reach: bool = False,
) -> tuple[SuiteRun, Report | None]:
    """Run tests with the probe; the report is None if the run did not finish."""
    kept = None if keep is None else sorted(keep)
    order = msgspec.json.encode({"root": TESTBED, "keep": kept, "reach": reach, "report": REPORT})
    plugin = files(__package__).joinpath("probe.py").read_bytes()
    await sandbox.write_files({ORDER: order, f"/workspace/plugin/{PLUGIN}.py": plugin, REPORT: b""})
    command = shlex.join(["python3", "-B", "-m", "pytest", "-p", PLUGIN, *OPTIONS, *options, *paths])
    environment = {"PYTHONPATH": "/workspace/plugin", "PRORL_PROBE": ORDER}
    run = await run_suite(sandbox, command, timeout_s, environment)
    try:
        return run, msgspec.json.decode(await sandbox.read_file(REPORT, OUTPUT_BYTES), type=Report)
    except msgspec.MsgspecError:
        return run, None


def parse_log(log: str) -> dict[str, str]:
    # swebench takes two seconds to import.
    from swebench.harness.log_parsers.python import parse_log_pytest

    statuses: dict[str, str] = parse_log_pytest(log, None)
    return statuses


def unclear_ids(log: str) -> frozenset[str]:
    """Return the ids that swebench gives to several tests, or truncates."""
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


@dataclass(frozen=True)
class Baseline:
    tests: frozenset[str]
    """Node ids of tests that pass reliably."""
    paths: tuple[str, ...]
    """Files and folders of the tests."""
    report: Report
    took_s: float
    """The longer of two runs."""
    unreliable: int
    """Other tests: failing, skipped, unreliable, or with an unclear id."""

    @property
    def test_files(self) -> list[str]:
        """Git pathspecs of files that an agent must not change."""
        return [*self.paths, *HELPERS, *SETTINGS]


async def measure(
    sandbox: Sandbox, project: Project, paths: Sequence[str], options: Sequence[str], limit_s: float
) -> Baseline:
    label = project.label
    check = "git rev-parse HEAD && git status --porcelain"
    state = await sandbox.exec(["bash", "-c", check], GIT_LIMIT_S, directory=TESTBED)
    if state.stdout.decode().split() != [project.commit]:
        words = (state.stdout + state.stderr).decode(errors="replace").strip()[:300]
        raise SandboxFailed(f"the repository in the image of {label} is not clean at {project.commit[:10]}: {words}")
    first = await run_suite(sandbox, suite_command(paths, options), limit_s)
    _check(first, label, limit_s)
    found = _roots(first.statuses) if not paths else tuple(paths)
    second = await run_suite(sandbox, suite_command(_backwards(first.statuses, found), options), limit_s)
    _check(second, label, limit_s)
    reliable = (first.passed & second.passed) - first.unclear - second.unclear
    allowed = limit_s + TRACE_FACTOR * first.took_s
    third, report = await probe_suite(sandbox, found, allowed, options=options, reach=True)
    if report is None:
        raise ConfigError(
            f"the tests of {label} do not end while their calls are noted: {third.tail[-300:]}", key="repo"
        )
    reliable &= third.passed & frozenset(report.tests)
    if not reliable:
        raise ConfigError(f"no test of {label} has an id that swebench reads", key="repo")
    every = first.statuses.keys() | second.statuses.keys()
    return Baseline(reliable, found, report, max(first.took_s, second.took_s), len(every - reliable))


def is_test_file(path: str, paths: Collection[str]) -> bool:
    """Return whether a file belongs to the tests, not to the code under test."""
    parts = PurePosixPath(path).parts
    return (
        any(part in TEST_FOLDERS for part in parts[:-1])
        or parts[-1].startswith(("test_", "conftest"))
        or any(path == each or path.startswith(f"{each}/") for each in paths)
        or parts[-1] in ("setup.py", "noxfile.py", "conf.py")
    )


def _check(run: SuiteRun, label: str, limit_s: float) -> None:
    if run.timed_out:
        raise ConfigError(f"the tests of {label} take longer than {limit_s:g} s; choose some with --tests", key="repo")
    tail = " / ".join(run.tail.strip().splitlines()[-5:])[-400:]
    if "No module named pytest" in run.tail:
        raise ConfigError(f"{label}: pytest is not among the requirements; add it with --require pytest", key="require")
    failing = run.failing(run.statuses)
    if not run.passed and not failing:
        raise ConfigError(f"no tests were found in {label} (say where they are with --tests): {tail}", key="tests")
    if len(run.passed) < LEAST_PASSING * (len(run.passed) + len(failing)):
        raise ConfigError(
            f"{len(failing)} tests of {label} fail before any change and only {len(run.passed)} pass; a requirement "
            f"may be missing (--require): {tail}",
            key="repo",
        )


def _backwards(ids: Iterable[str], found: Sequence[str]) -> Sequence[str]:
    """Return the tests' files in reverse order; the reversed roots if they do not fit into a command."""
    files = sorted({name.partition("::")[0] for name in ids if "::" in name}, reverse=True)
    return files if sum(len(file) + 3 for file in files) <= COMMAND_LIMIT else found[::-1]


def _roots(ids: Iterable[str]) -> tuple[str, ...]:
    """Return the tests' folders that have a test folder's name, and their other files."""
    roots = set()
    for name in ids:
        path, separator, _ = name.partition("::")
        if not separator:
            continue
        parts = PurePosixPath(path).parts
        at = next((place for place, part in enumerate(parts[:-1]) if part in TEST_FOLDERS), None)
        roots.add(path if at is None else "/".join(parts[: at + 1]))
    return tuple(sorted(roots))
