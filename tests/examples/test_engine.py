from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the example needs torch: install the extra `train`")

from prorl_zmq.errors import EngineFailed, InvalidWeights
from prorl_zmq.examples.train_torch.engine import ROWS, TorchEngine
from prorl_zmq.examples.train_torch.model import Model, ModelShape
from prorl_zmq.examples.train_torch.weights import save_weights
from prorl_zmq.inference.engine import checked
from prorl_zmq.wire.messages.backends import ChatSettings
from prorl_zmq.wire.messages.jobs import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

    from prorl_zmq.inference.engine import Generation

SHAPE = ModelShape(vocabulary=40, context=64, width=32, layers=2, heads=2, inner=48)
PROMPT = np.arange(1, 12, dtype=np.int32)


def new_engine(seed: int = 0, version: int = 0) -> TorchEngine:
    return TorchEngine(Model(SHAPE, seed), ChatSettings(), version)


def recomputed(model: Model, prompt: np.ndarray[Any, Any], generation: Generation) -> Any:
    """What the learner computes for the tokens of a generation, by one pass over all of them."""
    tokens = torch.from_numpy(np.concatenate([prompt, generation.token_ids]).astype(np.int64))
    with torch.inference_mode():
        scores = torch.log_softmax(model.logits(model.hidden(tokens[None, :-1]))[0], dim=-1)
    return scores.gather(1, tokens[1:, None])[len(prompt) - 1 :, 0].numpy()


