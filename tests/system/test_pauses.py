"""Clocks and timers of a process that was stopped."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import TYPE_CHECKING

import pytest
import uvloop

from prorl_zmq.system import pauses
from prorl_zmq.system.pauses import PAUSE_S, PauseWatch, RunningClock, wait_running

if TYPE_CHECKING:
    from collections.abc import Callable


in_a_real_pause = pytest.mark.parametrize(
    "run", [uvloop.run, pytest.param(asyncio.run, marks=pytest.mark.proof(quick=True))]
)
"""Seconds each; processes of the service have uvloop's loop."""


def test_a_clock_stands_still_in_a_pause() -> None:
    clock = RunningClock()
    before = clock.now()
    time.sleep(1.5 * PAUSE_S)
    assert clock.now() - before < 0.1
    clock.waits(1.5 * PAUSE_S)
    began = time.monotonic()
    time.sleep(1.5 * PAUSE_S)
    assert clock.now() - before == pytest.approx(time.monotonic() - began, abs=0.1)


@in_a_real_pause
def test_a_wait_counts_no_pause(run: Callable[..., None]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        loop.call_later(0.1, time.sleep, 2 * PAUSE_S)
        loop.call_later(2 * PAUSE_S + 0.4, future.set_result, None)
        assert await wait_running(future, 1.2 * PAUSE_S)
        never = loop.create_future()
        began = loop.time()
        assert not await wait_running(never, 1.2 * PAUSE_S)
        assert loop.time() - began == pytest.approx(1.2 * PAUSE_S, abs=0.2)
        assert not await wait_running(never, 0.0)
        assert not await asyncio.wait_for(wait_running(never, -1.0), PAUSE_S)  # it never ended
        assert not never.cancelled()

    run(main())


@in_a_real_pause
def test_a_limit_that_fell_due_in_a_pause_is_moved_before_it_ends_anything(run: Callable[..., None]) -> None:
    async def main() -> None:
        moved: list[float] = []

        def move(pause_s: float) -> None:
            moved.append(pause_s)
            until = timer.when()
            assert until is not None
            timer.reschedule(until + pause_s)

        watch = PauseWatch(move)
        async with asyncio.timeout(1.0) as timer:
            await asyncio.sleep(0.1)
            time.sleep(  # noqa: ASYNC251 - it is the pause
                2 * PAUSE_S
            )
            await asyncio.sleep(0.3)
        watch.close()
        assert len(moved) == 1
        assert 2 * PAUSE_S - 0.3 < moved[0] < 2 * PAUSE_S + 0.5

    run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_loop_that_is_blocked_is_named_once_with_its_line(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pauses, "BLOCKED_LOOK_S", 0.001)
    monkeypatch.setattr(pauses, "LOOK_S", 0.0001)
    named = threading.Event()
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            named.set()

    async def main() -> None:
        watch = PauseWatch(lambda _: None)
        try:
            assert named.wait(20)
        finally:
            watch.close()

    listener = Listener()
    pauses.blocked_log.addHandler(listener)
    try:
        run(main())
    finally:
        pauses.blocked_log.removeHandler(listener)
    line = main.__code__.co_firstlineno + 3
    assert said == [pauses.BLOCKED % f"{__file__}:{line}"]
