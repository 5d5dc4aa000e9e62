"""What a project's tests do before any change: which can be relied on, and which functions they reach.

All tests run twice, the second time with their files in the reverse order; only those that pass both times count. A
third run notes what each test calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from ..errors import ConfigError, SandboxFailed
from .environment import TESTBED
from .suite import probe_suite, run_suite, suite_command

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from ..tools.sandbox.sandbox import Sandbox
    from .project import Project
    from .suite import Report, SuiteRun

TEST_FOLDERS = ("test", "tests", "testing")
SETTINGS = ("pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml")
HELPERS = ("conftest.py", "*/conftest.py", "*sitecustomize.py", "*usercustomize.py")
"""Git pathspecs of files beside the tests that decide what tests do."""
LEAST_PASSING = 0.6
"""Share of the tests that must pass before any change."""
TRACE_FACTOR = 60
"""How much longer tests may take while their calls are noted."""
GIT_LIMIT_S = 60.0
COMMAND_LIMIT = 100_000
"""Most characters of files in one command: Linux takes 128 KiB in an argument."""


@dataclass(frozen=True)
class Baseline:
    tests: frozenset[str]
    """Node ids that pass each time."""
    paths: tuple[str, ...]
    """Files and folders with all the tests."""
    report: Report
    """What they reach."""
    took_s: float
    """The longer of the two runs."""
    unreliable: int
    """Tests left out: they fail, are skipped, differ between the runs, or have an id that swebench mangles."""

    @property
    def test_files(self) -> list[str]:
        """Git pathspecs of what an agent must not change to win."""
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
    """Return whether a file of the repository belongs to the tests, not to what they test."""
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
    """Return the files that have these tests from the last to the first; if they fill a command, the roots."""
    files = sorted({name.partition("::")[0] for name in ids if "::" in name}, reverse=True)
    return files if sum(len(file) + 3 for file in files) <= COMMAND_LIMIT else found[::-1]


def _roots(ids: Iterable[str]) -> tuple[str, ...]:
    """Return the folders that are called like test folders, and files elsewhere, that have these tests."""
    roots = set()
    for name in ids:
        path, separator, _ = name.partition("::")
        if not separator:
            continue
        parts = PurePosixPath(path).parts
        at = next((place for place, part in enumerate(parts[:-1]) if part in TEST_FOLDERS), None)
        roots.add(path if at is None else "/".join(parts[: at + 1]))
    return tuple(sorted(roots))
