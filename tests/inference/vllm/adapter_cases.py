"""What adapters do in a real vLLM, as data: run by vLLM's Python, judged by `test_vllm_adapters.py`.

    python adapter_cases.py MODEL ADAPTERS COPIES OUT CALLS

ADAPTERS holds the folders of adapters `a0` to `a9`, `a0-next`, and of wrong ones; they are deleted once they are
loaded. Writes OUT, JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from cases import FLAGS, refusal

from prorl_zmq.config import LoraSlots
from prorl_zmq.inference.engine import Generation, Wanted, checked
from prorl_zmq.inference.hosting.hosted_adapters import HostedAdapters
from prorl_zmq.inference.vllm.vllm_engine import VllmEngine
from prorl_zmq.wire.messages.jobs import Sampling

SLOTS = 4
"""vLLM keeps twice as many adapters in memory: with ten, it reads some again."""
NAMES = [f"a{number}" for number in range(10)]
AT_ONCE = 64
ANSWER, LONG = 20, 120
"""Tokens of an answer, and of one that new weights meet."""


class Cases:
    def __init__(self, engine: VllmEngine, copies: Path, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.adapters = HostedAdapters(engine, copies / "service")

    async def load(self, model: str, version: int, name: str) -> None:
        await self.adapters.load(model, version, self.folder / name)
        shutil.rmtree(self.folder / name)

    async def ask(self, model: str | None, prompt: np.ndarray, tokens: int = ANSWER, seed: int = 0) -> dict[str, Any]:
        sampling = Sampling(temperature=1.0, max_tokens=tokens, seed=seed)
        if model is None:
            done = await self.engine.generate(prompt, sampling, (), "job")
        else:
            with self.adapters.using(model) as adapter:
                done = await self.engine.generate(prompt, sampling, (), "job", wanted=Wanted(adapter=adapter))
        return self.plain(model, prompt, checked(done, tokens, 1024))

    def plain(self, model: str | None, prompt: np.ndarray, done: Generation) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": prompt.tolist(),
            "ids": done.token_ids.tolist(),
            "logprobs": done.logprobs.tolist(),
            "spans": [[span.weight_version, span.start, span.end] for span in done.spans],
            "cached": done.cached_tokens,
        }

    async def mixed(self, calls: int) -> list[dict[str, Any]]:
        """Answer calls of all adapters and of the base, mixed."""
        random, limit = np.random.default_rng(0), asyncio.Semaphore(AT_ONCE)
        models = [None if draw == len(NAMES) else NAMES[draw] for draw in random.integers(0, len(NAMES) + 1, calls)]

        async def one(number: int, model: str | None) -> dict[str, Any]:
            prompt = np.random.default_rng(number).integers(7, 1000, 16).astype(np.int32)
            async with limit:
                return await self.ask(model, prompt, seed=number)

        return list(await asyncio.gather(*(one(*each) for each in enumerate(models))))

    async def replaced(self) -> dict[str, Any]:
        """Load a new version while 16 rollouts of the present one run."""
        prompts = [np.random.default_rng([1, number]).integers(7, 1000, 300).astype(np.int32) for number in range(16)]
        running = [asyncio.create_task(self.ask("a0", prompt, LONG, n)) for n, prompt in enumerate(prompts)]
        states = self.engine._llm.output_processor.request_states
        while not any(state.detokenizer.num_output_tokens() >= 5 for state in states.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # vLLM makes no event of it
        began = time.monotonic()
        await self.load("a0", 12, "a0-next")
        loaded_s = time.monotonic() - began
        meanwhile = sum(not task.done() for task in running)
        new = await asyncio.gather(*(self.ask("a0", prompt, LONG, n) for n, prompt in enumerate(prompts)))
        old = await asyncio.gather(*running)
        again = await self.ask("a0", prompts[0], LONG, 0)
        return {"old": old, "new": list(new), "meanwhile": meanwhile, "again": again, "loaded_s": loaded_s}

    async def scored(self) -> list[dict[str, Any]]:
        """Score texts of all adapters and of the base, mixed, after their prefixes were generated from."""

        async def one(number: int, model: str | None) -> dict[str, Any]:
            ids = np.random.default_rng([2, number]).integers(7, 1000, 36).astype(np.int32)
            await self.ask(model, ids[:30])
            with nullcontext() if model is None else self.adapters.using(model) as adapter:
                done = await self.engine.score(ids, 2, "job", adapter)
            spans, prompt = [[done.weight_version, 0, len(ids) - 1]], ids[:1].tolist()
            plain = {"model": model, "prompt": prompt, "ids": ids[1:].tolist(), "spans": spans}
            return {**plain, "logprobs": done.logprobs[1:].tolist()}

        return list(await asyncio.gather(*(one(*each) for each in enumerate([None, *NAMES] * 2))))

    async def refused(self) -> dict[str, Any]:
        wrong = {
            name: await refusal(self.adapters.load("wrong", 1, self.folder / name))
            for name in ("missing", "torn", "rank16", "other-base", "nan", "bias")
        }
        prompt = np.arange(10, 26, dtype=np.int32)
        unknown = [
            await refusal(self.ask("wrong", prompt)),
            await refusal(self.engine.generate(prompt, Sampling(), (), "j", wanted=Wanted(adapter=("wrong", 1)))),
        ]
        await self.engine.check_health()
        return {"wrong": wrong, "unknown": unknown, "after": await self.ask("a1", prompt)}


async def main(model: Path, folder: Path, copies: Path, calls: int) -> dict[str, Any]:
    engine = await VllmEngine.start(str(model), FLAGS, lora=LoraSlots(slots=SLOTS, rank=8))
    try:
        cases = Cases(engine, copies, folder)
        for number, name in enumerate(NAMES):
            await cases.load(name, number + 1, name)
        began = time.monotonic()
        mixed = await cases.mixed(calls)
        results = {"mixed": mixed, "mixed_s": time.monotonic() - began, "slots": engine.description.adapter_slots}
        results["scored"] = await cases.scored()
        results["replaced"] = await cases.replaced()
        results["refused"] = await cases.refused()
        for name in NAMES:
            cases.adapters.retire(name, cases.adapters.current[name])
        await cases.adapters.close()
        results["left"] = sum(len(files) for _, _, files in os.walk(copies))
        neutral = engine._adapters.request(None).lora_int_id
        results["listed"] = [each for each in await engine._llm.list_loras() if each != neutral]
    finally:
        await engine.close()
    return results


if __name__ == "__main__":
    *folders, out, calls = sys.argv[1:]
    Path(out).write_text(json.dumps(uvloop.run(main(*map(Path, folders), int(calls)))))
