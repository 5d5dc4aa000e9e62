"""What the index of a real vLLM's prefix cache has, as data: run by vLLM's Python, judged by `test_vllm_kv_events.py`.

python kv_event_cases.py MODEL OTHER_MODEL OUT
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
import zmq
from cases import FLAGS, prompt, refusal
from resident import resident_tokens

from prorl_zmq.inference.hosting.kv_event_reader import KvEventReader
from prorl_zmq.inference.vllm.vllm_engine import VllmEngine
from prorl_zmq.wire.messages.jobs import Sampling

SMALL = ["--max-model-len=1024", "--block-size=32", "--num-gpu-blocks-override=33"]
"""The cache holds one longest context and no more."""
LIMIT_S = 30.0


async def until(condition: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - it waits for another process
            await asyncio.sleep(0.01)


async def turns(context: zmq.Context[Any], engine: VllmEngine, reader: KvEventReader, other: Path) -> dict[str, Any]:
    index, block = reader.index, engine.description.kv_events.block_tokens
    contexts: dict[str, np.ndarray] = {}
    found: list[tuple[str, int | None, int]] = []

    async def turn(job: str, more: int) -> None:
        before = contexts.get(job, prompt(100))
        asked = np.concatenate([before, prompt(more, len(found))])
        known = resident_tokens(index, before) if job in contexts else None
        done = await engine.generate(asked, Sampling(max_tokens=20, temperature=0.0), (), job)
        index.note_turn(job, asked, 0.0)
        contexts[job] = np.concatenate([asked, done.token_ids])
        found.append((job, known, done.cached_tokens))
        # Events come in order: once this turn's are there, so are those of the blocks that it displaced.
        await until(lambda: resident_tokens(index, contexts[job]) >= (len(contexts[job]) - 1) // block * block)

    for job, more in [("a", 40), ("b", 60), ("a", 50), ("b", 10), ("c", 700), ("a", 20), ("b", 5)]:
        await turn(job, more)
    listed = index.resident_jobs()
    await engine.update_weights(other, 1, "abort")
    index.note_weights()
    await turn("a", 5)
    late = KvEventReader(context, engine.description.kv_events)
    try:
        for job, tokens in contexts.items():
            late.index.note_turn(job, tokens, 0.0)
        await until(lambda: late.index.resident_jobs())
        cleared = {job: resident_tokens(late.index, tokens) for job, tokens in contexts.items()}
    finally:
        late.close()
    return {"turns": found, "listed": listed, "cleared": cleared}


async def main(model: str, other: str) -> dict[str, Any]:
    wrong = [["--no-enable-prefix-caching"], ["--data-parallel-size=2"], ["--kv-events-config={}"]]
    refused = [await refusal(VllmEngine.start(model, [*FLAGS, *flags], kv_events=True)) for flags in wrong]
    engine = await VllmEngine.start(model, [*FLAGS, *SMALL], kv_events=True)
    folder = Path(engine.description.kv_events.endpoint.removeprefix("ipc://")).parent
    mode = folder.stat().st_mode & 0o777
    with zmq.Context() as context:
        reader = KvEventReader(context, engine.description.kv_events)
        try:
            results = await turns(context, engine, reader, Path(other))
        finally:
            reader.close()
            await engine.close()
    return {**results, "refused": refused, "mode": mode, "left": folder.exists()}


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(uvloop.run(main(*sys.argv[1:3]))))