async def until(condition: Callable[[], object]) -> None:
    """Let the engine make steps until something is so; it makes one each time the loop comes round."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)


async def until_generated(engine: TorchEngine, tokens: int) -> None:
    await until(lambda: engine._rows and len(engine._rows[0].logprobs) >= tokens)


def test_log_probs_are_the_learners_own_however_many_run() -> None:
    async def main() -> None:
        engine = new_engine(version=3)
        prompts = [PROMPT[: 1 + index % 9] for index in range(ROWS + 20)]
        generations = await asyncio.gather(
            *(engine.generate(p, Sampling(1.0, 3 + i % 30, i), (5,), "job") for i, p in enumerate(prompts))
        )
        for index, (prompt, generation) in enumerate(zip(prompts, generations, strict=True)):
            checked(generation, 3 + index % 30, SHAPE.vocabulary)
            np.testing.assert_allclose(generation.logprobs, recomputed(engine._model, prompt, generation), atol=1e-5)
            assert {span.weight_version for span in generation.spans} == {3}
            assert (generation.finish_reason == "stop") == (generation.token_ids[-1] == 5)
            assert 5 not in generation.token_ids[:-1]

    asyncio.run(main())


def test_a_seed_gives_the_same_answer_whatever_else_runs() -> None:
    async def main() -> None:
        engine = new_engine()
        alone = await engine.generate(PROMPT, Sampling(1.0, 20, 7), (), "job")
        crowd = await asyncio.gather(
            *(engine.generate(PROMPT[:seed], Sampling(1.0, 4 * seed, seed), (), "job") for seed in range(1, 7)),
            engine.generate(PROMPT, Sampling(1.0, 20, 7), (), "job"),
        )
        assert crowd[-1].token_ids.tolist() == alone.token_ids.tolist()

    asyncio.run(main())


def test_new_weights_between_two_tokens_carry_versions_and_exact_log_probs(tmp_path: Path) -> None:
    later = Model(SHAPE, seed=1)
    save_weights(later, tmp_path / "1.safetensors")

    async def main() -> None:
        engine, before = new_engine(), Model(SHAPE, seed=0)
        running = [
            asyncio.create_task(engine.generate(PROMPT[:size], Sampling(1.0, 40, size), (), "job")) for size in (4, 9)
        ]
        await until_generated(engine, 5)
        await engine.update_weights(tmp_path / "1.safetensors", 1, "keep")
        assert engine.weight_version == 1
        for size, task in zip((4, 9), running, strict=True):
            generation = checked(await task, 40, SHAPE.vocabulary)
            (first, second) = generation.spans
            assert (first.weight_version, second.weight_version) == (0, 1)
            assert 5 <= first.end < 40
            for model, span in ((before, first), (later, second)):
                place = slice(span.start, span.end)
                expected = recomputed(model, PROMPT[:size], generation)[place]
                np.testing.assert_allclose(generation.logprobs[place], expected, atol=1e-5)

    asyncio.run(main())


def test_drain_ends_what_runs_with_the_old_weights_first(tmp_path: Path) -> None:
    save_weights(Model(SHAPE, seed=1), tmp_path / "1.safetensors")

    async def main() -> None:
        engine = new_engine()
        running = asyncio.create_task(engine.generate(PROMPT, Sampling(1.0, 30, 0), (), "job"))
        await until_generated(engine, 2)
        update = asyncio.create_task(engine.update_weights(tmp_path / "1.safetensors", 1, "drain"))
        await until(lambda: not engine._admits.is_set())
        late = asyncio.create_task(engine.generate(PROMPT, Sampling(1.0, 5, 0), (), "job"))
        await update
        assert [span.weight_version for span in (await running).spans] == [0]
        assert [span.weight_version for span in (await late).spans] == [1]

    asyncio.run(main())


def test_abort_ends_what_runs_as_it_is(tmp_path: Path) -> None:
    save_weights(Model(SHAPE, seed=1), tmp_path / "1.safetensors")

    async def main() -> None:
        engine = new_engine()
        tasks = [
            asyncio.create_task(engine.generate(PROMPT, Sampling(1.0, 40, seed), (), "job")) for seed in range(ROWS + 2)
        ]
        await until_generated(engine, 2)
        await engine.update_weights(tmp_path / "1.safetensors", 1, "abort")
        generations = await asyncio.gather(*tasks)
        assert {generation.finish_reason for generation in generations} == {"abort"}
        assert [len(g.token_ids) for g in generations[ROWS:]] == [0, 0], "they waited for a row"
        assert all(2 <= len(g.token_ids) < 40 for g in generations[:ROWS])
        assert (await engine.generate(PROMPT, Sampling(1.0, 3, 0), (), "job")).spans[0].weight_version == 1

    asyncio.run(main())


@pytest.mark.parametrize("version", [4, None])
def test_the_halves_of_an_update_stop_and_go_on(version: int | None) -> None:
    async def main() -> None:
        engine, before = new_engine(version=3), Model(SHAPE, seed=0)
        running = asyncio.create_task(engine.generate(PROMPT, Sampling(1.0, 30, 0), (), "job"))
        await until_generated(engine, 4)
        await engine.begin_update("keep")
        count = len(engine._rows[0].logprobs)
        late = asyncio.create_task(engine.generate(PROMPT, Sampling(1.0, 5, 1), (), "job"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(engine._rows[0].logprobs) == count
        later = Model(SHAPE, seed=1)
        if version is not None:
            engine._model.load_state_dict(later.state_dict())
        await engine.end_update(version)
        generation = await running
        assert (await late).spans[0].weight_version == (version or 3)
        assert [span.weight_version for span in generation.spans] == ([3] if version is None else [3, 4])
        expected = recomputed(before if version is None else later, PROMPT, generation)
        np.testing.assert_allclose(generation.logprobs[count:], expected[count:], atol=1e-5)

    asyncio.run(main())


def test_weights_that_cannot_be_used_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "garbage").write_bytes(b"no weights")
    save_weights(Model(ModelShape(vocabulary=41, context=64, width=32, layers=2, heads=2, inner=48)), tmp_path / "wide")
    save_weights(Model(ModelShape(vocabulary=40, context=64, width=32, layers=1, heads=2, inner=48)), tmp_path / "flat")
    broken = Model(SHAPE)
    with torch.no_grad():
        broken.embedding.weight[0, 0] = torch.nan
    save_weights(broken, tmp_path / "nan")

    async def main() -> None:
        engine = new_engine()
        expected = await engine.generate(PROMPT, Sampling(1.0, 10, 0), (), "job")
        for name, problem in {
            "missing": "no such file",
            "garbage": "safetensors",
            "wide": "embedding.weight",
            "flat": "other names",
            "nan": "not finite",
        }.items():
            with pytest.raises(InvalidWeights, match=problem):
                await engine.update_weights(tmp_path / name, 1, "keep")
        assert engine.weight_version == 0
        again = await engine.generate(PROMPT, Sampling(1.0, 10, 0), (), "job")
        assert again.token_ids.tolist() == expected.token_ids.tolist()

    asyncio.run(main())


def test_a_cancelled_generation_gives_its_row_to_another() -> None:
    async def main() -> None:
        engine = new_engine()
        tasks = [
            asyncio.create_task(engine.generate(PROMPT, Sampling(1.0, 50, seed), (), "job")) for seed in range(ROWS + 1)
        ]
        await until_generated(engine, 2)
        tasks[0].cancel()
        last = await tasks[-1]
        np.testing.assert_allclose(last.logprobs, recomputed(engine._model, PROMPT, last), atol=1e-5)
        await asyncio.gather(*tasks[1:-1])
        assert engine._decoding is None or not engine._rows

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [([], "empty"), ([1, 40], "outside of 0 to 39"), ([-1], "outside"), ([1] * 64, "no room in a context of 64")],
)
def test_prompts_that_cannot_be_continued(prompt: list[int], problem: str) -> None:
    async def main() -> None:
        with pytest.raises(EngineFailed, match=problem):
            await new_engine().generate(np.array(prompt, np.int32), Sampling(), (), "job")

    asyncio.run(main())


def test_the_context_ends_a_generation() -> None:
    async def main() -> None:
        generation = await new_engine().generate(PROMPT, Sampling(1.0, 1000, 0), (), "job")
        assert len(generation.token_ids) == SHAPE.context - len(PROMPT)
        assert generation.finish_reason == "length"

    asyncio.run(main())


def test_close_leaves_nobody_waiting() -> None:
    async def main() -> None:
        engine = new_engine()
        tasks = [
            asyncio.create_task(engine.generate(PROMPT, Sampling(1.0, 50, seed), (), "job")) for seed in range(ROWS + 1)
        ]
        await until_generated(engine, 2)
        await engine.begin_update("keep")
        await engine.close()
        await engine.close()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, EngineFailed)
        with pytest.raises(EngineFailed, match="closed"):
            await engine.generate(PROMPT, Sampling(), (), "job")

    asyncio.run(main())
