"""Grading by `math-verify` in one child process, started with the first answer and ended with its owner."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from ...processes import die_with_parent


class MathGrader:
    """Compares answers with ground truths, one at a time."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    async def grade(self, ground_truth: str, answer: str) -> bool:
        """Tell whether `answer` is mathematically equal to `ground_truth`; an answer that cannot be read is not.

        Raises:
            BrokenProcessPool: the child process died twice over this answer.
        """
        try:
            return await self._grade(ground_truth, answer)
        except BrokenProcessPool:
            # An answer graded before this one may have brought the child down.
            self.close()
            return await self._grade(ground_truth, answer)

    def close(self) -> None:
        """End the child process; the next answer starts another."""
        pool, self._pool = self._pool, None
        if pool is not None:
            processes = list((pool._processes or {}).values())  # noqa: SLF001 - the pool has no public way to kill
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()

    async def _grade(self, ground_truth: str, answer: str) -> bool:
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            # With our pid: the child may come to it when this process has been killed already, and would wait for ever.
            self._pool = ProcessPoolExecutor(1, spawn, initializer=die_with_parent, initargs=(os.getpid(),))
        return await asyncio.get_running_loop().run_in_executor(self._pool, equal_answers, ground_truth, answer)


def equal_answers(ground_truth: str, answer: str) -> bool:
    """Compare by math-verify, within its time limits (they use SIGALRM, so this must be a process's main thread)."""
    from math_verify import parse, verify

    # Ground truths come bare ("1/2") as well as in LaTeX; math-verify reads LaTeX only inside a math environment.
    gold = parse(f"${ground_truth.strip().strip('$')}$")
    return bool(gold) and bool(verify(gold, parse(answer)))
