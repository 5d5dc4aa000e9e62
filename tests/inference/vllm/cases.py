"""What `VllmEngine` does with a real vLLM, as data: run by vLLM's Python, judged by `test_vllm_engine.py`.

    python cases.py MODEL OTHER_MODEL OUT

Writes OUT, JSON: for each function of `CASES` what it gave, or the traceback that ended it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop
from reference import Reference

from prorl_zmq.errors import ProrlError
from prorl_zmq.inference.engine import Generation, checked, checked_scores
from prorl_zmq.inference.vllm import vllm_engine
from prorl_zmq.inference.vllm.vllm_engine import VllmEngine
from prorl_zmq.wire.messages.jobs import Sampling

FLAGS = ["--dtype=float32", "--enforce-eager", "--max-model-len=2048", "--kv-cache-memory-bytes=67108864"]
OWN_ENDS = [2, *range(600, 940)]
"""What the model's own generation config ends at."""
LIMIT_S = 60.0
"""Longest single case."""

Plain = dict[str, Any]


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, length]).integers(7, 1000, length).astype(np.int32)


def plain(done: Generation) -> Plain:
    return {
        "ids": done.token_ids.tolist(),
        "dtypes": [str(done.token_ids.dtype), str(done.logprobs.dtype)],
        "spans": [[span.weight_version, span.start, span.end] for span in done.spans],
        "reason": done.finish_reason,
        "cached": done.cached_tokens,
    }


async def refusal(call: Any) -> Plain:
    try:
        await call
    except ProrlError as error:
        return {"type": type(error).__name__, "message": error.message, "fields": error.fields}
    return {"type": "none"}


def one_line(process: psutil.Process) -> str:
    with suppress(psutil.ZombieProcess):
        return " ".join(process.cmdline())
    return "zombie"


