"""The `code` task: a programming problem, optional tools, and hidden tests that decide the reward.

The answer is `solution.py` in the agent's workspace, or else the last code block of its last message. EVAL gets only
that text, and runs the tests in fresh sandboxes (`code_runner.py`); `code_output.py` compares the answers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, ClassVar

from ...errors import SandboxFailed
from ...tasks.code import CodeInstance, CodeTest, chosen_tests
from ...tasks.code_formats import ROW_FORMATS
from ...tools.containers.specification import SandboxSpec
from ...tools.toolbox import Toolbox
from ..cut_text import is_whole
from ..handler import AgentHandler, EvalPhase, Evaluation, InitPhase, PhaseData, RunPhase
from .code_runner import SolutionRunner, Verdict, shown
from .code_source import SOURCE_LIMIT_BYTES, last_block
from .tool_episode import run_episode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...tasks.row_format import RowFormat
    from ...tools.sandbox.sandbox import Sandbox

SYSTEM_MESSAGE = "You are an expert Python programmer. Solve the problem with a program that passes all of its tests."
SOLUTION = "solution.py"
UNREADABLE = frozenset({"missing", "link", "kind", "size", "system"})
"""Reasons why the file has no answer for which the agent is responsible."""
RUNNERS = 2
"""Tests of one job that run at the same time, if there are enough."""
TESTS_PER_RUNNER = 4
"""With fewer tests, another sandbox costs more than it gains: about 35 ms on a slow core; a test takes 25 ms."""
LEAST_S = 2.0
"""Seconds; a test is not started with less time left."""
OVER = "the tests before it took all the time that EVAL has"
TESTS_SHARE = 0.8
"""The tests' share of EVAL's time: if they exhaust it, the job still ends with a reward, not with a timeout."""


class CodeHandler(AgentHandler[CodeInstance]):
    task = "code"
    instance_type = CodeInstance
    row_formats: ClassVar[tuple[RowFormat, ...]] = ROW_FORMATS

    async def init(self, phase: InitPhase[CodeInstance]) -> PhaseData:
        """Make the agent's sandbox and start its tool sessions; without tools, make none."""
        instance = phase.instance
        if not instance.tools:
            return {}
        sandbox = await phase.create_sandbox(SandboxSpec(image=instance.image))
        return {"sessions": await Toolbox(sandbox, instance.tools).start()}

    async def run(self, phase: RunPhase[CodeInstance]) -> PhaseData:
        instance = phase.instance
        home = phase.sandbox.directory if phase.sandbox is not None else ""
        episode = await run_episode(phase, instance.tools, SYSTEM_MESSAGE, question(instance, home))
        source = None
        if phase.sandbox is not None:
            await phase.sandbox.end_processes()  # a tool process could keep its file from being read
            source = await _written(phase.sandbox)
        for text in (episode.final_message, episode.last_text):
            source = source or last_block(text or "")
        return {"source": (source or "")[: SOURCE_LIMIT_BYTES + 1]}

    def stored_data(self, instance: CodeInstance, notes: Mapping[str, str]) -> PhaseData | None:
        del instance
        return {"source": notes["source"]} if is_whole(notes.get("source")) else None

    async def eval(self, phase: EvalPhase[CodeInstance]) -> Evaluation:
        """Run the tests on the answer; a missing or unfit answer earns 0."""
        instance = phase.instance
        tests = chosen_tests(instance.tests, instance.max_tests)
        left_out = instance.left_out + len(instance.tests) - len(tests)
        source = str(phase.data.get("source", ""))
        if problem := _unfit(source):
            metrics = _metrics(tests, {}, left_out)
            notes = {"tests": f"0 of {len(tests)} passed: {problem}", "source": source}
            return Evaluation(0.0, metrics, notes)
        verdicts = await SolutionTests(phase, source, tests).run()
        passed = sum(verdict.passed for verdict in verdicts.values())
        share = passed / len(tests)
        reward = share if instance.reward == "fraction" else float(passed == len(tests))
        return Evaluation(reward, _metrics(tests, verdicts, left_out), {**_notes(tests, verdicts), "source": source})


