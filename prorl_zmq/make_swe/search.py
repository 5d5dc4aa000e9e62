"""`make_instances`: finds and verifies the bugs of one project.

Mutations are tried one after the other in one sandbox, with the tests that reach the changed function. Those that break
a few tests are verified concurrently, each in a fresh sandbox, where all tests run twice with the bug and twice with
the gold patch.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ..errors import SandboxFailed, SandboxLimitExceeded
from .candidates import Candidates
from .project import git
from .project_image import TESTBED
from .source_text import SourceText
from .statement import examples, write
from .suite import GIT_LIMIT_S, LOG_PARSER, is_test_file, measure, probe_suite, run_suite, suite_command

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from ..tools.images.image import Image
    from ..tools.sandbox.sandbox import Sandbox
    from .candidates import Candidate
    from .mutation import Mutation
    from .project import Project
    from .recipe import Order, Settings
    from .suite import Baseline, Report, SuiteRun

    Opened = Callable[[], AbstractAsyncContextManager[Sandbox]]

T = TypeVar("T")

TIME_FACTOR = 5.0
"""Times the duration of the tests before any change."""
TRY_FLOOR_S, VERIFY_FLOOR_S = 15.0, 60.0
"""Least time limits."""
REPEATS = 2
LEAST_KEPT = 0.9
"""Least share of tests that give the same answer each time."""
DIFF = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--unified=3")
USES_TOO_MUCH = "uses too much memory or too many processes"


class SweRecord(msgspec.Struct, frozen=True):
    """An instance as a line of a data file, in the row format `generic` of the task `swe`."""

    instance_id: str
    repo: str
    version: str
    base_commit: str
    """The repository's only commit."""
    problem_statement: str
    patch: str
    """The gold patch, which removes the bug."""
    bug_patch: str
    """Adds the bug; applied before an agent sees the repository."""
    test_patch: str
    FAIL_TO_PASS: tuple[str, ...]
    PASS_TO_PASS: tuple[str, ...]
    image_name: str
    directory: str
    test_command: str
    """One line of bash, run in `directory`."""
    test_files: list[str]
    """Git pathspecs of files that an agent's patch must not change."""
    log_parser: str


class Made(msgspec.Struct, frozen=True):
    """The result of one project."""

    label: str
    instances: tuple[SweRecord, ...]
    tests: int
    """Reliable tests."""
    unreliable: int
    """Other tests, including those with ids that swebench mangles."""
    flaky: int
    """Tests that verification left out, summed over the instances."""
    tried: int
    """Number of mutations tried."""
    dropped: dict[str, int]
    """Dropped mutations by reason."""
    busy_s: float = 0.0
    """Total time of fetch, build and sandboxes."""


@dataclass(frozen=True)
class Found:
    """A mutation that breaks some tests."""

    candidate: Candidate
    bug_patch: str
    gold_patch: str
    failing: frozenset[str]
    statement: str


@dataclass(frozen=True)
class Verified:
    found: Found
    fail_to_pass: tuple[str, ...]
    """Node ids, sorted."""
    pass_to_pass: tuple[str, ...]
    """Node ids, sorted."""
    flaky: int


class Patches:
    """Makes patches with git, which temporarily changes the repository: use it in one thread only."""

    def __init__(self, repository: Path, paths: Iterable[str], tests: Sequence[str]) -> None:
        self._repository = repository
        self.sources: dict[str, SourceText] = {}
        """The files that may change, by path."""
        for path in paths:
            file = repository / path
            if is_test_file(path, tests) or not path.endswith(".py") or file.is_symlink() or not file.is_file():
                continue
            try:
                self.sources[path] = SourceText(file.read_bytes())
            except ValueError:
                continue

    def read(self, path: str) -> str:
        """Return a file's text; empty: it is missing or outside of the repository."""
        file = (self._repository / path).resolve()
        if not file.is_relative_to(self._repository.resolve()) or not file.is_file():
            return ""
        return file.read_text("utf-8", "replace")

    def of(self, path: str, mutation: Mutation) -> tuple[str, str]:
        """Return the patch of a mutation, and its reverse."""
        file, source = self._repository / path, self.sources[path]
        file.write_bytes(mutation.apply(source.data))
        try:
            forth = self._diff(path, "--src-prefix=a/", "--dst-prefix=b/")
            back = self._diff(path, "-R", "--src-prefix=b/", "--dst-prefix=a/")
        finally:
            file.write_bytes(source.data)
        return forth, back

    def _diff(self, path: str, *options: str) -> str:
        return git(*DIFF, *options, "--", path, folder=self._repository, problem=f"no patch can be made of {path}")


