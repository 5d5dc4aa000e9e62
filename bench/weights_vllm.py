"""The pause of a real vLLM for new weights: `weights_vllm.py TOKENIZER FOLDER VERSIONS LOADS` writes JSON.

Run by the Python that has vLLM. A host with one idle engine of a bfloat16 Llama fetches full versions and deltas into
its copy, in turns, and loads each of them some times, while the trainer's folder is away. Before and after each load,
vLLM's worker loads the same tensors from its own memory, by vLLM's `reload_weights`: a plain `load_weights` is wrong
for a running engine whose kernels have packed their weights. The pause is the engine's, from the request to stop to the
end of the request to resume; a pause without a load follows each, most of which is a sleep of vLLM's. That part does
not grow with the model: with 0.8 GB in place of these 1.6 GB, the ratios were 1.16 to 1.23 in two runs.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import uvloop
from safetensors import safe_open
from weights_real import kinds, llama, publish

from prorl_zmq.inference.hosting.engine_updates import EngineUpdates
from prorl_zmq.inference.vllm.vllm_engine import VllmEngine
from prorl_zmq.inference.weights.published_weights import PublishedWeights
from prorl_zmq.inference.weights.version_chain import Content

HIDDEN, LAYERS, VOCABULARY = 2048, 16, 4096
FLAGS = (
    "--dtype=bfloat16",
    "--enforce-eager",
    "--max-model-len=256",
    "--kv-cache-memory-bytes=67108864",
    "--worker-extension-cls=weights_vllm.MemoryLoading",
)
FETCH_S = 600.0
CHANGED = 97
"""One of so many elements changes with a version."""
FULL, DELTA = "full version", "delta"


class MemoryLoading:
    """A `--worker-extension-cls`: vLLM adds it to the class of its workers."""

    def keep_tensors(self: Any, folder: str) -> None:
        """Read a checkpoint into this process's own memory."""
        self.kept_tensors = []
        for path in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                self.kept_tensors += [(name, file.get_tensor(name).clone()) for name in file.keys()]  # noqa: SIM118

    def load_tensors(self: Any) -> tuple[float, float]:
        """Load what `keep_tensors` read; return the seconds that it took, and the CPU seconds."""
        began, cpu = time.perf_counter(), time.process_time()
        self.model_runner.reload_weights(weights_iterator=iter(self.kept_tensors))
        return time.perf_counter() - began, time.process_time() - cpu

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of this process."""
        return time.process_time()


async def measure(tokenizer: Path, folder: Path, versions: int, loads: int) -> dict[str, list[dict[str, float]]]:
    model = llama(HIDDEN, LAYERS, VOCABULARY).bfloat16()
    served, root = folder / "served", folder / "root"
    model.save_pretrained(served)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / name, served)
    engine = await VllmEngine.start(str(served), FLAGS)
    updates = EngineUpdates(engine, folder / "copy", copies_all=True)
    done: dict[str, list[dict[str, float]]] = {FULL: [], DELTA: []}
    try:
        for first in range(1, 2 * versions, 2):
            with PublishedWeights(root, kinds(model), threads=1) as published:  # its first version is full
                for version, form in ((first, FULL), (first + 1, DELTA)):
                    for one in model.parameters():
                        one.data.view(-1)[version::CHANGED] += 1e-3
                    written = publish(published, model, version)
                    assert written.is_full == (form == FULL)
                    wanted = Content(version, written.weights)
                    await updates.fetch(written.path, wanted, FETCH_S)
                    await engine._llm.collective_rpc("keep_tensors", args=(str(folder / "copy"),))
                    root.rename(folder / "away")
                    done[form] += [await load(engine, updates, written.path, wanted) for _ in range(loads)]
                    (folder / "away").rename(root)
                    published.prune(version, ())
    finally:
        await engine.close()
    return done


async def load(engine: VllmEngine, updates: EngineUpdates, path: Path, wanted: Content) -> dict[str, float]:
    """Load a version from the host's copy, and its tensors from memory before and after."""
    llm = engine._llm
    (before,) = await llm.collective_rpc("load_tensors")
    (cpu_before,) = await llm.collective_rpc("cpu_seconds")
    times = await updates.load(path, wanted, "keep")
    (cpu_after,) = await llm.collective_rpc("cpu_seconds")
    (after,) = await llm.collective_rpc("load_tensors")
    began = time.perf_counter()
    await engine.begin_update("keep")
    await engine.end_update(None)
    return {
        "pause_s": times.pause_s,
        "cpu_s": cpu_after - cpu_before,
        "memory_s": (before[0] + after[0]) / 2,
        "memory_cpu_s": (before[1] + after[1]) / 2,
        "empty_pause_s": time.perf_counter() - began,
    }


def main(tokenizer: str, folder: str, versions: str, loads: str) -> None:
    print(json.dumps(uvloop.run(measure(Path(tokenizer), Path(folder), int(versions), int(loads)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