class Cases:
    """The cases, in the order in which they run; weights `one` are version 0's, `two` another model's."""

    def __init__(self, engine: VllmEngine, one: Path, two: Path) -> None:
        self.engine = engine
        self.one, self.two = one, two
        self.versions = {0: one}

    async def run(self, ids: np.ndarray, stop_ids: tuple[int, ...] = (), **sampling: Any) -> Generation:
        done = await self.engine.generate(ids, Sampling(**sampling), stop_ids, "job")
        return checked(done, sampling.get("max_tokens", 1024), self.engine.description.vocabulary)

    async def started(self, ids: np.ndarray, tokens: int, **sampling: Any) -> asyncio.Task[Generation]:
        """Start a generation, and wait until so many of its tokens are there."""
        task = asyncio.create_task(self.run(ids, **sampling))
        states = self.engine._llm.output_processor.request_states
        while not any(state.detokenizer.num_output_tokens() >= tokens for state in states.values()):
            await asyncio.sleep(0.01)
            assert not task.done(), "it ended too early"
        return task

    def judged(self, ids: np.ndarray, done: Generation, **sampling: Any) -> Plain:
        reference = Reference(self.versions)
        return {**plain(done), "error": reference.error(ids.tolist(), done, Sampling(**sampling))}

    async def description(self) -> Plain:
        one = self.engine.description
        return {
            "model": one.model,
            "chat": [one.chat.kind, one.chat.tokenizer],
            "numbers": [one.context_tokens, one.vocabulary],
            "max_in_flight": one.max_in_flight,
            "mode": one.logprobs_mode,
            "version": self.engine.weight_version,
        }

    async def exactness(self) -> list[Plain]:
        kinds: list[Plain] = [
            {"temperature": 1.0},
            {"temperature": 0.7, "top_p": 0.9, "top_k": 200, "min_p": 0.05},
            {"temperature": 1.3, "top_k": 5},
            {"temperature": 0.0},
        ]
        asked = [
            (prompt(length), {**kind, "max_tokens": 40, "seed": seed})
            for seed, kind in enumerate(kinds)
            for length in (1, 150, 700)
        ]
        done = await asyncio.gather(*(self.run(ids, **sampling) for ids, sampling in asked))
        return [self.judged(ids, one, **sampling) for (ids, sampling), one in zip(asked, done, strict=True)]

    async def scores(self) -> Plain:
        """Texts beside generations, after their prompts are in the prefix cache, and at vLLM's limits."""
        texts = [prompt(length) for length in (1, 2, 150, 700)]
        await self.run(texts[-1], max_tokens=4)
        asked = [(text, top) for text in texts for top in (0, 1, 20, 64)]
        scored, _ = await asyncio.gather(
            asyncio.gather(*(self.engine.score(text, top, "job") for text, top in asked)),
            asyncio.gather(*(self.run(prompt(30), max_tokens=40) for _ in range(8))),
        )
        reference = Reference(self.versions)
        errors = [
            reference.scores_error(text.tolist(), checked_scores(one, len(text), top, 1024))
            for one, (text, top) in zip(scored, asked, strict=True)
        ]
        wrong = [self.engine.score(*each, "job") for each in ((texts[1], 65), (prompt(2048), 1), (texts[0][:0], 1))]
        return {"errors": errors, "refused": [await refusal(each) for each in wrong]}

    async def kv_figures(self) -> Plain:
        """The figures before, while and after a generation runs; how a prompt is cached; the logger's base class."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        asked = prompt(600, seed=7)
        self.engine.kv_figures(time.monotonic())
        task = await self.started(asked, 5, max_tokens=200)
        running = self.engine.kv_figures(time.monotonic())
        await task
        again = await self.run(asked, max_tokens=1)
        self.engine.kv_figures(time.monotonic())
        idle = self.engine.kv_figures(time.monotonic())
        assert running is not None
        assert idle is not None
        return {
            "running": dataclasses.asdict(running),
            "idle": dataclasses.asdict(idle),
            "cached": again.cached_tokens,
            "abstract": sorted(StatLoggerBase.__abstractmethods__),
        }

    async def seeds(self) -> list[list[int]]:
        done = [await self.run(prompt(20), max_tokens=16, seed=seed) for seed in (2**63 - 1, 2**63 - 1, 5)]
        return [one.token_ids.tolist() for one in done]

    async def stop_ids(self) -> Plain:
        free = await self.run(prompt(30), max_tokens=24, seed=1)
        stop = int(free.token_ids[10])
        stopped = await self.run(prompt(30), (stop, 3), max_tokens=24, seed=1)
        return {"free": plain(free), "stop": stop, "stopped": plain(stopped)}

    async def own_end(self) -> Plain:
        """The model's folder names a third of its ids as ends; see below."""
        free = await self.run(prompt(31), max_tokens=24, seed=1)
        end = next(token for token in free.token_ids.tolist() if token in OWN_ENDS)
        stopped = await self.run(prompt(31), (end,), max_tokens=24, seed=1)
        return {"ends": OWN_ENDS, "free": plain(free), "stopped": plain(stopped)}

    async def stop_texts(self) -> Plain:
        free = await self.run(prompt(30), max_tokens=24, seed=2)
        decode = self.engine._llm.get_tokenizer().decode
        text = decode(free.token_ids.tolist())
        stop = decode(free.token_ids[8:11].tolist())
        done = await self.run(prompt(30), max_tokens=24, seed=2, stop=(stop, "never to be seen"))
        shorter = decode(done.token_ids[:-1].tolist())
        return {"free": plain(free), "text": text, "stop": stop, "done": plain(done), "shorter": shorter}

    async def limits(self) -> Plain:
        one = await self.run(prompt(30), max_tokens=1)
        full = await self.run(prompt(2040), max_tokens=100)
        return {"one": plain(one), "full": plain(full)}

    async def refused(self) -> list[Plain]:
        ids = prompt(10)
        bad: list[tuple[Any, tuple[int, ...]]] = [
            (ids[:0], ()),
            (np.array([5, 1024], np.int32), ()),
            (np.array([5, -1], np.int32), ()),
            (prompt(2048), ()),
            (ids, (1024,)),
        ]
        refusals = [await refusal(self.run(one, stop)) for one, stop in bad]
        await self.run(ids, max_tokens=2)
        return refusals

    async def cancelled(self) -> Plain:
        task = await self.started(prompt(300), 5, max_tokens=1500)
        llm = self.engine._llm
        # vLLM refuses to forget its prefix cache while a request has a part in it.
        busy = not await llm.reset_prefix_cache()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        idle = await llm.reset_prefix_cache()
        return {"busy": busy, "idle": idle, "unfinished": llm.get_num_unfinished_requests()}

    async def bad_weights(self) -> Plain:
        before = await self.run(prompt(40), max_tokens=8, seed=3)
        refusals = [
            await refusal(self.engine.update_weights(self.one / "nowhere", 1, "keep")),
            await refusal(self.engine.update_weights(self.one.parent, 1, "abort")),
        ]
        after = await self.run(prompt(40), max_tokens=8, seed=3)
        same = plain(before)["ids"] == plain(after)["ids"]
        return {"refusals": refusals, "same": same, "version": self.engine.weight_version}

    async def keep(self) -> Plain:
        self.versions[3] = self.two
        asked = {"max_tokens": 300, "seed": 4}
        first = await self.run(prompt(400), max_tokens=2)
        again = await self.run(prompt(400), max_tokens=2)
        task = await self.started(prompt(200), 20, **asked)
        await self.engine.update_weights(self.two, 3, "keep")
        fresh = await self.run(prompt(400), max_tokens=2)
        return {
            "spanning": self.judged(prompt(200), await task, **asked),
            "cached": [first.cached_tokens, again.cached_tokens, fresh.cached_tokens],
            "fresh": self.judged(prompt(400), fresh, max_tokens=2),
            "version": self.engine.weight_version,
        }

    async def drain(self) -> Plain:
        self.versions[4] = self.one
        asked = {"max_tokens": 200, "seed": 5}
        task = await self.started(prompt(200), 5, **asked)
        update = asyncio.create_task(self.engine.update_weights(self.one, 4, "drain"))
        await asyncio.sleep(0)  # so that the update is ahead
        while not await self.engine._llm.is_paused():  # noqa: ASYNC110 - vLLM has no event for it
            await asyncio.sleep(0.01)
        waiting = await self.run(prompt(100), max_tokens=4)
        await update
        return {
            "running": self.judged(prompt(200), await task, **asked),
            "waiting": self.judged(prompt(100), waiting, max_tokens=4),
        }

    async def abort(self) -> Plain:
        self.versions[5] = self.two
        asked = {"max_tokens": 1000, "seed": 6}
        task = await self.started(prompt(200), 5, **asked)
        await self.engine.update_weights(self.two, 5, "abort")
        done = await task
        rest = await self.run(np.concatenate([prompt(200), done.token_ids]), max_tokens=4)
        return {
            "aborted": self.judged(prompt(200), done, **asked),
            "rest": self.judged(np.concatenate([prompt(200), done.token_ids]), rest, max_tokens=4),
        }

    async def order(self) -> Plain:
        self.versions |= {6: self.one, 7: self.two, 8: self.one}
        updates = [
            asyncio.create_task(self.engine.update_weights(path, version, mode))
            for path, version, mode in ((self.one, 6, "keep"), (self.two, 7, "drain"), (self.one, 8, "abort"))
        ]
        updates[1].cancel()
        ended = await asyncio.gather(*updates, return_exceptions=True)
        done = await self.run(prompt(50), max_tokens=4)
        left = isinstance(ended[1], asyncio.CancelledError)
        return {"left": left, "version": self.engine.weight_version, "done": self.judged(prompt(50), done)}

    async def halves(self) -> Plain:
        """The trainer moves the weights itself, between the begin and the end."""
        llm, done = self.engine._llm, {}
        self.versions |= {9: self.two, 10: self.one, 11: self.two}
        asked = {"max_tokens": 200, "seed": 7}
        for version, mode in enumerate(("keep", "drain", "abort"), 9):
            task = await self.started(prompt(200), 20, **asked)
            beginning = asyncio.create_task(self.engine.begin_update(mode))
            while not await llm.is_paused():  # noqa: ASYNC110 - vLLM has no event for it
                await asyncio.sleep(0.01)
            waiting = asyncio.create_task(self.run(prompt(100), max_tokens=4))
            await beginning
            await self.engine.begin_update(mode)
            states = llm.output_processor.request_states
            before = [state.detokenizer.num_output_tokens() for state in states.values()]
            await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self.versions[version])})
            await asyncio.sleep(0.3)
            paused = before == [state.detokenizer.num_output_tokens() for state in states.values()]
            held, running = not waiting.done(), not task.done()
            await self.engine.end_update(version)
            done[mode] = {
                "paused": paused and held,
                "running": running,
                "first": self.judged(prompt(200), await task, **asked),
                "next": self.judged(prompt(100), await waiting, max_tokens=4),
                "version": self.engine.weight_version,
            }
        task = await self.started(prompt(200), 20, **asked)
        await self.engine.begin_update("keep")
        await self.engine.end_update(None)
        done["cancelled"] = {"first": self.judged(prompt(200), await task, **asked)}
        await self.engine.begin_update("keep")
        done["bad"] = await refusal(self.engine.update_weights(self.one / "nowhere", 12, "keep"))
        done["after"] = self.judged(prompt(100), await self.run(prompt(100), max_tokens=4), max_tokens=4)
        return done

    async def patched(self) -> Plain:
        """A host's copy is changed in place from version to version, also right after each load."""
        asked = {"max_tokens": 8, "seed": 8}
        copy, done = Path(shutil.copytree(self.one, self.one.with_name("copy"))), []
        for version, (ours, theirs) in enumerate(
            [(self.two, self.one), (self.one, self.two), (self.two, self.one)], 20
        ):
            self.versions[version] = ours
            _overwrite(copy, ours)
            await self.engine.update_weights(copy, version, "keep")
            _overwrite(copy, theirs)
            done.append(self.judged(prompt(100), await self.run(prompt(100), **asked), **asked))
        return {"done": done, "version": self.engine.weight_version}

    async def lost(self) -> Plain:
        """Last: afterwards the engine cannot serve."""
        task = await self.started(prompt(200), 5, max_tokens=1000)
        # As if the folder had vanished after it was found right.
        vllm_engine.check_checkpoint = lambda path, like: None
        return {
            "update": await refusal(self.engine.update_weights(self.one / "nowhere", 13, "keep")),
            "running": await refusal(task),
            "health": await refusal(self.engine.check_health()),
            "next": await refusal(self.run(prompt(5))),
        }