class Search:
    """The search for bugs in one project; `opened` opens a fresh sandbox from its image."""

    def __init__(
        self, project: Project, order: Order, baseline: Baseline, patches: Patches, settings: Settings, opened: Opened
    ) -> None:
        self._project = project
        self._order = order
        self._baseline = baseline
        self._patches = patches
        self._opened = opened
        self._most_failing = max(1, int(settings.most_failing * len(baseline.tests)))
        seed = f"{settings.seed} {project.label}"
        self.candidates = Candidates(patches.sources, baseline.report, baseline.tests, seed)
        self.command = suite_command(baseline.paths, order.options)
        self.dropped: Counter[str] = Counter()
        self.tried = 0

    async def find(self, number: int) -> list[Found]:
        """Return the next suitable mutations; fewer than `number` only if there are no more."""
        results: list[Found] = []
        while len(results) < number:
            async with self._opened() as sandbox:
                spent = False
                while not spent and len(results) < number:
                    candidate = self.candidates.next()
                    if candidate is None:
                        return results
                    self.tried += 1
                    outcome, spent = await self._try(sandbox, candidate)
                    if isinstance(outcome, Found):
                        self.candidates.accept(candidate)
                        results.append(outcome)
                    else:
                        self.dropped[outcome] += 1
        return results

    async def verify(self, found: Sequence[Found]) -> list[Verified]:
        """Run all tests with each bug and each gold patch; return the bugs that hold."""
        results = await side_by_side([self._verify(each) for each in found])
        self.dropped.update(each for each in results if isinstance(each, str))
        return [each for each in results if isinstance(each, Verified)]

    async def _try(self, sandbox: Sandbox, candidate: Candidate) -> tuple[Found | str, bool]:
        """Run the tests that reach a mutation; return what was found, and whether the sandbox is spent."""
        patch, reverse = await asyncio.to_thread(self._patches.of, candidate.path, candidate.mutation)
        paths = sorted({test.partition("::")[0] for test in candidate.tests})
        limit_s = TRY_FLOOR_S + TIME_FACTOR * self._baseline.took_s
        try:
            await apply(sandbox, patch)
            run, report = await probe_suite(sandbox, paths, limit_s, options=self._order.options, keep=candidate.tests)
            spent = run.timed_out or not await _reset(sandbox)
        except SandboxLimitExceeded:
            return USES_TOO_MUCH, True
        return self._judge(candidate, patch, reverse, run, report), spent

    def _judge(
        self, candidate: Candidate, patch: str, reverse: str, run: SuiteRun, report: Report | None
    ) -> Found | str:
        failing = run.failing(candidate.tests)
        if run.timed_out:
            return "hangs"
        if report is None or run.missing(candidate.tests):
            return "breaks the test run itself"
        if not failing:
            return "no test notices it"
        if len(failing) > self._most_failing:
            return "too many tests fail"
        lines = candidate.mutation.lines(self._patches.sources[candidate.path].data)
        failures = [report.failures[test] for test in sorted(failing) if test in report.failures]
        metadata = self._project.metadata
        shown = examples(failures, self._patches.read, self._project.modules)
        statement = write(metadata.name, metadata.version, shown, len(failing), lines)
        if statement is None:
            return "nothing to show without giving the bug away"
        return Found(candidate, patch, reverse, failing, statement)

    async def _verify(self, found: Found) -> Verified | str:
        limit_s = VERIFY_FLOOR_S + TIME_FACTOR * self._baseline.took_s
        async with self._opened() as sandbox:
            try:
                await apply(sandbox, found.bug_patch)
                bugged = [await run_suite(sandbox, self.command, limit_s) for _ in range(REPEATS)]
                await apply(sandbox, found.gold_patch)
                clean = await sandbox.exec(["git", "diff", "--quiet", "HEAD"], GIT_LIMIT_S, directory=TESTBED)
                fixed = [await run_suite(sandbox, self.command, limit_s) for _ in range(REPEATS)]
            except SandboxLimitExceeded:
                return USES_TOO_MUCH
        if clean.exit_code:
            return "the gold patch does not restore what was there"
        return judge(found, self._baseline, bugged, fixed, self._most_failing)


