"""The two halves of an update on one embedded engine: what is generated meanwhile, and who may end it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from prorl_zmq.errors import EngineFailed, InvalidWeights, RequestTimeout, UpdateInProgress, UpdateNotBegun
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.hosting import engine_updates
from prorl_zmq.inference.hosting.engine_updates import EngineUpdates
from prorl_zmq.inference.relay.weights_relay import WeightsRelay
from prorl_zmq.inference.weights.local_copy import LocalCopy
from prorl_zmq.inference.weights.version_chain import Content
from prorl_zmq.wire.messages.jobs import Sampling
from prorl_zmq.wire.messages.relay import WeightRelay, WeightSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_zmq.inference.engine import Generation
    from prorl_zmq.inference.policy import Policy
    from prorl_zmq.wire.messages.engines import UpdateMode

LONG_S = 100.0
WAIT_S = 20.0


class Engine:
    """An engine with its updates; 200 tokens that take a while."""

    def __init__(self, policy: Policy) -> None:
        self.engine = EmbeddedEngine(policy)
        self.updates = EngineUpdates(self.engine)

    def generate(self) -> asyncio.Task[Generation]:
        prompt = np.array([1, 2, 3], np.int32)
        return asyncio.create_task(self.engine.generate(prompt, Sampling(max_tokens=200, seed=1), (), "job"))

    async def generating(self, tokens: int = 20) -> asyncio.Task[Generation]:
        task = self.generate()
        while not self.engine._running or len(self.engine._running[0].logprobs) < tokens:  # noqa: ASYNC110
            await asyncio.sleep(0)  # a turn of the loop is a step of the engine
        return task

    def count(self) -> int:
        return sum(len(running.logprobs) for running in self.engine._running)


def run(policy: Policy, test: Callable[[Engine], Any]) -> None:
    async def main() -> None:
        one = Engine(policy)
        try:
            async with asyncio.timeout(WAIT_S):
                await test(one)
        finally:
            await one.engine.close()
            await one.updates.close()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def spans(generation: Generation) -> list[tuple[int, int, int]]:
    return [(span.weight_version, span.start, span.end) for span in generation.spans]


@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
def test_nothing_is_generated_between_begin_and_end(policy: Policy, mode: UpdateMode) -> None:
    async def test(one: Engine) -> None:
        running = await one.generating()
        await one.updates.begin(5, mode, LONG_S)
        there = one.count()
        later = one.generate()
        for _ in range(100):
            await asyncio.sleep(0)
        assert one.count() == there
        assert not later.done()
        assert one.engine.weight_version == 0
        await one.updates.end(5)
        assert spans(await later) == [(5, 0, 200)]
        done = await running
        match mode:
            case "keep":
                assert spans(done) == [(0, 0, there), (5, there, 200)]
            case "drain":
                assert spans(done) == [(0, 0, 200)]
            case "abort":
                assert done.finish_reason == "abort"
                assert spans(done) == [(0, 0, len(done.token_ids))]
        assert len(done.token_ids) >= 20

    run(policy, test)


def test_a_begun_update_may_be_ended_by_a_load(
    policy: Policy, make_policy: Callable[..., Policy], tmp_path: Path
) -> None:
    make_policy(7).save(tmp_path / "new.npz")

    async def test(one: Engine) -> None:
        running = await one.generating()
        await one.updates.begin(5, "keep", LONG_S)
        there = one.count()
        await one.updates.load(tmp_path / "new.npz", Content(5), "drain")
        await one.updates.end(5)
        assert spans(await running) == [(0, 0, there), (5, there, 200)]
        assert one.engine._policy.parameters["output_weight"][0, 0] != policy.parameters["output_weight"][0, 0]
        await one.updates.begin(6, "keep", LONG_S)
        with pytest.raises(InvalidWeights):
            await one.updates.load(tmp_path / "nothing.npz", Content(6), "keep")
        assert spans(await one.generate()) == [(5, 0, 200)]
        with pytest.raises(UpdateNotBegun):
            await one.updates.end(6)

    run(policy, test)


def test_a_load_that_never_reached_the_engine_ends_the_update(policy: Policy, tmp_path: Path) -> None:
    async def test(one: Engine) -> None:
        running = await one.generating()
        await one.updates.begin(5, "keep", LONG_S)
        relay = WeightRelay("0" * 64, ())
        with pytest.raises(InvalidWeights, match="shares no disk"):
            await one.updates.load(tmp_path, Content(5), "keep", relay)
        assert spans(await running) == [(0, 0, 200)]

    run(policy, test)


def test_an_engine_that_cannot_resume_after_a_load_is_asked_again(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(one: Engine) -> None:
        end, failures = one.engine.end_update, [EngineFailed("HTTP 503")]

        async def fails_once(weight_version: int | None) -> None:
            if failures:
                raise failures.pop()
            await end(weight_version)

        monkeypatch.setattr(one.engine, "end_update", fails_once)
        monkeypatch.setattr(engine_updates, "AGAIN_S", 0.01)
        running = await one.generating()
        await one.updates.begin(5, "keep", LONG_S)
        with pytest.raises(InvalidWeights, match="shares no disk"):
            await one.updates.load(tmp_path, Content(5), "keep", WeightRelay("0" * 64, ()))
        assert one.updates.under_way
        assert spans(await running) == [(0, 0, 200)]
        assert not one.updates.under_way

    run(policy, test)


@pytest.mark.parametrize("step", ["begin", "fetch", "load", "set"])
def test_a_version_that_a_dead_trainer_has_holds_up_no_other(
    policy: Policy, make_policy: Callable[..., Policy], tmp_path: Path, step: str
) -> None:
    new, copy = tmp_path / "new.npz", tmp_path / "copy"
    make_policy(7).save(new)

    async def test(one: Engine) -> None:
        relay = WeightsRelay(LocalCopy(copy, None), None, "host", None)
        updates = EngineUpdates(one.engine, copy, copies_all=True, relay=relay)
        dead = WeightRelay("0" * 64, (WeightSource("trainer", f"ipc://{tmp_path}/dead"),))
        late = asyncio.create_task(updates.load(Path("/elsewhere/weight_v000005"), Content(5, "5"), "keep", dead))
        while not (copy / ".weight_sync/incoming/lock").exists():  # noqa: ASYNC110 - a thread makes it
            await asyncio.sleep(0)
        match step:
            case "begin":
                await updates.begin(6, "keep", LONG_S)
            case "fetch":
                await updates.fetch(new, Content(6), LONG_S)
            case "load":
                await updates.load(new, Content(6), "keep")
            case "set":
                await updates.set_version(6)
        with pytest.raises(RequestTimeout, match="other weights were asked for meanwhile"):
            await late
        await updates.close()

    run(policy, test)


def test_a_load_that_waits_for_another_is_not_done_once_it_is_replaced(
    policy: Policy, make_policy: Callable[..., Policy], tmp_path: Path
) -> None:
    make_policy(7).save(tmp_path / "new.npz")

    async def test(one: Engine) -> None:
        async with one.updates._one_change:
            first = asyncio.create_task(one.updates.load(tmp_path / "new.npz", Content(5), "keep"))
            await asyncio.sleep(0)
            second = asyncio.create_task(one.updates.load(tmp_path / "new.npz", Content(6), "keep"))
            await asyncio.sleep(0)
        with pytest.raises(RequestTimeout, match="other weights were asked for meanwhile"):
            await first
        assert one.engine.weight_version == 0
        await second
        assert one.engine.weight_version == 6

    run(policy, test)


@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
def test_a_trainer_that_dies_does_not_hold_the_engine(
    policy: Policy, mode: UpdateMode, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(one: Engine) -> None:
        await one.updates.begin(5, mode, 0.05)
        await one.updates.begin(5, mode, 0.2)
        done = await one.generate()
        assert spans(done) == [(0, 0, 200)]
        assert "the update to weights 5 did not end within 0.2 s" in caplog.text
        assert "going on with weights 0" in caplog.text
        with pytest.raises(UpdateNotBegun, match="the engine serves 0"):
            await one.updates.end(5)

    run(policy, test)


def test_an_engine_that_cannot_go_on_is_asked_until_it_does(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_updates, "AGAIN_S", 0.05)

    async def test(one: Engine) -> None:
        end, tries = one.engine.end_update, 0

        async def fail_twice(version: int | None) -> None:
            nonlocal tries
            tries += 1
            if tries < 3:
                raise EngineFailed("the server does not answer")
            await end(version)

        monkeypatch.setattr(one.engine, "end_update", fail_twice)
        await one.updates.begin(5, "keep", 0.05)
        assert spans(await one.generate()) == [(0, 0, 200)]
        assert tries == 3
        assert caplog.text.count("could not resume, and is asked again: the server does not answer") == 2

    run(policy, test)


def test_what_drains_for_too_long_is_given_up_too(policy: Policy) -> None:
    async def test(one: Engine) -> None:
        hold = asyncio.Event()
        one.engine._idle = hold  # what runs never ends
        with pytest.raises(EngineFailed, match="taken back before generating had stopped"):
            await one.updates.begin(5, "drain", 0.05)
        one.engine._idle = asyncio.Event()
        assert spans(await one.generate()) == [(0, 0, 200)]

    run(policy, test)


def test_cancelling_goes_on_with_the_old_weights(policy: Policy) -> None:
    async def test(one: Engine) -> None:
        await one.updates.cancel(5)
        running = await one.generating()
        await one.updates.begin(5, "keep", LONG_S)
        await one.updates.cancel(5)
        assert spans(await running) == [(0, 0, 200)]
        one.engine._idle = asyncio.Event()
        draining = asyncio.create_task(one.updates.begin(6, "drain", LONG_S))
        await asyncio.sleep(0)
        await one.updates.cancel(6)
        with pytest.raises(EngineFailed, match="taken back"):
            await draining
        assert spans(await one.generate()) == [(0, 0, 200)]

    run(policy, test)


def test_one_update_at_a_time(policy: Policy, tmp_path: Path) -> None:
    async def test(one: Engine) -> None:
        with pytest.raises(UpdateNotBegun, match="no update to weights 5 was begun here"):
            await one.updates.end(5)
        await one.updates.begin(5, "keep", LONG_S)
        await one.updates.begin(5, "abort", LONG_S)
        for other in (
            one.updates.begin(6, "keep", LONG_S),
            one.updates.end(6),
            one.updates.cancel(6),
            one.updates.load(tmp_path, Content(6), "keep"),
            one.updates.set_version(5),
        ):
            with pytest.raises(UpdateInProgress, match="an update to weights 5 was begun") as caught:
                await other
            assert caught.value.weight_version == 5
        await asyncio.gather(one.updates.end(5), one.updates.end(5))
        await one.updates.end(5)
        assert one.engine.weight_version == 5
        await one.updates.set_version(4)
        assert one.engine.weight_version == 4

    run(policy, test)


def test_an_end_that_failed_may_be_tried_again(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(one: Engine) -> None:
        await one.updates.begin(5, "keep", LONG_S)

        async def fail(_: object) -> None:
            raise EngineFailed("the server does not answer")

        with monkeypatch.context() as patch:
            patch.setattr(one.engine, "end_update", fail)
            with pytest.raises(EngineFailed, match="does not answer"):
                await one.updates.end(5)
        await one.updates.end(5)
        assert spans(await one.generate()) == [(5, 0, 200)]

    run(policy, test)


def test_a_begin_that_failed_has_begun_nothing(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(one: Engine) -> None:
        async def fail(_: object) -> None:
            raise EngineFailed("the server does not answer")

        with monkeypatch.context() as patch:
            patch.setattr(one.engine, "begin_update", fail)
            with pytest.raises(EngineFailed, match="does not answer"):
                await one.updates.begin(5, "keep", LONG_S)
        await one.updates.begin(6, "keep", LONG_S)

    run(policy, test)


def test_closing_in_the_middle_of_an_update_fails_what_waits(policy: Policy) -> None:
    async def test(one: Engine) -> None:
        running = await one.generating()
        await one.updates.begin(5, "keep", LONG_S)
        waiting = one.generate()
        await asyncio.sleep(0)
        await one.engine.close()
        await one.updates.close()
        for task in (running, waiting):
            with pytest.raises(EngineFailed, match="the engine was closed"):
                await task

    run(policy, test)


def test_a_folder_that_hangs_is_left_to_the_load(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(engine_updates, "read_ahead", lambda *_: hangs.wait(WAIT_S))

    async def test(one: Engine) -> None:
        await one.updates.fetch(Path("/hangs"), Content(1), 0.5)

    run(policy, test)
    hangs.set()
