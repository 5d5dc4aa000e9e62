"""Grader processes under load: answers and tests per second, and the latency of their stage process's loop."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from prorl_zmq import Job, PhaseLimits
from prorl_zmq.stages.grading.grader_pool import GraderPool
from prorl_zmq.stages.handler import EvalPhase
from prorl_zmq.stages.handlers.code import CodeHandler
from prorl_zmq.stages.handlers.math import MathHandler
from prorl_zmq.stages.judge import judge_of_endpoints
from prorl_zmq.stages.other_models import ChatEndpoints
from prorl_zmq.tasks.code import CodeInstance
from prorl_zmq.tasks.math import MathInstance
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes
from prorl_zmq.wire.messages.base import new_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from prorl_zmq.tools.containers.specification import SandboxSpec
    from prorl_zmq.tools.sandbox.sandbox import Sandbox

SLOTS = 8
TICK_S = 0.001
SOLUTION = "import sys\nprint(sum(map(int, sys.stdin.read().split())))\n"
TESTS = 24
"""Of one job."""
ANSWERS = (
    ("\\frac{1}{2}", "so it is \\boxed{0.5}"),
    ("x^2+2x+1", "\\boxed{(x+1)^2}"),
    ("42", "\\boxed{41}"),
    ("\\sqrt{8}", "\\boxed{2\\sqrt{2}}"),
    ("(1, 2]", "\\boxed{(1,2]}"),
    ("\\frac{\\pi}{4}", "\\boxed{45^\\circ}"),
    ("7", "I think that it is seven."),
    ("10", "\\boxed{10**10**10}"),
)


class Rate(NamedTuple):
    """How fast, and how long the loop stood still at worst."""

    per_second: float
    stall_s: float


@asynccontextmanager
async def watched_loop() -> AsyncIterator[list[float]]:
    """Give a list that holds the longest stall of the loop when the block ends."""
    longest = [0.0]

    async def watch() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            longest[0] = max(longest[0], time.monotonic() - before - TICK_S)

    watching = asyncio.create_task(watch())
    try:
        yield longest
    finally:
        watching.cancel()


async def math_rate(answers: int) -> Rate:
    """Grade answers through the math handler's EVAL, eight jobs at a time, as a stage process does."""
    handler = MathHandler()

    async def one(pool: GraderPool, number: int) -> None:
        truth, answer = ANSWERS[number % len(ANSWERS)]
        await handler.eval(_phase(pool, MathInstance(problem="", ground_truth=truth), {"answer": answer}))

    async with GraderPool() as pool:
        await asyncio.gather(*(one(pool, number) for number in range(2 * len(ANSWERS))))  # sympy is there now
        return await _rate(lambda number: one(pool, number), answers)


async def code_rate(jobs: int, kind: Any, folder: Path, image: str = "") -> Rate:
    """Run tests through the code handler's EVAL, eight jobs at a time; the rate is that of the tests."""
    handler = CodeHandler()
    tests = [{"input": f"{number} {number + 1}\n", "output": f"{2 * number + 1}\n"} for number in range(TESTS)]
    sandboxes = Sandboxes(kind, folder / "sandboxes", image=image)
    instance = handler.parse_instance(Job(task="code", instance={"problem": "Add.", "tests": tests}))
    assert isinstance(instance, CodeInstance)

    async def one(pool: GraderPool, number: int) -> None:
        del number
        fresh: list[Sandbox] = []

        async def create(spec: SandboxSpec) -> Sandbox:
            fresh.append(await sandboxes.create(f"bench-{new_id()[:12]}", spec))
            return fresh[-1]

        try:
            evaluation = await handler.eval(_phase(pool, instance, {"source": SOLUTION}, create))
            assert evaluation.reward == 1.0, evaluation.notes
        finally:
            for each in fresh:
                await each.close()

    try:
        async with GraderPool() as pool:
            await one(pool, 0)
            rate = await _rate(lambda number: one(pool, number), jobs)
            return rate._replace(per_second=rate.per_second * TESTS)
    finally:
        sandboxes.close()


async def _rate(work: Any, count: int) -> Rate:
    numbers = iter(range(count))

    async def slot() -> None:
        for number in numbers:
            await work(number)

    async with watched_loop() as stall:
        started = time.monotonic()
        await asyncio.gather(*(slot() for _ in range(SLOTS)))
        wall_s = time.monotonic() - started
    return Rate(count / wall_s, stall[0])


def _phase(pool: GraderPool, instance: Any, data: dict[str, Any], create: Any = None) -> EvalPhase[Any]:
    job = Job(task="bench", instance={}, limits=PhaseLimits(eval_s=600))
    return EvalPhase(job, instance, data, None, create, pool.call, judge_of_endpoints(job, ChatEndpoints()))
