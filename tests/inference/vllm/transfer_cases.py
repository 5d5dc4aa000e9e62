"""vLLM's weight transfer through `VllmEngine`, as data: run by vLLM's Python, judged by `test_vllm_transfer.py`.

python transfer_cases.py MODEL OTHER_MODEL OUT
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from cases import FLAGS, Cases, Plain, prompt, refusal
from safetensors.torch import load_file
from socket_transfer import GroupInfo, Sending, register
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from prorl_zmq.errors import EngineFailed
from prorl_zmq.inference.vllm.vllm_engine import VllmEngine

LIMIT_S = 20.0


class Tensors(WeightSource):
    def __init__(self, model: Path) -> None:
        self._tensors = {name: t for file in model.glob("*.safetensors") for name, t in load_file(file).items()}

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self._tensors.items()]

    def __iter__(self) -> Any:
        return iter(self._tensors.items())


class Calls:
    """What vLLM's trainer side calls, from its threads."""

    def __init__(self, engine: VllmEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop

    def init_weight_transfer_engine(self, info: Plain) -> None:
        self._call("init", info)

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, info: Plain) -> None:
        self._call("update", info)

    def finish_weight_update(self, _: str | None = None) -> None:
        self._call("finish", {})

    def leave(self) -> None:
        self._call("leave", {})

    def _call(self, call: Any, info: Plain) -> None:
        asyncio.run_coroutine_threadsafe(self._engine.transfer(call, info, LIMIT_S), self._loop).result(60)


class TransferCases(Cases):
    async def send(self, model: Path, chunk: int | None = None, tensor: int | None = None) -> None:
        """Do a whole transfer, or break it before a chunk or tensor."""

        def before(breaks_at: int | None, number: int) -> None:
            if number == breaks_at:
                raise ConnectionError("the trainer dies here")

        calls = Calls(self.engine, asyncio.get_running_loop())
        info = GroupInfo(2, partial(before, chunk), partial(before, tensor), rank=0)

        def whole() -> None:
            group = Sending.trainer_init(info, client=calls, source=Tensors(model))
            try:
                group.send_weights()
                calls.leave()
            finally:
                group.shutdown()

        await asyncio.to_thread(whole)

    async def broken(self, model: Path, **where: int) -> str:
        """Begin an update, and break its transfer."""
        await self.engine.begin_update("keep")
        try:
            await self.send(model, **where)
        except (ConnectionError, EngineFailed) as error:
            return str(error)
        return ""

    async def sample(self, version: int) -> Plain:
        asked = {"max_tokens": 8, "seed": 8}
        done = await self.run(prompt(100), **asked)
        return {**self.judged(prompt(100), done, **asked), "logprobs": done.logprobs.tolist()}


async def main(one: Path, two: Path) -> Plain:
    engine = await VllmEngine.start(str(one), [*FLAGS, "--weight-transfer-config", json.dumps({"backend": "socket"})])
    results: Plain = {"description": [engine.description.transfer, engine.description.transfer_ranks]}
    try:
        cases = TransferCases(engine, one, two)
        results["swaps"] = [await cases.sample(0)]
        for version, model in enumerate((two, one, two), 1):
            cases.versions[version] = model
            await engine.begin_update("keep")
            await cases.send(model)
            await engine.end_update(version)
            results["swaps"].append(await cases.sample(version))
        await engine.begin_update("keep")
        results["wrong"] = [
            await refusal(engine.transfer("finish", {}, LIMIT_S)),
            await refusal(engine.transfer("init", {"port": 1}, LIMIT_S)),
        ]
        await engine.end_update(None)
        results["after_wrong"] = await cases.sample(3)
        results["broken"], results["repaired"] = [], []
        for version, where in enumerate(({"chunk": 0}, {"chunk": 2}, {"tensor": 0}, {"tensor": 10}), 4):
            cases.versions[version] = one if version % 2 else two
            results["broken"].append(await cases.broken(one if version % 2 == 0 else two, **where))
            await cases.send(cases.versions[version])
            await engine.end_update(version)
            results["repaired"].append(await cases.sample(version))
        task = await cases.started(prompt(200), 5, max_tokens=1000)
        results["broken"].append(await cases.broken(two, chunk=1))
        results["lost"] = [
            await refusal(engine.end_update(None)),
            await refusal(task),
            await refusal(engine.check_health()),
            await refusal(cases.run(prompt(5))),
        ]
    finally:
        await engine.close()
    return results


if __name__ == "__main__":
    model, other, out = map(Path, sys.argv[1:])
    register()
    out.write_text(json.dumps(uvloop.run(main(model, other))))
