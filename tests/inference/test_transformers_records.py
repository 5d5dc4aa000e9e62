"""The records of the transformers engine beside what a trainer computes with the same model."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from record_checks import APART, CUTS, EXACT, turn
from support.later import Later

from prorl_zmq.errors import EngineFailed
from prorl_zmq.examples.trainers.shared.make_model import make
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.jobs import Sampling

if TYPE_CHECKING:
    from pathlib import Path

    import mixtures

    from prorl_zmq.inference import transformers_engine
    from prorl_zmq.inference.engine import Generation
    from prorl_zmq.inference.transformers_engine import TransformersEngine
else:
    mixtures, transformers_engine = Later("mixtures"), Later("prorl_zmq.inference.transformers_engine")

pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="it is of the extra [train]"),
    pytest.mark.xdist_group("transformers"),
]
PROMPTS = [np.random.default_rng(seed).integers(7, 1000, 10 + 11 * seed).astype(np.int32) for seed in range(8)]


@pytest.fixture(scope="module", params=["qwen3_moe", "olmoe"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp(request.param)
    for seed in range(2):
        mixtures.make_mixture(folder / str(seed), request.param, seed)
    return [folder / "0", folder / "1"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense") / "model"
    make(folder)
    return folder


def new_engine(folder: Path) -> TransformersEngine:
    return transformers_engine.load_transformers_engine(
        str(folder), ChatSettings("transformers"), 0, device="cpu", dtype="float32", rows=5
    )


def test_replayed_routes_give_the_engines_log_probs(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_zmq.inference.transformers_engine.PREFILL_TOKENS", 90)

    async def main() -> list[Generation]:
        engine = new_engine(folders[0])
        turns = [Sampling(max_tokens=30 + 3 * seed, seed=seed) for seed in range(len(PROMPTS))]
        asked = zip(PROMPTS, turns, strict=True)
        done = await asyncio.gather(*(turn(engine, prompt, sampling, "experts") for prompt, sampling in asked))
        await engine.close()
        return done

    trainer, without = mixtures.TrainersMixture(folders[0]), []
    for prompt, done in zip(PROMPTS, asyncio.run(main()), strict=True):
        tokens, routes = np.concatenate([prompt, done.token_ids]), done.records["experts"]
        assert routes.dtype == np.uint8
        assert routes.shape == (len(tokens) - 1, mixtures.LAYERS, mixtures.CHOSEN)
        assert trainer.gap(tokens, done, routes) <= EXACT
        without.append(trainer.gap(tokens, done, None))
        wrong = {
            "a row late": routes[1:],
            "a row early": np.concatenate([routes[:1], routes[:-1]]),
            "layers in another order": routes[:, ::-1],
            "zeros for unknown": np.concatenate([routes[:-5], np.zeros_like(routes[:5])]),
        }
        for mistake, planted in wrong.items():
            assert trainer.gap(tokens, done, planted) > APART, mistake
    assert max(without) > APART


def test_the_next_turn_gives_the_row_that_the_last_one_could_not(folders: list[Path]) -> None:
    async def main() -> tuple[Generation, Generation, np.ndarray[Any, Any]]:
        engine = new_engine(folders[0])
        first = await turn(engine, PROMPTS[3], Sampling(max_tokens=20, seed=1), "experts")
        prompt = np.concatenate([PROMPTS[3], first.token_ids, PROMPTS[1]])
        known = len(first.records["experts"])
        second = await turn(engine, prompt, Sampling(max_tokens=25, seed=2), "experts", rows_known=known)
        with pytest.raises(EngineFailed, match="rows of experts cannot be known"):
            await turn(engine, PROMPTS[3], Sampling(), "experts", rows_known=len(PROMPTS[3]) + 1)
        await engine.close()
        return first, second, np.concatenate([prompt, second.token_ids])

    first, second, tokens = asyncio.run(main())
    routes = np.concatenate([first.records["experts"], second.records["experts"]])
    assert len(routes) == len(tokens) - 1
    trainer = mixtures.TrainersMixture(folders[0])
    assert trainer.gap(tokens, second, routes) <= EXACT
    lost = np.delete(routes, len(first.records["experts"]), axis=0)
    assert trainer.gap(tokens, second, lost) > APART, "the row between two turns is needed"


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_new_weights_within_a_turn_replace_no_row(folders: list[Path], mode: Any) -> None:
    async def main() -> tuple[Generation, np.ndarray[Any, Any], int]:
        engine = new_engine(folders[0])
        asked = Sampling(max_tokens=60, seed=1)
        task = asyncio.create_task(turn(engine, PROMPTS[2], asked, "experts"))
        async with asyncio.timeout(60):
            while not (engine._rows and len(engine._rows[0].logprobs) >= 8):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0)
        await engine.update_weights(folders[1], 1, mode)
        done = await task
        tokens, known = np.concatenate([PROMPTS[2], done.token_ids]), len(PROMPTS[2])
        known = len(done.records["experts"])
        if mode == "abort":
            assert (done.finish_reason, known) == ("abort", len(tokens) - 1)
            rest = await turn(engine, tokens, asked, "experts", rows_known=known)
            tokens = np.concatenate([tokens, rest.token_ids])
            routes = np.concatenate([done.records["experts"], rest.records["experts"]])
            changed = known
        else:
            routes, changed = done.records["experts"], len(PROMPTS[2]) + done.spans[0].end
        await engine.close()
        return routes, tokens, changed

    routes, tokens, changed = asyncio.run(main())
    assert len(routes) == len(tokens) - 1
    old, new = (mixtures.TrainersMixture(folder).routes(tokens) for folder in folders)
    assert 20 < changed < len(routes)
    np.testing.assert_array_equal(routes[:changed], old[:changed])
    np.testing.assert_array_equal(routes[changed:], new[changed:])
    assert (old != new).any(axis=(1, 2)).all(), "the two models cannot be told apart"


@pytest.mark.parametrize("sampling", CUTS)
def test_renormalised_over_the_mask_the_log_probs_are_the_engines(dense: Path, sampling: Sampling) -> None:
    async def main() -> list[Generation]:
        engine = new_engine(dense)
        with pytest.raises(EngineFailed, match="does not give the records experts"):
            await turn(engine, PROMPTS[0], Sampling(), "experts")
        done = await asyncio.gather(
            *(turn(engine, prompt, sampling, "sampling_mask", "top_logprobs:30") for prompt in PROMPTS)
        )
        await engine.close()
        return done

    trainer, ratios, biased = mixtures.TrainersMixture(dense), [], []
    for prompt, done in zip(PROMPTS, asyncio.run(main()), strict=True):
        tokens = np.concatenate([prompt, done.token_ids])
        logits, records = trainer.logits(tokens), done.records
        masked = mixtures.renormalised(
            logits, tokens, len(prompt), sampling.temperature, records["mask_ids"], records["mask_counts"]
        )
        np.testing.assert_allclose(masked, done.logprobs, atol=EXACT)
        ratios.append(np.exp(masked - done.logprobs))
        biased.append(mixtures.logprobs_of(logits, tokens, len(prompt), sampling.temperature) - done.logprobs)
        narrow = records["mask_counts"] < 30
        assert ((records["top_ids"] == -1).sum(axis=1)[narrow] == 30 - records["mask_counts"][narrow]).all()
        assert np.isfinite(records["top_logprobs"]).all()
    assert np.concatenate(ratios).mean() == pytest.approx(1, abs=EXACT)
    assert np.concatenate(biased).mean() < -APART


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_the_likeliest_tokens_are_a_trainers(dense: Path, temperature: float) -> None:
    async def main() -> Generation:
        engine = new_engine(dense)
        done = await turn(engine, PROMPTS[4], Sampling(temperature, 30, seed=3), "top_logprobs:7")
        await engine.close()
        return done

    done = asyncio.run(main())
    tokens = np.concatenate([PROMPTS[4], done.token_ids])
    logits = mixtures.TrainersMixture(dense).logits(tokens)[len(PROMPTS[4]) - 1 :] / (temperature or 1.0)
    expected = logits.log_softmax(-1).topk(7)
    np.testing.assert_allclose(done.records["top_logprobs"], expected.values, atol=EXACT)
    np.testing.assert_array_equal(done.records["top_ids"], expected.indices)