async def make_instances(
    project: Project, image: Image, order: Order, settings: Settings, opened: Opened, say: Callable[[str], None]
) -> Made:
    """Return as many instances as were ordered, or as the project has."""
    label = project.label
    async with opened() as sandbox:
        baseline = await measure(sandbox, project, order.tests, order.options, settings.limit_s)
    say(f"{label}: {len(baseline.tests)} tests pass in {baseline.took_s:.1f} s, in {' '.join(baseline.paths)}")
    patches = await asyncio.to_thread(Patches, project.folder, baseline.report.lines, baseline.paths)
    search = await asyncio.to_thread(Search, project, order, baseline, patches, settings, opened)
    functions = search.candidates.functions
    say(f"{label}: {len(search.candidates)} mutations of {functions} functions that tests reach")
    verified: list[Verified] = []
    while missing := order.instances - len(verified):
        found = await search.find(missing)
        verified += await search.verify(found)
        say(f"{label}: {len(verified)} of {order.instances} verified, {search.tried} mutations tried")
        if len(found) < missing:
            break
    return Made(
        label=label,
        instances=tuple(_record(each, project, baseline, image.name, search.command) for each in verified),
        tests=len(baseline.tests),
        unreliable=baseline.unreliable,
        flaky=sum(each.flaky for each in verified),
        tried=search.tried,
        dropped=dict(search.dropped),
    )


def judge(
    found: Found, baseline: Baseline, bugged: list[SuiteRun], fixed: list[SuiteRun], most_failing: int
) -> Verified | str:
    """Decide which tests the bug breaks and leaves alone; or return why the instance is dropped.

    A test counts if it gives the same answer in both runs with the bug and passes in both with the gold patch.
    """
    if any(run.timed_out for run in (*bugged, *fixed)):
        return "hangs"
    tests = baseline.tests
    good = tests.intersection(*(run.passed for run in fixed))
    fail_to_pass = good.intersection(*(run.failing(tests) for run in bugged))
    pass_to_pass = good.intersection(*(run.passed for run in bugged))
    flaky = len(tests) - len(fail_to_pass) - len(pass_to_pass)
    if not fail_to_pass:
        return "no test fails each time"
    if not found.failing & fail_to_pass:
        return "other tests fail than those that the statement shows"
    if len(fail_to_pass) > most_failing:
        return "too many tests fail"
    if len(fail_to_pass) + len(pass_to_pass) < LEAST_KEPT * len(tests):
        return "too many tests are flaky"
    return Verified(found, tuple(sorted(fail_to_pass)), tuple(sorted(pass_to_pass)), flaky)


async def apply(sandbox: Sandbox, patch: str) -> None:
    """Apply a patch to the sandbox's repository."""
    argv = ["git", "apply", "--whitespace=nowarn", "-"]
    result = await sandbox.exec(argv, GIT_LIMIT_S, patch.encode(), directory=TESTBED)
    if result.exit_code:
        words = (result.stdout + result.stderr).decode(errors="replace").strip()[-300:]
        raise SandboxFailed(f"a patch does not apply to the image's repository: {words}")


async def _reset(sandbox: Sandbox) -> bool:
    """Undo all changes to the repository; return whether that worked."""
    command = "git checkout --quiet --force HEAD -- . && git clean -ffdxq"
    result = await sandbox.exec(["bash", "-c", command], GIT_LIMIT_S, directory=TESTBED)
    return result.exit_code == 0


async def side_by_side(work: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Await all concurrently; if one fails, cancel the others and raise its own exception."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def encode(made: Iterable[Made]) -> bytes:
    """Return the instances as JSON Lines."""
    return b"".join(msgspec.json.encode(record) + b"\n" for each in made for record in each.instances)


def _record(verified: Verified, project: Project, baseline: Baseline, image: str, command: str) -> SweRecord:
    found = verified.found
    # The same bug in the same release has the same id wherever it is made.
    identity = hashlib.sha256(f"{project.commit}\n{found.bug_patch}".encode()).hexdigest()[:8]
    return SweRecord(
        instance_id=f"{project.label}.{found.candidate.mutation.kind}.{identity}",
        repo=project.metadata.name,
        version=project.metadata.version,
        base_commit=project.commit,
        problem_statement=found.statement,
        patch=found.gold_patch,
        bug_patch=found.bug_patch,
        test_patch="",
        FAIL_TO_PASS=verified.fail_to_pass,
        PASS_TO_PASS=verified.pass_to_pass,
        image_name=image,
        directory=TESTBED,
        test_command=command,
        test_files=baseline.test_files,
        log_parser=LOG_PARSER,
    )
