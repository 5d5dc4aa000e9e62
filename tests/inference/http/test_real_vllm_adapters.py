"""Adapters over HTTP in a real vLLM server, against peft's own forward pass."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.adapters import PeftReference, peft_adapter
from vllm_python import START_LIMIT_S
from vllm_server import VllmServer

from prorl_zmq.config import LoraSlots
from prorl_zmq.errors import EngineFailed, InvalidWeights
from prorl_zmq.inference.adapters import WEIGHTS
from prorl_zmq.inference.engine import NOTHING_MORE, Wanted
from prorl_zmq.inference.hosting.hosted_adapters import HostedAdapters
from prorl_zmq.inference.http.http_engine import HttpEngine
from prorl_zmq.wire.messages.jobs import Sampling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from prorl_zmq.inference.engine import Generation

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(2 * START_LIMIT_S),
    pytest.mark.xdist_group("transformers"),
]
FLAGS = (
    "--enable-lora",
    "--max-loras=24",
    "--max-cpu-loras=24",
    "--max-lora-rank=8",
    "--logprobs-mode=processed_logprobs",
)
"""More slots than these tests load adapters: a CPU build answers for the base with the last slot's."""
APIS = ("vllm", "completions")
TOKENS = 16
CLOSE = 1e-4
"""Most that a log-prob may differ from peft's, in float32."""
APART = 1.0
"""Least that some log-prob of an answer differs from that of any other adapter, and of the base."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("lora-server")
    with VllmServer(folder, *FLAGS, VLLM_ALLOW_RUNTIME_LORA_UPDATING="True") as server:
        yield server


@pytest.fixture(scope="module")
def saved(server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    names = ("a", "b", "next")
    return {name: peft_adapter(server.models[0], folder / name, seed) for seed, name in enumerate(names)}


class Served:
    """An engine of the server, and the adapters that its host has."""

    def __init__(self, engine: HttpEngine, adapters: HostedAdapters, reference: PeftReference) -> None:
        self.engine, self.adapters, self._reference = engine, adapters, reference

    async def ask(self, model: str, prompt: Any) -> Generation:
        sampling = Sampling(max_tokens=TOKENS, seed=1)
        if not model:
            return await self.engine.generate(prompt, sampling, (), "job", wanted=NOTHING_MORE)
        with self.adapters.using(model) as adapter:
            return await self.engine.generate(prompt, sampling, (), "job", wanted=Wanted(adapter=adapter))

    def distance(self, folder: Path | None, prompt: Any, done: Generation) -> Any:
        """Return how far each log-prob is from that of an adapter, float32 [G]."""
        own = self._reference.logprobs(folder, [[*prompt, *done.token_ids]], len(done.token_ids))
        return np.abs(own[0] - done.logprobs)


@asynccontextmanager
async def served(server: VllmServer, api: Any, copies: Path) -> AsyncIterator[Served]:
    engine = await HttpEngine.start(server.url, api=api, start_s=30.0, lora=LoraSlots(slots=4, rank=8))
    adapters = HostedAdapters(engine, copies / "service")
    try:
        yield Served(engine, adapters, PeftReference(server.models[0]))
    finally:
        for model, version in adapters.current.items():
            adapters.retire(model, version)
        await adapters.close()
        await engine.close()


@pytest.mark.parametrize("api", APIS)
def test_each_answer_is_its_own_adapters(server: VllmServer, saved: dict[str, Path], tmp_path: Path, api: str) -> None:
    """Their trainer deletes each folder once it is loaded; a new version takes over; removed ones are unknown."""
    prompts = [np.random.default_rng(seed).integers(7, 1000, 24).astype(np.int32) for seed in range(6)]
    models = ["", "a", "b"] * 2

    async def main() -> None:
        async with served(server, api, tmp_path) as serving:
            given = tmp_path / "given"
            for model, version in (("a", 1), ("b", 5)):
                shutil.copytree(saved[model], given)
                await serving.adapters.load(model, version, given)
                shutil.rmtree(given)
            first = await asyncio.gather(*map(serving.ask, models, prompts))
            await serving.adapters.load("a", 2, saved["next"])
            second = await asyncio.gather(*map(serving.ask, models, prompts))
            folders: dict[str, tuple[Path | None, int]] = {"": (None, 0), "a": (saved["a"], 1), "b": (saved["b"], 5)}
            for answers in (first, second):
                for model, prompt, done in zip(models, prompts, answers, strict=True):
                    folder, version = folders[model]
                    assert [span.weight_version for span in done.spans] == [version]
                    assert serving.distance(folder, prompt, done).max() < CLOSE
                    others = {None, *saved.values()} - {folder}
                    assert min(serving.distance(other, prompt, done).max() for other in others) > APART
                folders["a"] = (saved["next"], 2)
            serving.adapters.retire("b", 5)
            with pytest.raises(EngineFailed, match="the adapter b is not loaded here"):
                await serving.ask("b", prompts[0])

    asyncio.run(main())


@pytest.mark.parametrize("api", APIS)
def test_an_adapter_that_the_server_lost_comes_back(
    server: VllmServer, saved: dict[str, Path], tmp_path: Path, api: str
) -> None:
    prompt = np.arange(20, 44, dtype=np.int32)

    async def main() -> None:
        async with served(server, api, tmp_path) as serving:
            await serving.adapters.load("a", 1, saved["a"])
            before = await serving.ask("a", prompt)
            name = serving.engine._adapters.name(("a", 1))
            await serving.engine._adapters._post("/v1/unload_lora_adapter", {"lora_name": name})
            after = await serving.ask("a", prompt)
            assert after.token_ids.tolist() == before.token_ids.tolist()
            assert serving.distance(saved["a"], prompt, after).max() < CLOSE

    asyncio.run(main())


def test_a_wrong_adapter_does_not_reach_the_server(server: VllmServer, saved: dict[str, Path], tmp_path: Path) -> None:
    """The server answers afterwards, and with the adapter that it had."""
    prompt = np.arange(20, 44, dtype=np.int32)
    wide = peft_adapter(server.models[0], tmp_path / "wide", 9, rank=16)
    torn = shutil.copytree(saved["b"], tmp_path / "torn")
    (torn / WEIGHTS).write_bytes((torn / WEIGHTS).read_bytes()[:-100])

    async def main() -> None:
        async with served(server, "vllm", tmp_path / "copies") as serving:
            await serving.adapters.load("a", 1, saved["a"])
            for folder, words in (
                (wide, "its rank is 16"),
                (torn, "not a whole safetensors file"),
                (tmp_path / "missing", "no adapter that this host can read"),
            ):
                with pytest.raises(InvalidWeights, match=words) as refused:
                    await serving.adapters.load("c", 1, folder)
                assert refused.value.fields["path"] == str(folder)
                with pytest.raises(EngineFailed, match="is not loaded here"):
                    await serving.ask("c", prompt)
            assert serving.distance(saved["a"], prompt, await serving.ask("a", prompt)).max() < CLOSE

    asyncio.run(main())
