from __future__ import annotations

import asyncio

import pytest

from prorl_zmq.errors import EngineFailed
from prorl_zmq.inference.http.gate import Gate


def test_a_shut_gate_holds_who_comes_and_lets_who_is_inside_leave() -> None:
    async def main() -> None:
        gate, leave, passed = Gate(), asyncio.Event(), []

        async def pass_through(name: str) -> None:
            async with gate.passing():
                passed.append(name)
                await leave.wait()

        early = asyncio.create_task(pass_through("early"))
        await asyncio.sleep(0)
        gate.shut()
        late = asyncio.create_task(pass_through("late"))
        assert not await gate.until_empty(0.01)
        assert passed == ["early"]
        leave.set()
        assert await gate.until_empty(5)
        await early
        assert passed == ["early"]
        gate.open()
        await late
        assert passed == ["early", "late"]
        assert await gate.until_empty(0)

    asyncio.run(main())


def test_who_fails_inside_is_outside() -> None:
    async def main() -> None:
        gate = Gate()
        with pytest.raises(ValueError, match="inside"):
            async with gate.passing():
                raise ValueError("inside")
        assert await gate.until_empty(0)

    asyncio.run(main())


def test_a_removed_gate_sends_all_away() -> None:
    async def main() -> None:
        gate = Gate()

        async def pass_through() -> None:
            async with gate.passing():
                raise AssertionError("passed")

        gate.shut()
        waiting = asyncio.create_task(pass_through())
        await asyncio.sleep(0)
        gate.remove()
        with pytest.raises(EngineFailed, match="closed"):
            await waiting
        with pytest.raises(EngineFailed, match="closed"):
            await pass_through()

    asyncio.run(main())
