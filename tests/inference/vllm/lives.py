"""An engine that generates until it is killed; run by vLLM's Python. Prints the pids of vLLM's processes as JSON.

python lives.py MODEL
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import numpy as np
import psutil
import uvloop
from cases import FLAGS

from prorl_zmq.errors import ProrlError
from prorl_zmq.inference.vllm.vllm_engine import VllmEngine
from prorl_zmq.wire.messages.jobs import Sampling


async def failure(model: str, *flags: str) -> list[str]:
    try:
        await VllmEngine.start(model, [*FLAGS, *flags])
    except ProrlError as error:
        return [type(error).__name__, error.message]
    return ["none"]


async def main(model: str) -> None:
    failures = [
        await failure(model, "--no-such-flag"),
        await failure(model, "--tensor-parallel-size=many"),
        await failure(model, "--logprobs-mode=raw_logits"),
        await failure(model, "--max-model-len=100000000"),
    ]
    engine = await VllmEngine.start(model, FLAGS)
    task = asyncio.create_task(engine.generate(np.arange(9, dtype=np.int32), Sampling(max_tokens=2000), (), "job"))
    pids = [child.pid for child in psutil.Process().children(recursive=True)]
    said = json.dumps({"pids": pids, "failures": failures})
    os.write(int(os.environ["ANSWER"]), said.encode())
    os.close(int(os.environ["ANSWER"]))
    while True:
        await task
        task = asyncio.create_task(engine.generate(np.arange(9, dtype=np.int32), Sampling(max_tokens=2000), (), "job"))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
