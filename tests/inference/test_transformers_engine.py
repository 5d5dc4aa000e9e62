"""The transformers engine beside what a trainer computes with the same model."""

from __future__ import annotations

import asyncio
import shutil
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.later import Later

from prorl_zmq.errors import ConfigError, EngineFailed, InvalidWeights
from prorl_zmq.examples.trainers.shared.make_model import make
from prorl_zmq.inference.engine import checked
from prorl_zmq.inference.policy import draw
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.jobs import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch
    import transformers

    from prorl_zmq.inference import transformers_engine
    from prorl_zmq.inference.engine import Generation
    from prorl_zmq.inference.transformers_engine import TransformersEngine
else:
    torch, transformers = Later("torch"), Later("transformers")
    transformers_engine = Later("prorl_zmq.inference.transformers_engine")

pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="it is of the extra [train]"),
    pytest.mark.xdist_group("transformers"),
]
ROWS = 5
PROMPTS = [np.random.default_rng(index).integers(0, 1024, 1 + 7 * index % 41).astype(np.int32) for index in range(14)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    paths = [folder / "one", folder / "two"]
    for seed, path in enumerate(paths):
        make(path, seed)
    return paths


def new_engine(model: Path, version: int = 0) -> TransformersEngine:
    chat = ChatSettings("transformers")
    return transformers_engine.load_transformers_engine(
        str(model), chat, version, device="cpu", dtype="auto", rows=ROWS
    )


def recomputed(model: Path, prompt: np.ndarray[Any, Any], generation: Generation, temperature: float) -> Any:
    """What a trainer computes for the tokens of a generation, by one pass over all of them."""
    trained = transformers.AutoModelForCausalLM.from_pretrained(model)
    tokens = torch.from_numpy(np.concatenate([prompt, generation.token_ids]).astype(np.int64))
    with torch.inference_mode():
        scores = torch.log_softmax(trained(tokens[None, :-1]).logits[0].float() / temperature, dim=-1)
    return scores.gather(1, tokens[1:, None])[len(prompt) - 1 :, 0].numpy()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)


