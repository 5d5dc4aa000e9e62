"""A draft model's weights through `EngineUpdates`, as data: run by vLLM's Python, judged by `test_vllm_draft.py`.

python draft_cases.py MODEL OTHER_MODEL FOLDER OUT
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import uvloop
from cases import FLAGS, Cases, Plain, prompt, refusal
from prometheus_client import REGISTRY
from safetensors.torch import load_file, save_file

from prorl_zmq.inference.checkpoint import DRAFT
from prorl_zmq.inference.hosting.engine_updates import EngineUpdates
from prorl_zmq.inference.vllm.vllm_engine import VllmEngine
from prorl_zmq.inference.weights.version_chain import Content

ASKED: Plain = {"max_tokens": 60, "temperature": 0.0}


class DraftCases(Cases):
    def __init__(self, engine: VllmEngine, one: Path, two: Path, folder: Path) -> None:
        super().__init__(engine, one, two)
        self._folder = folder
        self._updates = EngineUpdates(engine, folder / "copy", copies_all=True)

    async def updated(self, version: int, model: Path, draft: Path | None) -> Plain:
        """Give the engine a version whose folder has these weights and those of a draft model, and sample."""
        path = shutil.copytree(model, self._folder / f"version-{version}")
        if draft is not None:
            shutil.copytree(draft, path / DRAFT)
        await self._updates.fetch(path, Content(version), 60.0)
        await self._updates.load(path, Content(version), "keep")
        self.versions[version] = model
        return await self.sample()

    async def sample(self) -> Plain:
        before = _drafted()
        done = await self.run(prompt(50), **ASKED)
        proposed, accepted = (after - then for after, then in zip(_drafted(), before, strict=True))
        return {**self.judged(prompt(50), done, **ASKED), "proposed": proposed, "accepted": accepted}

    async def refused(self, version: int) -> list[Plain]:
        """Good weights with bad ones of the draft model."""
        refusals = []
        for number, change in enumerate((_cut, _cast, _drop)):
            path = shutil.copytree(self.two, self._folder / f"refused-{number}")
            shutil.copytree(self.one, path / DRAFT)
            file = next((path / DRAFT).glob("*.safetensors"))
            tensors = load_file(file)
            change(tensors)
            save_file(tensors, file, {"format": "pt"})
            refusals.append(await refusal(self._updates.load(path, Content(version), "keep")))
        return refusals


def _drafted() -> tuple[float, float]:
    """Return how many tokens the draft model has proposed, and how many were accepted."""
    names = ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    proposed, accepted = (sum(one.value for one in samples if one.name == name) for name in names)
    return proposed, accepted


def _cut(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.norm.weight"
    tensors[name] = tensors[name][:-1].clone()


def _cast(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float64)


def _drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


async def main(one: Path, two: Path, folder: Path) -> Plain:
    results: Plain = {}
    engine = await VllmEngine.start(str(one), FLAGS)
    try:
        cases = DraftCases(engine, one, two, folder / "plain")
        results["plain"] = [await cases.sample(), await cases.updated(1, one, two), await cases.updated(2, two, two)]
    finally:
        await engine.close()
    config = {"model": str(one), "method": "draft_model", "num_speculative_tokens": 2}
    engine = await VllmEngine.start(str(one), [*FLAGS, "--speculative-config", json.dumps(config)])
    try:
        cases = DraftCases(engine, one, two, folder / "drafts")
        results["drafts"] = engine.description.drafts
        results["swaps"] = [await cases.sample()]
        for version, (model, draft) in enumerate([(one, two), (one, one), (two, None), (two, two)], 1):
            results["swaps"].append(await cases.updated(version, model, draft))
        results["refused"] = await cases.refused(9)
        results["after"] = await cases.sample()
    finally:
        await engine.close()
    return results


if __name__ == "__main__":
    model, other, folder, out = map(Path, sys.argv[1:])
    given: Any = uvloop.run(main(model, other, folder))
    out.write_text(json.dumps(given))