class SolutionTests:
    """Runs the tests of one solution on several runners; with reward `all`, until the first failure."""

    def __init__(self, phase: EvalPhase[CodeInstance], source: str, tests: list[CodeTest]) -> None:
        self._phase = phase
        self._source = source
        self._waiting = deque(enumerate(tests))
        self._verdicts: dict[int, Verdict] = {}
        self._stops = phase.instance.reward == "all"
        self._running: list[asyncio.Task[None]] = []

    async def run(self) -> dict[int, Verdict]:
        """Return the verdicts by test number, from 0; tests that did not run are missing."""
        self._until = asyncio.get_running_loop().time() + TESTS_SHARE * self._phase.job.limits.eval_s
        # Most wrong solutions fail the first test, and need no second runner.
        first = SolutionRunner(self._phase, self._source)
        await self._next(first)
        more = min(RUNNERS, len(self._waiting) // TESTS_PER_RUNNER) - 1
        runners = [first, *(SolutionRunner(self._phase, self._source) for _ in range(more))]
        try:
            async with asyncio.TaskGroup() as group:
                self._running = [group.create_task(self._work(runner)) for runner in runners]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return dict(sorted(self._verdicts.items()))

    async def _work(self, runner: SolutionRunner) -> None:
        while self._waiting:
            await self._next(runner)

    async def _next(self, runner: SolutionRunner) -> None:
        number, test = self._waiting.popleft()
        left_s = self._until - asyncio.get_running_loop().time()
        if left_s <= LEAST_S and not self._verdicts:
            limit_s = self._phase.job.limits.eval_s
            raise SandboxFailed(f"EVAL's {limit_s:g} s (limits.eval_s) leave no time for tests", reason="start")
        verdict = await runner.run(test, left_s) if left_s > LEAST_S else Verdict(False, "not run", OVER)
        self._verdicts[number] = verdict
        if self._stops and not verdict.passed:
            self._waiting.clear()
            for task in self._running:
                if task is not asyncio.current_task():
                    task.cancel()


def question(instance: CodeInstance, home: str) -> str:
    parts = [instance.problem.strip()]
    if instance.starter_code:
        parts.append(f"Begin with this code:\n```python\n{instance.starter_code}\n```")
    if instance.entry_point:
        parts.append(f"The tests call `{instance.entry_point}` with their arguments, and look at what it returns.")
    else:
        parts.append("The program reads from standard input and writes the answer to standard output.")
    parts.append(f"Each test may take {instance.time_s:g} s and {instance.memory_bytes >> 20} MiB.")
    if instance.tools:
        parts.append(f"Write the whole solution to `{home}/{SOLUTION}`, or give it as the last code block you write.")
    else:
        parts.append("Give the whole solution as the last code block of your answer, between ```python and ```.")
    return "\n\n".join(parts)


async def _written(sandbox: Sandbox) -> str | None:
    """Return the solution in the agent's workspace, if it is readable and not empty."""
    try:
        data = await sandbox.read_file(SOLUTION, SOURCE_LIMIT_BYTES)
    except SandboxFailed as error:
        if error.fields.get("reason") not in UNREADABLE:
            raise
        return None
    text = data.decode("utf-8-sig", "replace")
    return text if text.strip() else None


def _unfit(source: str) -> str:
    """Return why a text cannot be a solution; empty: it can."""
    if not source.strip():
        return "there is no answer"
    if "\0" in source:
        return "the answer has a NUL in it"
    try:
        size = len(source.encode())
    except UnicodeEncodeError:
        return "the answer is not text"
    return f"the answer has more than the {SOURCE_LIMIT_BYTES} bytes that are run" if size > SOURCE_LIMIT_BYTES else ""


def _metrics(tests: list[CodeTest], verdicts: dict[int, Verdict], left_out: int) -> dict[str, float]:
    return {
        "tests": float(len(tests)),
        "tests_run": float(len(verdicts)),
        "tests_passed": float(sum(verdict.passed for verdict in verdicts.values())),
        "tests_left_out": float(left_out),
    }


def _notes(tests: list[CodeTest], verdicts: dict[int, Verdict]) -> dict[str, str]:
    passed = sum(verdict.passed for verdict in verdicts.values())
    notes = {"tests": f"{passed} of {len(tests)} passed, {len(verdicts)} were run"}
    failed = next((number for number, verdict in verdicts.items() if not verdict.passed), None)
    if failed is not None:
        test, verdict = tests[failed], verdicts[failed]
        what = "got" if verdict.kind == "wrong answer" else "said"
        notes["first_failure"] = (
            f"test {failed + 1}: {verdict.kind}\n\ninput:\n{shown(test.input)}\n\nexpected:\n{shown(test.output)}\n\n"
            f"{what}:\n{verdict.said}"
        )
    return notes
