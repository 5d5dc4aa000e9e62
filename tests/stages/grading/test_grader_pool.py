"""Grader processes under functions that behave and functions that do not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from command_lines import line_of
from support.waiting import until

from prorl_zmq.errors import Closed, GraderFailed
from prorl_zmq.stages.grading.grader_pool import GraderPool
from prorl_zmq.stages.handlers.math_answers import right_answer
from prorl_zmq.system.open_files import raise_open_files

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

sys.path.append(str(Path(__file__).parent))  # the graders get this process's path
import judges


def pooled(use: Callable[[GraderPool], Awaitable[Any]], processes: int = 2) -> Any:
    async def run() -> Any:
        async with GraderPool(processes) as pool:
            return await use(pool)

    others = _graders()  # of a service that other tests of this process share
    result = asyncio.run(asyncio.wait_for(run(), 60))
    assert _graders() - others == set()
    return result


def failure(function: Callable[..., Any], *arguments: Any, timeout_s: float = 30.0, **options: Any) -> GraderFailed:
    async def use(pool: GraderPool) -> GraderFailed:
        with pytest.raises(GraderFailed) as caught:
            await pool.call(function, *arguments, timeout_s=timeout_s, **options)
        assert await pool.call(judges.equal, "1", "1") == 1.0  # the pool goes on
        return caught.value

    return pooled(use)


def test_result_comes_back() -> None:
    async def use(pool: GraderPool) -> list[float]:
        return [await pool.call(judges.equal, "1", answer) for answer in "12"]

    assert pooled(use) == [1.0, 0.0]


def test_graders_start_where_many_files_are_open() -> None:
    """A stage process may have one for each connection and tool call; `select` ended the graders beyond 1,024."""
    raise_open_files()
    with ExitStack() as opened:
        for _ in range(1100):
            opened.enter_context(Path(os.devnull).open("rb"))
        test_result_comes_back()


def test_process_is_used_again() -> None:
    async def use(pool: GraderPool) -> set[int]:
        return {await pool.call(judges.pid, returns=int) for _ in range(5)}

    (pid,) = pooled(use)
    assert pid != os.getpid()


@pytest.mark.proof(quick=True)
def test_calls_run_side_by_side() -> None:
    async def use(pool: GraderPool) -> int:
        """Three calls of two processes: the pool has no room for a third."""
        slow = [asyncio.create_task(pool.call(judges.sleep, 600.0, timeout_s=2.0)) for _ in range(2)]
        third = asyncio.create_task(pool.call(judges.pid, returns=int))
        done, _ = await asyncio.wait(slow, return_when=asyncio.ALL_COMPLETED)
        assert all(isinstance(each.exception(), GraderFailed) for each in done)
        return await third

    assert pooled(use) > 0


def test_function_that_hangs_is_killed_with_what_it_printed() -> None:
    error = failure(judges.sleep, 600.0, timeout_s=2.0)
    assert (error.reason, error.output) == ("hung", "good night\n")


def test_loop_goes_on_while_a_function_spins() -> None:
    async def use(pool: GraderPool) -> int:
        ticks = 0
        call = asyncio.create_task(pool.call(judges.spin, timeout_s=2.0))
        while not call.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert isinstance(call.exception(), GraderFailed)
        return ticks

    assert pooled(use) > 20


@pytest.mark.proof(quick=True)
def test_what_a_function_started_ends_with_it(tmp_path: Path) -> None:
    error = failure(judges.leave, str(tmp_path / "pid"), timeout_s=2.0)
    assert error.reason == "hung"
    left = int((tmp_path / "pid").read_text())
    until(lambda: not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE, "its end")


@pytest.mark.usefixtures("started_from_nothing")  # the frames of a fork would leave no room for what it printed
def test_function_that_crashes_says_where() -> None:
    error = failure(judges.crash)
    assert error.reason == "crashed"
    assert error.output.startswith("about to crash\n")
    assert "judges.py" in error.output


def test_crash_of_a_process_that_had_answered_others_is_tried_in_a_fresh_one() -> None:
    async def use(pool: GraderPool) -> list[float]:
        return [await pool.call(judges.die_the_second_time) for _ in range(3)]

    assert pooled(use, processes=1) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("function", "said"),
    [(judges.leave_by_exit, "SystemExit"), (judges.eat, "MemoryError"), (judges.chatter, "OSError")],
)
def test_function_that_raises(function: Callable[[], float], said: str) -> None:
    error = failure(function)
    assert error.reason == "raised"
    assert said in error.message


def test_function_that_raises_says_where() -> None:
    error = failure(judges.divide)
    assert (error.reason, error.message) == ("raised", "the grader divide raised ZeroDivisionError: division by zero")
    line = judges.divide.__code__.co_firstlineno + 2
    assert error.output.startswith(f'about to divide\nTraceback (most recent call last):\n  File "{judges.__file__}"')
    assert f"line {line}, in divide" in error.output
    assert "grader_process" not in error.output


@pytest.mark.parametrize(
    ("what", "returns"),
    [
        ("nan", float),
        ("infinite in a map", dict[str, float]),
        ("text", float),
        ("nothing", float),
        ("object", float),
        ("list", float),
    ],
)
def test_result_that_is_no_reward(what: str, returns: Any) -> None:
    assert failure(judges.give, what, returns=returns).reason == "result"


def test_what_a_module_of_the_package_needs_is_imported_before_the_fork() -> None:
    async def use(pool: GraderPool) -> list[bool]:
        before = await pool.call(judges.is_imported, "math_verify", returns=bool)
        occupied = [asyncio.create_task(pool.call(judges.sleep, 600.0))]
        await asyncio.sleep(0)  # so that the next call has a fresh grader
        assert await pool.call(right_answer, "1/2", "0.5", returns=bool)
        occupied.append(asyncio.create_task(pool.call(judges.sleep, 600.0)))
        await asyncio.sleep(0)
        after = await pool.call(judges.is_imported, "math_verify", returns=bool)
        for each in occupied:
            each.cancel()
        await asyncio.wait(occupied)
        return [before, after]

    assert pooled(use, processes=3) == [False, True]


def test_call_that_is_cancelled_while_its_grader_starts_costs_the_others_nothing() -> None:
    async def use(pool: GraderPool) -> list[float]:
        calls = [asyncio.create_task(pool.call(judges.equal, "1", "1")) for _ in range(4)]
        await asyncio.sleep(0)
        calls[0].cancel()
        return await asyncio.gather(*calls[1:])

    assert pooled(use, processes=4) == [1.0] * 3


def test_crash_spends_one_process_that_had_answered_and_no_more() -> None:
    async def use(pool: GraderPool) -> tuple[set[int], set[int]]:
        before = set(await asyncio.gather(*(pool.call(judges.pid, returns=int) for _ in range(4))))
        with pytest.raises(GraderFailed):
            await pool.call(judges.crash)
        return before, set(await asyncio.gather(*(pool.call(judges.pid, returns=int) for _ in range(3))))

    before, after = pooled(use, processes=4)
    assert len(before) == 4
    assert after < before


def test_call_that_is_cancelled_leaves_no_process() -> None:
    async def use(pool: GraderPool) -> float:
        call = asyncio.create_task(pool.call(judges.sleep, 600.0))
        pid = await pool.call(judges.pid, returns=int)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert psutil.pid_exists(pid)
        return await pool.call(judges.equal, "1", "1")

    assert pooled(use) == 1.0


def test_template_that_was_killed_is_started_again() -> None:
    others = psutil.Process().children()  # such as those of a pool that tests share

    async def use(pool: GraderPool) -> float:
        await pool.call(judges.pid, returns=int)
        started = [each for each in psutil.Process().children() if each not in others]
        (template,) = [each for each in started if "grader_process" in line_of(each)]
        template.kill()
        return await pool.call(judges.equal, "1", "1")

    assert pooled(use) == 1.0


@pytest.mark.parametrize("function", [lambda: 1.0, print], ids=["lambda", "builtin"])
def test_what_is_no_function_of_a_module_is_refused(function: Callable[..., Any]) -> None:
    async def use(pool: GraderPool) -> None:
        if function is print:
            with pytest.raises(GraderFailed, match="returned None"):
                await pool.call(function)
        else:
            with pytest.raises(TypeError, match="not a function of a module"):
                await pool.call(function)

    pooled(use)


def test_a_call_that_outlives_its_pool_starts_no_more_processes() -> None:
    async def use(pool: GraderPool) -> None:
        assert await pool.call(judges.pid, returns=int) > 0
        spinning = asyncio.create_task(pool.call(judges.spin))
        while pool._idle:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
        pool.close()
        with pytest.raises(Closed):
            await spinning
        with pytest.raises(Closed):
            await pool.call(judges.equal, "1", "1")

    pooled(use)


@pytest.mark.proof(quick=True)
def test_graders_end_with_a_process_that_is_killed() -> None:
    script = (
        "import asyncio, os, sys\n"
        f"sys.path.append({str(Path(__file__).parent)!r})\n"
        "import judges\n"
        "from prorl_zmq.stages.grading.grader_pool import GraderPool\n"
        "async def main():\n"
        "    pool = GraderPool(2)\n"
        "    spinning = asyncio.create_task(pool.call(judges.spin))\n"
        "    print(await pool.call(judges.pid, returns=int), flush=True)\n"
        "    await spinning\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) == 3
        process.send_signal(signal.SIGKILL)
        process.wait()
    _, alive = psutil.wait_procs(below, timeout=20)
    assert alive == []


def _graders() -> set[psutil.Process]:
    return {each for each in psutil.Process().children(recursive=True) if "grader_process" in line_of(each)}