def test_log_probs_are_a_trainers_own_however_many_join_and_leave(
    models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prorl_zmq.inference.transformers_engine.PREFILL_TOKENS", 60)

    async def main() -> None:
        engine = new_engine(models[0], version=3)
        turns = [Sampling(0.7 if i % 2 else 1.0, 3 + 5 * i % 23, seed=i) for i in range(len(PROMPTS))]
        done = await asyncio.gather(
            *(engine.generate(prompt, turn, (5,), "job") for prompt, turn in zip(PROMPTS, turns, strict=True))
        )
        for prompt, turn, generation in zip(PROMPTS, turns, done, strict=True):
            checked(generation, turn.max_tokens)
            assert generation.spans[0].weight_version == 3
            expected = recomputed(models[0], prompt, generation, turn.temperature)
            np.testing.assert_allclose(generation.logprobs, expected, atol=2e-5)
        again = await engine.generate(PROMPTS[3], turns[3], (5,), "job")
        assert again.token_ids.tolist() == done[3].token_ids.tolist(), "a seed gives the same tokens in any company"
        await engine.close()

    asyncio.run(main())


def test_new_weights_between_two_tokens_make_the_next_ones(models: list[Path]) -> None:
    async def main() -> None:
        engine = new_engine(models[0])
        running = [
            asyncio.create_task(engine.generate(prompt, Sampling(1.0, 60, seed=1), (), "job")) for prompt in PROMPTS[:3]
        ]
        await until(lambda: engine._rows and len(engine._rows[0].logprobs) >= 8)
        await engine.update_weights(models[1], 1, "keep")
        for prompt, generation in zip(PROMPTS, await asyncio.gather(*running), strict=False):
            before, after = generation.spans
            assert (before.weight_version, after.weight_version) == (0, 1)
            parts = (models[0], slice(0, before.end)), (models[1], slice(before.end, after.end))
            for model, part in parts:
                expected = recomputed(model, prompt, generation, 1.0)[part]
                np.testing.assert_allclose(generation.logprobs[part], expected, atol=2e-5)
        await engine.close()

    asyncio.run(main())


def test_weights_that_were_loaded_do_not_change_with_their_files(models: list[Path], tmp_path: Path) -> None:
    """A host changes its copy in place while the engine generates with the version before."""
    folder = tmp_path / "copy"
    shutil.copytree(models[1], folder)
    engine = new_engine(models[0])
    asyncio.run(engine.update_weights(folder, 1, "keep"))
    before = [one.clone() for one in engine._model.parameters()]
    for file in folder.glob("*.safetensors"):
        with file.open("r+b") as opened:
            size = file.stat().st_size
            opened.seek(size // 2)
            opened.write(bytes(size - size // 2))
    assert all(torch.equal(one, other) for one, other in zip(before, engine._model.parameters(), strict=True))


def test_what_is_cancelled_leaves_its_row_and_the_others_go_on(models: list[Path]) -> None:
    async def main() -> None:
        engine = new_engine(models[0])
        first, second = (
            asyncio.create_task(engine.generate(prompt, Sampling(1.0, 40, seed=2), (), "job"))
            for prompt in PROMPTS[5:7]
        )
        await until(lambda: len(engine._rows) == 2)
        first.cancel()
        generation = await second
        np.testing.assert_allclose(generation.logprobs, recomputed(models[0], PROMPTS[6], generation, 1.0), atol=2e-5)
        with pytest.raises(EngineFailed):
            await engine.generate(np.zeros(0, np.int32), Sampling(), (), "job")
        await engine.close()

    asyncio.run(main())


def test_what_cannot_be_served_is_said(models: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(models[0], other)
    (other / "model.safetensors").write_bytes(b"none")
    with pytest.raises(InvalidWeights, match="not a whole safetensors file"):
        new_engine(other)
    shutil.copy(models[0] / "model.safetensors", other)
    (other / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="transformers cannot load"):
        new_engine(other)
    with pytest.raises(ConfigError, match="no such folder"):
        transformers_engine.load_transformers_engine(
            str(tmp_path / "missing" / "more" / "x"), ChatSettings(), 0, device="cpu", dtype="auto", rows=1
        )
    for device in ("tpu9", "cuda:99"):
        with pytest.raises(ConfigError, match=f"device {device} cannot be used"):
            transformers_engine.load_transformers_engine(
                str(models[0]), ChatSettings(), 0, device=device, dtype="auto", rows=1
            )
    engine = new_engine(models[0])
    (other / "model.safetensors").unlink()
    with pytest.raises(InvalidWeights):
        asyncio.run(engine.update_weights(other, 1, "keep"))
    assert engine.weight_version == 0


def test_tokens_are_drawn_as_the_embedded_engine_draws_them() -> None:
    random = np.random.default_rng(0)
    scores = (5 * random.standard_normal((40, 300))).astype(np.float32)
    temperatures, uniforms = np.tile([0.0, 1e-300, 0.5, 1.0, 2.0], 8), random.random(40)
    tokens, logprobs = transformers_engine._drawn(torch.from_numpy(scores), temperatures, uniforms)
    expected = draw(scores, temperatures, uniforms)
    assert tokens == expected[0].tolist()
    np.testing.assert_allclose(logprobs, expected[1], atol=1e-5)


@pytest.mark.parametrize("sampling", [Sampling(1.0, 20, 3, top_k=1), Sampling(1.0, 20, 3, min_p=1.0)])
def test_what_is_truncated_is_never_drawn(models: list[Path], sampling: Sampling) -> None:
    async def main() -> None:
        engine = new_engine(models[0])
        greedy, narrow, free = await asyncio.gather(
            *(
                engine.generate(PROMPTS[4], one, (), "job")
                for one in (Sampling(0.0, 20), sampling, Sampling(1.0, 20, 3))
            )
        )
        assert narrow.token_ids.tolist() == greedy.token_ids.tolist() != free.token_ids.tolist()
        assert narrow.logprobs.tolist() == [0.0] * 20, "nothing else could be drawn"
        await engine.close()

    asyncio.run(main())


@pytest.mark.proof
def test_a_gpu_gives_a_trainers_log_probs_and_takes_new_weights(models: list[Path]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this machine has no GPU that torch can use")

    async def main() -> None:
        engine = transformers_engine.load_transformers_engine(
            str(models[0]), ChatSettings("transformers"), 0, device="cuda", dtype="float32", rows=ROWS
        )
        for version, model in enumerate(models):
            if version:
                await engine.update_weights(model, version, "keep")
            turns = [Sampling(1.0, 20, seed=seed) for seed in range(len(PROMPTS))]
            done = await asyncio.gather(
                *(engine.generate(prompt, turn, (), "job") for prompt, turn in zip(PROMPTS, turns, strict=True))
            )
            for prompt, generation in zip(PROMPTS, done, strict=True):
                assert generation.spans[-1].weight_version == version
                np.testing.assert_allclose(generation.logprobs, recomputed(model, prompt, generation, 1.0), atol=1e-3)
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("length", [1, 2, 40, 130])
def test_scores_are_those_of_float64(models: list[Path], length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in parts, each with the cache of those before it, and beside generations."""
    monkeypatch.setattr(transformers_engine, "SCORED_TOKENS", 48)
    token_ids = np.random.default_rng(length).integers(0, 1024, length).astype(np.int32)

    async def scored() -> Any:
        engine = new_engine(models[0], 4)
        generation = engine.generate(PROMPTS[3], Sampling(1.0, 20, 1), (), "job")
        return await asyncio.gather(engine.score(token_ids, 20, "job"), generation)

    scores, generation = asyncio.run(scored())
    model = transformers.AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float64)
    with torch.inference_mode():
        logits = model(torch.from_numpy(token_ids.astype(np.int64))[None]).logits[0, :-1]
    expected = logits.log_softmax(-1).numpy()
    own = np.take_along_axis(expected, token_ids[1:, None].astype(np.int64), 1)[:, 0]
    np.testing.assert_allclose(scores.logprobs[1:], own, atol=1e-4)
    np.testing.assert_allclose(scores.top_logprobs[1:], -np.sort(-expected, 1)[:, :20], atol=1e-4)
    named = np.take_along_axis(expected, scores.top_ids[1:].astype(np.int64), 1)
    np.testing.assert_allclose(scores.top_logprobs[1:], named, atol=1e-4)
    assert (scores.weight_version, scores.logprobs[0]) == (4, 0)
    assert np.all(scores.top_ids[0] == -1)
    np.testing.assert_allclose(generation.logprobs, recomputed(models[0], PROMPTS[3], generation, 1.0), atol=1e-4)
