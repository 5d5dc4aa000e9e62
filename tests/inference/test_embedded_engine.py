from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from prorl_zmq.errors import EngineFailed, InvalidWeights
from prorl_zmq.inference import local_engine
from prorl_zmq.inference.embedded.embedded_engine import CONTEXT_LIMIT, EmbeddedEngine
from prorl_zmq.inference.policy import Policy
from prorl_zmq.inference.truncation import truncated
from prorl_zmq.wire.messages.jobs import Sampling

from .conftest import rounding

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from prorl_zmq.inference.engine import Generation
PROMPT = np.arange(1, 20, dtype=np.int32)


def recomputed(policy: Policy, generation: Generation, temperature: float = 1.0) -> Any:
    return policy.logprobs(np.concatenate([PROMPT, generation.token_ids]), temperature)[len(PROMPT) :]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_log_probs_are_those_of_the_sampled_distribution(policy: Policy, temperature: float) -> None:
    async def main() -> None:
        engine = EmbeddedEngine(policy, weight_version=3)
        generations = await asyncio.gather(
            *(engine.generate(PROMPT, Sampling(temperature, 40, seed), (), "job") for seed in range(10))
        )
        for generation in generations:
            assert generation.finish_reason == "length"
            assert generation.token_ids.dtype == np.int32
            assert generation.logprobs.dtype == np.float32
            close = rounding(policy, generation.token_ids) / min(1.0, temperature)
            np.testing.assert_allclose(generation.logprobs, recomputed(policy, generation, temperature), atol=close)
            assert [(s.weight_version, s.start, s.end) for s in generation.spans] == [(3, 0, 40)]

    asyncio.run(main())


def test_a_seed_gives_the_same_answer_whatever_else_runs(policy: Policy) -> None:
    async def main() -> None:
        engine = EmbeddedEngine(policy)
        alone = await engine.generate(PROMPT, Sampling(1.0, 30, 7), (), "job")
        crowd = await asyncio.gather(
            *(engine.generate(PROMPT[:seed], Sampling(1.0, 5 * seed, seed), (), "job") for seed in range(1, 7)),
            engine.generate(PROMPT, Sampling(1.0, 30, 7), (), "job"),
        )
        assert crowd[-1].token_ids.tolist() == alone.token_ids.tolist()
        free = [await engine.generate(PROMPT, Sampling(1.0, 30), (), "job") for _ in range(2)]
        assert free[0].token_ids.tolist() != free[1].token_ids.tolist()

    asyncio.run(main())


def test_a_stop_token_ends_the_turn_and_is_part_of_it(policy: Policy) -> None:
    async def main() -> None:
        engine = EmbeddedEngine(policy)
        long = await engine.generate(PROMPT, Sampling(1.0, 30, 7), (), "job")
        stop = int(long.token_ids[11])
        first = long.token_ids.tolist().index(stop)
        short = await engine.generate(PROMPT, Sampling(1.0, 30, 7), (stop,), "job")
        assert short.finish_reason == "stop"
        assert short.token_ids.tolist() == long.token_ids[: first + 1].tolist()
        assert short.spans[-1].end == first + 1

    asyncio.run(main())


def test_temperature_0_is_greedy(policy: Policy) -> None:
    async def main() -> None:
        generation = await EmbeddedEngine(policy).generate(PROMPT, Sampling(0.0, 10), (), "job")
        whole = np.concatenate([PROMPT, generation.token_ids])
        likeliest = policy.logits(policy.contexts(whole)).argmax(axis=1)
        assert generation.token_ids.tolist() == likeliest[len(PROMPT) :].tolist()
        np.testing.assert_allclose(
            generation.logprobs, recomputed(policy, generation), atol=rounding(policy, generation.token_ids)
        )

    asyncio.run(main())


def test_new_weights_take_over_in_the_middle_of_a_generation(
    policy: Policy, make_policy: Callable[..., Policy], tmp_path: Path
) -> None:
    new = make_policy(5)
    new.save(tmp_path / "new.npz")

    async def main() -> None:
        engine = EmbeddedEngine(policy, weight_version=1)
        generation_task = asyncio.create_task(engine.generate(PROMPT, Sampling(1.0, 5_000, 0), (), "job"))
        for _ in range(5):
            await asyncio.sleep(0)
        await engine.update_weights(tmp_path / "new.npz", 2, "keep")
        assert engine.weight_version == 2
        generation = await generation_task
        old_span, new_span = generation.spans
        assert (old_span.weight_version, new_span.weight_version) == (1, 2)
        assert 0 == old_span.start < old_span.end == new_span.start < new_span.end == 5_000
        swap = old_span.end
        np.testing.assert_allclose(
            generation.logprobs[:swap],
            recomputed(policy, generation)[:swap],
            atol=rounding(policy, generation.token_ids),
        )
        np.testing.assert_allclose(
            generation.logprobs[swap:], recomputed(new, generation)[swap:], atol=rounding(new, generation.token_ids)
        )
        assert np.abs(generation.logprobs[swap:] - recomputed(policy, generation)[swap:]).max() > 0.1

    asyncio.run(main())


