"""Adapters in the transformers engine, against peft's own forward pass."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.adapters import PeftReference, peft_adapter
from support.later import Later

from prorl_zmq.config import LoraSlots
from prorl_zmq.errors import EngineFailed, InvalidWeights
from prorl_zmq.examples.trainers.shared.make_model import make
from prorl_zmq.inference.engine import NOTHING_MORE, Wanted, checked
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.engines import VersionSpan
from prorl_zmq.wire.messages.jobs import Sampling

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_zmq.inference import transformers_engine
    from prorl_zmq.inference.engine import Generation
    from prorl_zmq.inference.transformers_engine import TransformersEngine
else:
    transformers_engine = Later("prorl_zmq.inference.transformers_engine")

pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="it is of the extra [train]"),
    pytest.mark.xdist_group("transformers"),
]
NAMES = [f"a.{number}" for number in range(8)]
TOKENS = 12
CLOSE = 2e-5
APART = 0.5
"""Least mean distance of an answer's log-probs from those of another adapter."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    paths = [folder / "one", folder / "two"]
    for seed, path in enumerate(paths):
        make(path, seed)
    return paths


@pytest.fixture(scope="module")
def adapters(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: peft_adapter(models[0], folder / name, seed) for seed, name in enumerate([*NAMES, "next"])}


def new_engine(model: Path, lora: LoraSlots | None = LoraSlots(slots=8, rank=8)) -> TransformersEngine:  # noqa: B008
    chat = ChatSettings("transformers")
    return transformers_engine.load_transformers_engine(
        str(model), chat, 0, device="cpu", dtype="auto", rows=20, lora=lora
    )


def prompt_of(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 1024, 9).astype(np.int32)


async def ask(engine: TransformersEngine, adapter: tuple[str, int] | None, seed: int, tokens: int = TOKENS) -> Any:
    wanted = NOTHING_MORE if adapter is None else Wanted(adapter=adapter)
    sampling = Sampling(1.0, tokens, seed=seed)
    return checked(await engine.generate(prompt_of(seed), sampling, (), "job", wanted=wanted), tokens)


def distance(reference: PeftReference, adapter: Path | None, seed: int, done: Generation) -> Any:
    sequence = [*prompt_of(seed), *done.token_ids]
    return np.abs(reference.logprobs(adapter, [sequence], len(done.token_ids))[0] - done.logprobs)


def test_rows_of_eight_adapters_and_the_base_in_one_batch(models: list[Path], adapters: dict[str, Path]) -> None:
    async def main() -> None:
        engine = new_engine(models[0])
        assert engine.description.adapter_slots == 8
        for version, name in enumerate(NAMES):
            await engine.load_adapter(name, version, adapters[name])
        asked = [None, *((name, version) for version, name in enumerate(NAMES))] * 2
        answers = await asyncio.gather(*(ask(engine, adapter, seed) for seed, adapter in enumerate(asked)))
        reference = PeftReference(models[0])
        for seed, (adapter, done) in enumerate(zip(asked, answers, strict=True)):
            own = adapters[adapter[0]] if adapter else None
            other = adapters["next"]
            assert done.spans == (VersionSpan(adapter[1] if adapter else 0, 0, TOKENS),)
            assert distance(reference, own, seed, done).max() < CLOSE
            assert distance(reference, other, seed, done).mean() > APART
        for version, name in enumerate(NAMES):
            await engine.remove_adapter(name, version)
        await engine.remove_adapter("a.0", 0)
        alone = await ask(engine, None, 0)
        assert alone.token_ids.tolist() == answers[0].token_ids.tolist()
        assert not any("lora" in name for name, _ in engine._model.named_modules())
        await engine.close()

    asyncio.run(main())


