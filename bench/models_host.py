"""A host of a real vLLM with adapters, run by vLLM's Python.

    models_host.py MODEL ENDPOINT ADAPTERS SLOTS RANK [FLAG …]

ADAPTERS is the folder of the host's copies, from which a host that was killed restores its adapters.
"""

from __future__ import annotations

import sys
from pathlib import Path

from prorl_zmq.config import LoraSlots
from prorl_zmq.inference.hosting.host import HostOptions
from prorl_zmq.inference.hosting.host_process import run_engine_host
from prorl_zmq.inference.vllm.vllm_engine import VllmEngine


def main(model: str, endpoint: str, adapters: str, slots: str, rank: str, *flags: str) -> None:
    async def start() -> VllmEngine:
        engine = await VllmEngine.start(model, flags, lora=LoraSlots(slots=int(slots), rank=int(rank)))
        print(f"serves at {endpoint}", flush=True)
        return engine

    # No broker answers at that endpoint: the bench chooses the backend itself.
    options = HostOptions(
        endpoint=endpoint, backend_broker=f"{endpoint}-broker", backend_id="bench", adapters=Path(adapters)
    )
    run_engine_host(start, options)


if __name__ == "__main__":
    main(*sys.argv[1:])