def test_draining_ends_what_runs_with_the_old_weights(
    policy: Policy, make_policy: Callable[..., Policy], tmp_path: Path
) -> None:
    new = make_policy(5)
    new.save(tmp_path / "new.npz")

    async def main() -> None:
        engine = EmbeddedEngine(policy, weight_version=1)
        before = asyncio.create_task(engine.generate(PROMPT, Sampling(1.0, 20_000, 0), (), "job"))
        await asyncio.sleep(0)
        update = asyncio.create_task(engine.update_weights(tmp_path / "new.npz", 2, "drain"))
        for _ in range(100_000):
            if not engine._admits.is_set():
                break
            await asyncio.sleep(0)
        assert not before.done()
        behind = asyncio.create_task(engine.generate(PROMPT, Sampling(1.0, 30, 0), (), "job"))
        await update
        assert before.done()
        assert [(span.weight_version, span.end) for span in (await before).spans] == [(1, 20_000)]
        assert [(span.weight_version, span.end) for span in (await behind).spans] == [(2, 30)]
        np.testing.assert_allclose(
            (await behind).logprobs, recomputed(new, await behind), atol=rounding(new, (await behind).token_ids)
        )
        await engine.close()

    asyncio.run(main())


def test_aborting_gives_what_there_is(policy: Policy, make_policy: Callable[..., Policy], tmp_path: Path) -> None:
    make_policy(5).save(tmp_path / "new.npz")

    async def main() -> None:
        engine = EmbeddedEngine(policy, weight_version=1)
        task = asyncio.create_task(engine.generate(PROMPT, Sampling(1.0, 20_000, 0), (), "job"))
        for _ in range(5):
            await asyncio.sleep(0)
        await engine.update_weights(tmp_path / "new.npz", 2, "abort")
        generation = await task
        assert generation.finish_reason == "abort"
        assert 0 < len(generation.token_ids) < 20_000
        assert [span.weight_version for span in generation.spans] == [1]
        np.testing.assert_allclose(
            generation.logprobs, recomputed(policy, generation), atol=rounding(policy, generation.token_ids)
        )

    asyncio.run(main())