def test_texts_are_scored_by_an_adapter_or_the_base_while_others_generate(
    models: list[Path], adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prorl_zmq.inference.transformers_engine.SCORED_TOKENS", 7)

    async def main() -> None:
        engine, text = new_engine(models[0]), np.random.default_rng(5).integers(0, 1024, 40).astype(np.int32)
        for name in ("a.0", "a.1"):
            await engine.load_adapter(name, 7, adapters[name])
        running = asyncio.create_task(ask(engine, ("a.1", 7), 1))
        reference = PeftReference(models[0])
        for adapter, folder in ((("a.0", 7), adapters["a.0"]), (None, None), (("a.1", 7), adapters["a.1"])):
            scores = await engine.score(text, 3, "job", adapter)
            exact = reference.logprobs(folder, [text.tolist()], len(text) - 1)[0]
            assert np.abs(scores.logprobs[1:] - exact).max() < CLOSE
            assert scores.weight_version == (0 if adapter is None else 7)
            assert (scores.top_logprobs[1:, 0] >= scores.logprobs[1:]).all()
        assert distance(reference, adapters["a.1"], 1, await running).max() < CLOSE
        with pytest.raises(EngineFailed, match=r"version 8 of the adapter a\.0 is not loaded"):
            await engine.score(text, 3, "job", ("a.0", 8))
        await engine.close()

    asyncio.run(main())


def test_a_version_loaded_and_one_removed_while_others_generate(models: list[Path], adapters: dict[str, Path]) -> None:
    async def main() -> None:
        engine = new_engine(models[0])
        await engine.load_adapter("a.0", 1, adapters["a.0"])
        await engine.load_adapter("gone", 1, adapters["a.1"])
        old = [asyncio.create_task(ask(engine, ("a.0", 1), seed, 60)) for seed in range(4)]
        while not (engine._rows and len(engine._rows[0].logprobs) >= 5):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        await engine.load_adapter("a.0", 2, adapters["next"])
        await engine.remove_adapter("gone", 1)
        assert not any(task.done() for task in old)
        new = await asyncio.gather(*(ask(engine, ("a.0", 2), seed, 60) for seed in range(4)))
        reference = PeftReference(models[0])
        for version, name, answers in ((1, "a.0", await asyncio.gather(*old)), (2, "next", new)):
            for seed, done in enumerate(answers):
                assert done.spans == (VersionSpan(version, 0, 60),)
                assert distance(reference, adapters[name], seed, done).max() < CLOSE
        await engine.close()

    asyncio.run(main())


def test_what_is_not_loaded_is_not_answered(models: list[Path], adapters: dict[str, Path], tmp_path: Path) -> None:
    async def main() -> None:
        engine = new_engine(models[0])
        await engine.load_adapter("a.0", 1, adapters["a.0"])
        for adapter in (("a.0", 2), ("a.1", 1)):
            with pytest.raises(EngineFailed, match=f"version {adapter[1]} of the adapter {adapter[0]} is not loaded"):
                await ask(engine, adapter, 0)
        with pytest.raises(InvalidWeights, match="its rank is 16"):
            await engine.load_adapter("a.1", 1, peft_adapter(models[0], tmp_path / "rank16", 0, rank=16))
        with pytest.raises(EngineFailed, match="adapters are loaded"):
            await engine.update_weights(models[1], 5, "keep")
        assert engine.weight_version == 0
        await engine.remove_adapter("a.0", 1)
        await engine.update_weights(models[1], 5, "keep")
        with pytest.raises(EngineFailed, match=r"version 1 of the adapter a\.0 is not loaded"):
            await ask(engine, ("a.0", 1), 0)
        await engine.load_adapter("a.0", 6, adapters["a.0"])
        done = await ask(engine, ("a.0", 6), 0)
        assert distance(PeftReference(models[1]), adapters["a.0"], 0, done).max() < CLOSE
        await engine.close()
        other = new_engine(models[0], None)
        assert other.description.adapter_slots == 0
        with pytest.raises(EngineFailed, match="start it with the option lora"):
            await other.load_adapter("a.0", 1, adapters["a.0"])
        await other.close()

    asyncio.run(main())


@pytest.mark.parametrize("others", [(), ("a.1",)])
def test_an_adapter_that_finds_no_memory_leaves_the_model_as_it_was(
    models: list[Path], adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch, others: tuple[str, ...]
) -> None:
    from peft.tuners.lora import LoraModel

    create, left = LoraModel._create_and_replace, [1, 2, 3]

    def create_three(lora: LoraModel, *args: Any, **more: Any) -> None:
        if not left:
            raise MemoryError("none is left")
        left.pop()
        create(lora, *args, **more)

    async def main() -> None:
        engine = new_engine(models[0])
        asked = (None, *((name, 1) for name in others))
        for name in others:
            await engine.load_adapter(name, 1, adapters[name])
        before = [await ask(engine, adapter, 0) for adapter in asked]
        with monkeypatch.context() as patched:
            patched.setattr(LoraModel, "_create_and_replace", create_three)
            with pytest.raises(MemoryError):
                await engine.load_adapter("a.0", 1, adapters["a.0"])
        after = [await ask(engine, adapter, 0) for adapter in asked]
        assert [one.token_ids.tolist() for one in after] == [one.token_ids.tolist() for one in before]
        assert any("lora" in name for name, _ in engine._model.named_modules()) == bool(others)
        await engine.load_adapter("a.0", 1, adapters["a.0"])
        done = await ask(engine, ("a.0", 1), 1)
        assert distance(PeftReference(models[0]), adapters["a.0"], 1, done).max() < CLOSE
        await engine.close()

    asyncio.run(main())
