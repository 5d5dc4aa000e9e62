"""An engine host whose engine does what a file says: `python moody_engine.py BACKEND_BROKER ENDPOINT NAME MOOD`.

The file MOOD holds `well`, `raise`, `refuse`, `garbage`, `hang`, `stuck` (its check of its health hangs too) or `pause`
(until it holds something else), and is read whenever the engine is asked for something. If there is a file MOOD.kv, the
engine reports what it holds of its KV cache: JSON of `KvFigures`, or anything else.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from prorl_zmq.errors import EngineFailed
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine, load_embedded_engine
from prorl_zmq.inference.hosting.host import EngineHost, HostOptions
from prorl_zmq.inference.kv_figures import KvFigures
from prorl_zmq.system.processes import stop_signals

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from prorl_zmq.inference.engine import Generation
    from prorl_zmq.wire.messages.jobs import Sampling


CONTEXT_TOKENS = 4096


class MoodyEngine:
    """The embedded engine, when it is well."""

    def __init__(self, engine: EmbeddedEngine, mood: Path) -> None:
        self._engine = engine
        self._mood = mood
        self._kv = mood.with_suffix(".kv")
        self.description = engine.description
        if self._kv.exists():
            self.description = replace(engine.description, kv=True, context_tokens=CONTEXT_TOKENS)
        self.weight_version = 0
        self.set_weight_version = engine.set_weight_version
        self.update_weights = engine.update_weights
        self.begin_update = engine.begin_update
        self.end_update = engine.end_update
        self.close = engine.close

    async def generate(
        self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int], job_id: str
    ) -> Generation:
        while self._mood.read_text() == "pause":  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.05)
        match self._mood.read_text():
            case "raise":
                raise RuntimeError("HTTP 500")
            case "refuse":
                raise EngineFailed("the prompt is too odd", refused=True)
            case "hang" | "stuck":
                await asyncio.Event().wait()
        done = await self._engine.generate(token_ids, sampling, stop_token_ids, job_id)
        return replace(done, logprobs=done.logprobs[1:]) if self._mood.read_text() == "garbage" else done

    def kv_figures(self, _now: float) -> KvFigures | None:
        return KvFigures(**json.loads(self._kv.read_text()))

    async def check_health(self) -> None:
        if self._mood.read_text() == "stuck":
            await asyncio.Event().wait()


async def main() -> None:
    backend_broker, endpoint, name, mood = sys.argv[1:]
    stop = asyncio.Event()
    with stop_signals(stop.set), zmq.Context() as context:
        engine = MoodyEngine(load_embedded_engine(None), Path(mood))
        options = HostOptions(endpoint=endpoint, backend_broker=backend_broker, backend_id=name, heartbeat_s=0.2)
        await EngineHost(context, engine, options).run(stop)


if __name__ == "__main__":
    asyncio.run(main())
