"""A trainer's transfer into one engine: the calls of its group, and the end of an update without a whole one."""

from __future__ import annotations

import asyncio
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from prorl_zmq.errors import EngineFailed, ProrlError, UpdateInProgress, UpdateNotBegun
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.hosting.engine_updates import EngineUpdates
from prorl_zmq.inference.kv_figures import KvMeter
from prorl_zmq.inference.vllm.vllm_engine import VllmEngine
from prorl_zmq.inference.weights.version_chain import Content
from prorl_zmq.wire.messages.engines import Receiver, WeightUpdate
from prorl_zmq.wire.messages.jobs import Sampling

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


@pytest.mark.parametrize("calls", [(), ("init", "update"), ("init", "update", "finish", "update")])
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


class Llm:
    """vLLM's calls around a transfer, which brings weights 5 in place of 4."""

    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(is_moe=False, max_logprobs=0, logprobs_mode="raw_logprobs")
    )
    errored = False
    output_handler = None

    def __init__(self) -> None:
        self.weights, self.version = 4, "4"
        self.generates = self.fails = False
        self.aborted = asyncio.Event()

    async def init_weight_transfer_engine(self, _: object) -> None:
        if self.fails:
            raise RuntimeError("the peer has left")

    async def update_weights(self, _: object) -> None:
        self.weights = 5

    async def update_weight_version(self, version: str) -> None:
        self.version = version

    async def pause_generation(self, **_: object) -> None:
        self.generates = False

    async def resume_generation(self) -> None:
        self.generates = True

    async def start_weight_update(self) -> None: ...

    async def finish_weight_update(self) -> None: ...

    async def shutdown_weight_transfer_engine(self) -> None: ...

    async def abort(self, _: object) -> None:
        self.aborted.set()

    def shutdown(self, _: float) -> None: ...


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    base = ModuleType("base")
    vars(base).update(WeightTransferInitRequest=dict, WeightTransferUpdateRequest=dict)
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", base)


def run_vllm(description: EngineDescription, test: Callable[[Llm, VllmEngine, EngineUpdates], Any]) -> None:
    """Begin an update to weights 5, of which a whole transfer comes, and continue with `test`."""

    async def main() -> None:
        llm = Llm()
        engine = VllmEngine(llm, Path("model"), description, 4, None, KvMeter())
        updates = EngineUpdates(engine)
        try:
            async with asyncio.timeout(WAIT_S):
                await updates.begin(5, "keep", 100.0)
                for call in ("init", "update", "finish"):
                    await updates.update(asked(call))
                await test(llm, engine, updates)
        finally:
            await engine.close()
            await updates.close()

    asyncio.run(main())


@pytest.fixture
def described(policy: Policy) -> EngineDescription:
    return replace(EmbeddedEngine(policy).description, transfer="nccl", transfer_ranks=1)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("end", ["cancel", "leave and cancel", "limit", "second transfer", "load"])
def test_new_weights_are_never_served_as_the_old_version(
    described: EngineDescription, end: str, tmp_path: Path
) -> None:
    async def test(llm: Llm, engine: VllmEngine, updates: EngineUpdates) -> None:
        if end == "limit":
            await updates.begin(5, "keep", 0.01)
            await llm.aborted.wait()
        elif end == "load":
            with pytest.raises(EngineFailed):
                await updates.load(tmp_path / "none.safetensors", Content(5), "keep")
        elif end == "second transfer":
            await updates.update(asked("update", request_id="again"))
            with pytest.raises(EngineFailed):
                await updates.end(5, transferred=True)
        else:
            if end == "leave and cancel":
                await updates.update(asked("leave"))
            with pytest.raises(EngineFailed):
                await updates.cancel(5)
        with pytest.raises(EngineFailed) as caught:
            await engine.generate(np.arange(3, dtype=np.int32), Sampling(), (), "job")
        assert caught.value.fields["fatal"]
        assert (llm.weights, engine.weight_version) == (5, 4)

    run_vllm(described, test)


@pytest.mark.usefixtures("vllm")
def test_a_later_group_that_sends_nothing_changes_nothing(described: EngineDescription) -> None:
    async def test(llm: Llm, engine: VllmEngine, updates: EngineUpdates) -> None:
        llm.fails = True
        with pytest.raises(EngineFailed, match="the peer has left"):
            await updates.update(asked("init", request_id="again"))
        await updates.end(5, transferred=True)
        assert (llm.generates, llm.version, engine.weight_version) == (True, "5", 5)
        await updates.begin(6, "keep", 100.0)
        await updates.cancel(6)
        await engine.check_health()
        assert (llm.generates, engine.weight_version) == (True, 5)

    run_vllm(described, test)


def test_a_trainers_side_that_does_not_end_does_not_undo_a_whole_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    leaves, called = Event(), []

    class Sender:
        def __init__(self, client: Any) -> None:
            self._client = client

        def send_weights(self) -> None:
            self._client.update_weights({})
            self._client.finish_weight_update()

        def shutdown(self) -> None:
            leaves.wait(WAIT_S)

    base, factory = ModuleType("base"), ModuleType("factory")
    vars(base).update(ParamMeta=tuple, TrainerInitInfo=object, WeightSource=object)
    factory.WeightTransferTrainerFactory = SimpleNamespace(  # type: ignore[attr-defined]
        trainer_init=lambda _, client, source: Sender(client)
    )
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", base)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.factory", factory)
    monkeypatch.delitem(sys.modules, "prorl_zmq.group_transfer", raising=False)
    group_transfer = importlib.import_module("prorl_zmq.group_transfer")
    monkeypatch.setattr(group_transfer, "ENDS_S", 0.05)
    try:
        group_transfer.transfer({}, object(), lambda call, *_: called.append(call), 2.0)
    finally:
        leaves.set()
        sys.modules.pop("prorl_zmq.group_transfer", None)
    assert called == ["update", "finish", "leave"]