def _overwrite(copy: Path, model: Path) -> None:
    for file in model.glob("*.safetensors"):
        with (copy / file.name).open("r+b") as content:
            content.write(file.read_bytes())


CASES = [name for name in vars(Cases) if not name.startswith("_") and name not in ("run", "started", "judged")]


async def main(one: Path, two: Path) -> Plain:
    results: Plain = {}
    engine = await VllmEngine.start(str(one), FLAGS)
    children = psutil.Process().children(recursive=True)
    try:
        cases = Cases(engine, one, two)
        for name in CASES:
            print("case", name, file=sys.stderr, flush=True)
            try:
                async with asyncio.timeout(LIMIT_S):
                    results[name] = await getattr(cases, name)()
            except Exception:  # noqa: BLE001 - the tests are told
                results[name] = {"traceback": traceback.format_exc()}
    finally:
        await engine.close()
        await engine.close()
    results["close"] = {
        "children": len(children),
        # The resource tracker is Python's, and ends with this process.
        "left": [str(one) for one in children if one.is_running() and "resource_tracker" not in one_line(one)],
        "health": await refusal(engine.check_health()),
    }
    return results


if __name__ == "__main__":
    model, other, out = map(Path, sys.argv[1:])
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": OWN_ENDS}))
    out.write_text(json.dumps(uvloop.run(main(model, other))))
