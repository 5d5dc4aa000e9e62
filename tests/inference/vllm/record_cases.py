"""Records of a real vLLM and a tiny mixture, as figures: run by vLLM's Python, judged by `test_vllm_records.py`.

python record_cases.py MIXTURE OTHER_WEIGHTS OUT
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop
from mixtures import TrainersMixture, logprobs_of, renormalised
from record_checks import CUTS, turn
from vllm_routes import FLAGS, RoutedVllmEngine

from prorl_zmq.errors import EngineFailed
from prorl_zmq.wire.messages.jobs import Sampling

SMALL = [
    "--dtype=float32",
    "--max-model-len=1024",
    "--max-logprobs=-1",
    # Room for a few of the sequences, so that some are preempted, and prompts in parts.
    "--kv-cache-memory-bytes=12582912",
    "--enable-chunked-prefill",
    "--max-num-batched-tokens=256",
]
Ids = np.ndarray[Any, Any]


def prompt(length: int, seed: int = 0) -> Ids:
    return np.random.default_rng([seed, length]).integers(7, 1000, length).astype(np.int32)


class Cases:
    def __init__(self, engine: RoutedVllmEngine, one: Path, two: Path) -> None:
        self.engine, self.turn, self.two = engine, partial(turn, engine), two
        self.trainer, self.other = TrainersMixture(one), TrainersMixture(two)

    async def offered(self) -> Any:
        return self.engine.description.records

    async def routes(self) -> Any:
        asked = [prompt(20 + 29 * number) for number in range(24)]
        first = await asyncio.gather(*(self.turn(ids, Sampling(max_tokens=50), "experts") for ids in asked))
        ended = [(ids, done, done.records["experts"]) for ids, done in zip(asked, first, strict=True)]
        cached = []

        async def two_turns(ids: Ids) -> None:
            first = await self.turn(ids, Sampling(max_tokens=50), "experts")
            routes = first.records["experts"]
            longer = np.concatenate([ids, first.token_ids, prompt(30, 1)])
            second = await self.turn(longer, Sampling(max_tokens=40), "experts", rows_known=len(routes))
            cached.append(second.cached_tokens)
            ended.append((ids, first, routes))
            ended.append((longer, second, np.concatenate([routes, second.records["experts"]])))

        await asyncio.gather(*(two_turns(prompt(200 + 30 * number, 2)) for number in range(6)))
        missing, gaps = 0, []
        for ids, done, routes in ended:
            tokens = np.concatenate([ids, done.token_ids])
            missing += len(tokens) - 1 - len(routes)
            planted = [routes, None, routes[1:], routes[:, ::-1]]
            gaps.append([self.trainer.gap(tokens, done, each) for each in planted])
        with_routes, without, shifted, reordered = zip(*gaps, strict=True)
        return {
            "turns": len(ended),
            "missing": missing,
            "cached": cached,
            "counts": await self.engine.counts(),
            "with": max(with_routes),
            "without": max(without),
            "shifted": min(shifted),
            "reordered": min(reordered),
            "dtypes": sorted({str(routes.dtype) for _, _, routes in ended}),
        }

    async def masks(self) -> Any:
        found = []
        for sampling in CUTS:
            done = await asyncio.gather(*(self.turn(prompt(30, n), sampling, "sampling_mask") for n in range(4)))
            gaps, biases, sizes = [], [], []
            for number, each in enumerate(done):
                tokens = np.concatenate([prompt(30, number), each.token_ids])
                logits, records = self.trainer.logits(tokens), each.records
                masks = records["mask_ids"], records["mask_counts"]
                gaps.append(renormalised(logits, tokens, 30, sampling.temperature, *masks) - each.logprobs)
                biases.append(logprobs_of(logits, tokens, 30, sampling.temperature) - each.logprobs)
                sizes.append(records["mask_counts"])
            found.append(
                {
                    "gap": float(np.abs(gaps).max()),
                    "ratio": float(np.exp(gaps).mean()),
                    "bias": float(np.mean(biases)),
                    "largest": int(np.max(sizes)),
                }
            )
        return found

    async def top(self) -> Any:
        done = await self.turn(prompt(40), Sampling(0.7, 30), "top_logprobs:20")
        tokens = np.concatenate([prompt(40), done.token_ids])
        expected = torch.log_softmax(self.trainer.logits(tokens)[39:] / 0.7, -1).topk(20)
        narrow = await self.turn(prompt(40), Sampling(1.0, 30, top_k=3), "top_logprobs:8", "sampling_mask")
        return {
            "error": float(np.abs(expected.values.numpy() - done.records["top_logprobs"]).max()),
            "same": bool((expected.indices.numpy() == done.records["top_ids"]).all()),
            "possible": (narrow.records["top_ids"] >= 0).sum(axis=1).tolist(),
            "masked": narrow.records["mask_counts"].tolist(),
            "finite": bool(np.isfinite(narrow.records["top_logprobs"]).all()),
        }

    async def refused(self) -> Any:
        said = []
        for record, sampling in (("top_logprobs:1025", Sampling()), ("sampling_mask", Sampling())):
            try:
                await self.turn(prompt(10), sampling, record)
            except EngineFailed as error:
                said.append([error.message, error.fields.get("refused")])
        return said

    async def updates(self) -> Any:
        """New weights of a mixture are refused on a CPU, and the old ones serve on."""
        before = await self.turn(prompt(40), Sampling(temperature=0, max_tokens=10))
        said = []
        self.engine._no_updates = self.engine.refusal
        for update in (self.engine.update_weights(self.two, 1, "keep"), self.engine.begin_update("abort")):
            try:
                await update
            except EngineFailed as error:
                said.append([error.message, error.fields.get("refused")])
        self.engine._no_updates = ""
        after = await self.turn(prompt(40), Sampling(temperature=0, max_tokens=10))
        same = np.array_equal(before.logprobs, after.logprobs) and self.engine.weight_version == 0
        return {"said": said, "same": bool(same)}

    async def garbage(self) -> Any:
        """What the refusal is for: after a reload the log-probs are those of neither model."""
        ids, sampling = prompt(40), Sampling(temperature=0, max_tokens=10)
        await self.engine.update_weights(self.two, 2, "keep")
        done = await self.turn(ids, sampling)
        tokens = np.concatenate([ids, done.token_ids])
        logits = (one.logits(tokens) for one in (self.trainer, self.other))
        return [float(np.abs(logprobs_of(one, tokens, 40) - done.logprobs).max()) for one in logits]

    async def continued(self) -> Any:
        """A turn that new weights abort, and its rest: each row is of the weights that its token was generated with."""
        ids, sampling = prompt(60, 3), Sampling(max_tokens=400)
        task = asyncio.create_task(self.turn(ids, sampling, "experts"))
        states = self.engine._llm.output_processor.request_states
        while not any(state.detokenizer.num_output_tokens() >= 20 for state in states.values()):
            await asyncio.sleep(0.01)
            assert not task.done(), "it ended too early"
        await self.engine.update_weights(self.two, 1, "abort")
        done = await task
        tokens, routes = np.concatenate([ids, done.token_ids]), done.records["experts"]
        changed = len(routes)
        rest = await self.turn(tokens, Sampling(max_tokens=30), "experts", rows_known=changed)
        tokens = np.concatenate([tokens, rest.token_ids])
        routes = np.concatenate([routes, rest.records["experts"]])
        # vLLM's order of the chosen experts is not a trainer's.
        routes, old, new = (
            np.sort(each, axis=-1) for each in (routes, self.trainer.routes(tokens), self.other.routes(tokens))
        )
        return {
            "reason": done.finish_reason,
            "missing": len(tokens) - 1 - len(routes),
            "old": int((routes[:changed] != old[:changed]).any(axis=(1, 2)).sum()),
            # On a CPU `reload_weights` leaves the experts' old weights, so later layers have routes of neither model.
            "new": int((routes[changed:, 0] != new[changed:, 0]).any(axis=1).sum()),
            "apart": bool((old[:, 0] != new[:, 0]).any(axis=1).mean() > 0.9),
        }


async def main(one: Path, two: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    torch.set_num_threads(1)
    engine = await RoutedVllmEngine.start(str(one), [*FLAGS, *SMALL])
    try:
        cases = Cases(engine, one, two)
        for name in ("offered", "routes", "masks", "top", "refused", "updates", "continued", "garbage"):
            print("case", name, file=sys.stderr, flush=True)
            try:
                async with asyncio.timeout(120):
                    results[name] = await getattr(cases, name)()
            except Exception:  # noqa: BLE001 - the tests are told
                results[name] = {"traceback": traceback.format_exc()}
    finally:
        await engine.close()
    return results


if __name__ == "__main__":
    mixture, other, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps(uvloop.run(main(mixture, other))))
