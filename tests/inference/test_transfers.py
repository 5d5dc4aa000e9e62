"""A trainer's transfer into one engine: the calls of its group, and the end of an update without a whole one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from prorl_zmq.errors import EngineFailed, ProrlError, UpdateInProgress, UpdateNotBegun
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.hosting.engine_updates import EngineUpdates
from prorl_zmq.wire.messages.engines import Receiver, WeightUpdate

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_zmq.inference.engine import EngineDescription
    from prorl_zmq.inference.policy import Policy
    from prorl_zmq.wire.messages.engines import TransferCall

WAIT_S = 20.0


class Receiving(EmbeddedEngine):
    """Notes its calls; an info with `fails` fails."""

    def __init__(self, policy: Policy, *, can: bool = True) -> None:
        super().__init__(policy)
        self.calls: list[tuple[str, dict[str, Any], float]] = []
        self.called, self.go = asyncio.Event(), asyncio.Event()
        self.go.set()
        self._can = can

    @property
    def description(self) -> EngineDescription:
        return replace(super().description, transfer="nccl", transfer_ranks=2) if self._can else super().description

    async def transfer(self, call: TransferCall, info: dict[str, Any], limit_s: float) -> None:
        self.calls.append((call, info, limit_s))
        self.called.set()
        await self.go.wait()
        if "fails" in info:
            raise EngineFailed("the peer has left")


def run(policy: Policy, test: Callable[[Receiving, EngineUpdates], Any], *, can: bool = True) -> None:
    async def main() -> None:
        engine = Receiving(policy, can=can)
        updates = EngineUpdates(engine)
        try:
            async with asyncio.timeout(WAIT_S):
                await test(engine, updates)
        finally:
            await engine.close()
            await updates.close()

    asyncio.run(main())


def asked(call: TransferCall, info: str = "{}", *, version: int = 5, request_id: str = "") -> WeightUpdate:
    return WeightUpdate(
        request_id or call, "transfer", version, timeout_s=7.0, call=call, info=info, receivers=(Receiver("me", 4),)
    )


def test_a_whole_transfer_is_served_and_its_ranks_are_the_hosts_own(policy: Policy) -> None:
    async def test(engine: Receiving, updates: EngineUpdates) -> None:
        await updates.begin(5, "keep", 100.0)
        for call in ("init", "update", "finish", "leave"):
            await updates.update(asked(call, '{"rank_offset": 1, "world_size": 9}' if call == "init" else "{}"))
        await updates.update(WeightUpdate("e", "end", 5, transferred=True))
        assert engine.weight_version == 5
        assert engine.calls[0] == ("init", {"rank_offset": 4, "world_size": 9}, 7.0)
        assert [call for call, *_ in engine.calls] == ["init", "update", "finish", "leave"]

    run(policy, test)


@pytest.mark.parametrize("calls", [(), ("init", "update"), ("init", "update", "finish", "init")])
def test_without_a_whole_transfer_the_engine_keeps_its_version(policy: Policy, calls: tuple[TransferCall, ...]) -> None:
    async def test(engine: Receiving, updates: EngineUpdates) -> None:
        await updates.begin(5, "keep", 100.0)
        for number, call in enumerate(calls):
            await updates.update(asked(call, request_id=str(number)))
        with pytest.raises(EngineFailed, match="weights 5 did not come; it continues with 0"):
            await updates.end(5, transferred=True)
        assert engine.weight_version == 0
        assert not updates.under_way

    run(policy, test)


def test_a_request_that_comes_twice_is_done_once(policy: Policy) -> None:
    async def test(engine: Receiving, updates: EngineUpdates) -> None:
        await updates.begin(5, "keep", 100.0)
        engine.go.clear()
        both = [asyncio.create_task(updates.update(asked("update", '{"fails": 1}'))) for _ in range(2)]
        await engine.called.wait()
        engine.go.set()
        for one in both:
            with pytest.raises(EngineFailed, match="the peer has left"):
                await one
        assert len(engine.calls) == 1

    run(policy, test)


@pytest.mark.parametrize("info", ["[1]", "{", "[" * 100_000])
def test_an_info_that_is_no_object_is_refused(policy: Policy, info: str) -> None:
    async def test(engine: Receiving, updates: EngineUpdates) -> None:
        await updates.begin(5, "keep", 100.0)
        with pytest.raises(EngineFailed, match="no JSON object") as caught:
            await updates.update(asked("init", info))
        assert caught.value.fields["refused"]
        assert engine.calls == []

    run(policy, test)


@pytest.mark.parametrize(("begins", "error"), [(None, UpdateNotBegun), (4, UpdateInProgress)])
def test_a_transfer_is_inside_of_its_own_update(policy: Policy, begins: int | None, error: type[ProrlError]) -> None:
    async def test(engine: Receiving, updates: EngineUpdates) -> None:
        if begins is not None:
            await updates.begin(begins, "keep", 100.0)
        with pytest.raises(error):
            await updates.update(asked("init"))
        assert engine.calls == []

    run(policy, test)


def test_an_engine_without_a_transfer_refuses(policy: Policy) -> None:
    async def test(engine: Receiving, updates: EngineUpdates) -> None:
        await updates.begin(5, "keep", 100.0)
        with pytest.raises(EngineFailed, match="started without a weight transfer"):
            await updates.update(asked("init"))
        assert engine.calls == []

    run(policy, test, can=False)
