"""Tries mutations one after the other in one sandbox, until enough of them make some tests fail and leave most alone.

Only the tests that reach the changed function run here, with the probe, which also reports what the statement needs. A
mutant that hangs or uses too much memory is killed with its sandbox.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import SandboxFailed, SandboxLimitExceeded
from .environment import TESTBED
from .statement import examples, write
from .suite import probe_suite

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from ..tools.sandbox.sandbox import Sandbox
    from .baseline import Baseline
    from .candidates import Candidate, Candidates
    from .patches import Patches
    from .project import Project
    from .suite import Report, SuiteRun

TIME_FACTOR, TIME_FLOOR_S = 5.0, 15.0
"""A mutant's tests may take so much longer than all tests without a bug, and this in any case."""
GIT_LIMIT_S = 60.0


@dataclass(frozen=True)
class Found:
    candidate: Candidate
    bug_patch: str
    gold_patch: str
    failing: frozenset[str]
    statement: str


class Search:
    def __init__(
        self,
        project: Project,
        baseline: Baseline,
        candidates: Candidates,
        patches: Patches,
        *,
        most_failing: int,
        options: Sequence[str],
        opened: Callable[[], AbstractAsyncContextManager[Sandbox]],
    ) -> None:
        self._project = project
        self._baseline = baseline
        self._candidates = candidates
        self._patches = patches
        self._most_failing = most_failing
        self._options = options
        self._opened = opened
        self.dropped: Counter[str] = Counter()
        """Why mutations were not taken."""
        self.tried = 0

    async def find(self, number: int) -> list[Found]:
        """Return the next mutations that will do: as many as are asked for, fewer only if there are no more."""
        results: list[Found] = []
        while len(results) < number:
            async with self._opened() as sandbox:
                spent = False
                while not spent and len(results) < number:
                    candidate = self._candidates.next()
                    if candidate is None:
                        return results
                    self.tried += 1
                    outcome, spent = await self._try(sandbox, candidate)
                    if isinstance(outcome, Found):
                        self._candidates.accept(candidate)
                        results.append(outcome)
                    else:
                        self.dropped[outcome] += 1
        return results

    async def _try(self, sandbox: Sandbox, candidate: Candidate) -> tuple[Found | str, bool]:
        """Run the tests that reach a mutation; return what it is good for, and whether the sandbox is spent."""
        patch, reverse = await asyncio.to_thread(self._patches.of, candidate.path, candidate.mutation)
        paths = sorted({test.partition("::")[0] for test in candidate.tests})
        limit_s = TIME_FLOOR_S + TIME_FACTOR * self._baseline.took_s
        try:
            await apply(sandbox, patch)
            run, report = await probe_suite(sandbox, paths, limit_s, options=self._options, keep=candidate.tests)
            spent = run.timed_out or not await reset(sandbox)
        except SandboxLimitExceeded:
            return "uses too much memory or too many processes", True
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
        told = [report.failures[test] for test in sorted(failing) if test in report.failures]
        metadata = self._project.metadata
        shown = examples(told, self._patches.read, self._project.modules)
        statement = write(metadata.name, metadata.version, shown, len(failing), lines)
        if statement is None:
            return "nothing to show without giving the bug away"
        return Found(candidate, patch, reverse, failing, statement)


async def reset(sandbox: Sandbox) -> bool:
    """Undo all changes to the sandbox's repository; return whether that could be done."""
    command = "git checkout --quiet --force HEAD -- . && git clean -ffdxq"
    result = await sandbox.exec(["bash", "-c", command], GIT_LIMIT_S, directory=TESTBED)
    return result.exit_code == 0


async def apply(sandbox: Sandbox, patch: str) -> None:
    """Apply a patch to the sandbox's repository."""
    argv = ["git", "apply", "--whitespace=nowarn", "-"]
    result = await sandbox.exec(argv, GIT_LIMIT_S, patch.encode(), directory=TESTBED)
    if result.exit_code:
        words = (result.stdout + result.stderr).decode(errors="replace").strip()[-300:]
        raise SandboxFailed(f"a patch does not apply to the image's repository: {words}")