@pytest.mark.parametrize("sampling", [{"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.3}])
def test_log_probs_are_of_what_truncation_left(policy: Policy, sampling: dict[str, Any]) -> None:
    async def main() -> None:
        engine = EmbeddedEngine(policy)
        many = Sampling(max_tokens=1, **sampling)
        drawn = await asyncio.gather(
            *(engine.generate(PROMPT, msgspec.structs.replace(many, seed=seed), (), "job") for seed in range(300))
        )
        probability = {int(one.token_ids[0]): float(np.exp(one.logprobs[0])) for one in drawn}
        logits = policy.logits(policy.contexts(np.append(PROMPT, np.int32(0)))[-1:])[0]
        left = np.flatnonzero(np.isfinite(truncated(logits, many)))
        assert set(probability) == set(left.tolist())
        assert sum(probability.values()) == pytest.approx(1.0, abs=1e-5)

    asyncio.run(main())


def test_bad_weights_change_nothing(policy: Policy, make_policy: Callable[..., Policy], tmp_path: Path) -> None:
    make_policy(0, vocabulary=49).save(tmp_path / "other.npz")

    async def main() -> None:
        engine = EmbeddedEngine(policy, weight_version=1)
        for name in ("missing.npz", "other.npz"):
            with pytest.raises(InvalidWeights, match=name):
                await engine.update_weights(tmp_path / name, 2, "keep")
        assert engine.weight_version == 1
        generation = await engine.generate(PROMPT, Sampling(1.0, 5, 0), (), "job")
        np.testing.assert_allclose(
            generation.logprobs, recomputed(policy, generation), atol=rounding(policy, generation.token_ids)
        )

    asyncio.run(main())


def test_cancelling_stops_the_work(policy: Policy) -> None:
    async def main() -> None:
        engine = EmbeddedEngine(policy)
        endless = asyncio.create_task(engine.generate(PROMPT, Sampling(1.0, 30_000), (), "job"))
        other = asyncio.create_task(engine.generate(PROMPT, Sampling(1.0, 50, 3), (), "job"))
        await asyncio.sleep(0.01)
        endless.cancel()
        assert len((await other).token_ids) == 50
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing decodes any more"
        assert endless.cancelled()

    asyncio.run(main())


def test_requests_one_after_the_other_never_meet_a_loop_that_has_ended(policy: Policy) -> None:
    async def main() -> None:
        engine = EmbeddedEngine(policy)
        for _ in range(200):
            assert len((await engine.generate(PROMPT, Sampling(1.0, 1), (), "job")).token_ids) == 1

    asyncio.run(main())


def test_closing_fails_what_runs_and_what_comes(policy: Policy) -> None:
    async def main() -> None:
        engine = EmbeddedEngine(policy)
        running = asyncio.create_task(engine.generate(PROMPT, Sampling(1.0, 30_000), (), "job"))
        await asyncio.sleep(0.01)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineFailed, match="closed"):
            await running
        with pytest.raises(EngineFailed, match="closed"):
            await engine.generate(PROMPT, Sampling(), (), "job")

    asyncio.run(main())


def test_a_fault_of_ours_fails_the_request_and_not_the_engine(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = EmbeddedEngine(policy)
        with monkeypatch.context() as patched:
            patched.setattr(policy, "logits", lambda _: 1 / 0)
            with pytest.raises(EngineFailed, match="ZeroDivisionError"):
                await engine.generate(PROMPT, Sampling(), (), "job")
        assert len((await engine.generate(PROMPT, Sampling(1.0, 3), (), "job")).token_ids) == 3

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "empty"),
        ([1, 50], "outside of 0 to 49"),
        ([-1], "outside of 0 to 49"),
        ([1] * CONTEXT_LIMIT, "leaves no room"),
    ],
)
def test_a_bad_prompt_is_refused(policy: Policy, prompt: list[int], problem: str) -> None:
    async def main() -> None:
        with pytest.raises(EngineFailed, match=problem) as caught:
            await EmbeddedEngine(policy).generate(np.array(prompt, np.int32), Sampling(), (), "job")
        assert caught.value.refused

    asyncio.run(main())


def test_a_full_context_ends_the_turn(policy: Policy) -> None:
    async def main() -> None:
        prompt = np.ones(CONTEXT_LIMIT - 3, np.int32)
        generation = await EmbeddedEngine(policy).generate(prompt, Sampling(max_tokens=2**31 - 1), (), "job")
        assert (len(generation.token_ids), generation.finish_reason) == (3, "length")

    asyncio.run(main())


def test_a_file_that_hangs_blocked_the_updates_behind_it(
    policy: Policy, make_policy: Callable[..., Policy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_policy(5).save(tmp_path / "new.npz")
    os.mkfifo(tmp_path / "fifo.npz")
    load, let_go = Policy.load, threading.Event()

    def hanging(path: Path, *shape: Any) -> Policy:
        if path.name == "hangs.npz":
            let_go.wait(30)
        return load(path, *shape)

    monkeypatch.setattr(Policy, "load", hanging)
    monkeypatch.setattr(local_engine, "LOAD_S", 0.2)

    async def main() -> None:
        engine = EmbeddedEngine(policy)
        hangs, fifo = (engine.update_weights(tmp_path / name, 1, "keep") for name in ("hangs.npz", "fifo.npz"))
        good = engine.update_weights(tmp_path / "new.npz", 2, "keep")
        outcomes = await asyncio.gather(hangs, fifo, good, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [InvalidWeights, InvalidWeights, float]
        assert "could not be read within 0.2 s" in str(outcomes[0])
        assert engine.weight_version == 2

    try:
        asyncio.run(main())
    finally:
        let_go.set()


def test_a_file_that_hangs_kept_the_process_from_ending(tmp_path: Path) -> None:
    code = (
        "import asyncio, pathlib, threading, uvloop\n"
        "from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine\n"
        "from prorl_zmq.inference.policy import Policy, PolicyShape\n"
        "engine = EmbeddedEngine(Policy.initial(PolicyShape(), 0))\n"
        "Policy.load = lambda *_: threading.Event().wait()\n"
        "async def main():\n"
        "    update = asyncio.create_task(engine.update_weights(pathlib.Path('x'), 1, 'keep'))\n"
        "    await asyncio.sleep(0.1)\n"
        "    update.cancel()\n"
        "uvloop.run(main())\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=30, cwd=tmp_path)
