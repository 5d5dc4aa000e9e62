from __future__ import annotations

import asyncio

import numpy as np
import pytest

from prorl_zmq.errors import EngineFailed
from prorl_zmq.inference.engine import Generation
from prorl_zmq.inference.http.pause import ServerPause

DONE = Generation(np.array([1], np.int32), np.array([-1.0], np.float32), (), "stop")


def test_who_runs_ends_and_who_comes_waits() -> None:
    async def main() -> None:
        pause, leave, passed = ServerPause(tells_spans=False), asyncio.Event(), []

        async def ask(name: str) -> Generation:
            passed.append(name)
            await leave.wait()
            return DONE

        early = asyncio.create_task(pause.passing(lambda: ask("early")))
        await asyncio.sleep(0)
        begin = asyncio.create_task(pause.begin(None, "drain"))
        await asyncio.sleep(0)
        late = asyncio.create_task(pause.passing(lambda: ask("late")))
        for _ in range(5):
            await asyncio.sleep(0)
        assert passed == ["early"]
        assert not begin.done()
        leave.set()
        await begin
        assert await early == (DONE, False)
        assert passed == ["early"]
        await pause.end()
        assert await late == (DONE, False)
        assert passed == ["early", "late"]

    asyncio.run(main())


def test_who_fails_runs_no_more() -> None:
    async def main() -> None:
        async def ask() -> Generation:
            raise ValueError("inside")

        pause = ServerPause(tells_spans=False)
        with pytest.raises(ValueError, match="inside"):
            await pause.passing(ask)
        async with asyncio.timeout(5):
            await pause.begin(None, "drain")

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_who_cannot_be_aborted_is_cancelled_without_tokens(mode: str) -> None:
    async def main() -> None:
        pause = ServerPause(tells_spans=False)

        async def ask() -> Generation:
            await asyncio.Event().wait()
            return DONE

        asked = asyncio.create_task(pause.passing(ask))
        await asyncio.sleep(0)
        await pause.begin(None, mode)
        generation, continues = await asked
        assert (len(generation.token_ids), generation.finish_reason, continues) == (0, "abort", mode == "keep")

    asyncio.run(main())


def test_a_removed_pause_sends_all_away() -> None:
    async def main() -> None:
        pause = ServerPause(tells_spans=False)

        async def ask() -> Generation:
            raise AssertionError("passed")

        await pause.begin(None, "drain")
        waiting = asyncio.create_task(pause.passing(ask))
        await asyncio.sleep(0)
        pause.remove()
        with pytest.raises(EngineFailed, match="closed"):
            await waiting
        with pytest.raises(EngineFailed, match="closed"):
            await pause.passing(ask)

    asyncio.run(main())
