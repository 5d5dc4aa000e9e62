"""An engine host that says which adapter it generates with: `adapter_engine.py BACKEND_BROKER ENDPOINT NAME FOLDER`."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import zmq

from prorl_zmq.errors import EngineFailed, InvalidWeights
from prorl_zmq.inference.adapters import WEIGHTS
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.engine import NOTHING_MORE, Generation, Wanted, whole_span
from prorl_zmq.inference.hosting.host import EngineHost, HostOptions
from prorl_zmq.inference.policy import Policy, PolicyShape
from prorl_zmq.inference.tokenizer import IM_END, encode
from prorl_zmq.system.processes import stop_signals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from prorl_zmq.wire.messages.jobs import Sampling


class AdapterEngine(EmbeddedEngine):
    """Answers with the content of the adapter's file, `base` without one."""

    def __init__(self) -> None:
        super().__init__(Policy.initial(PolicyShape(), seed=0))
        self._description = replace(self._description, adapter_slots=4)
        self._loaded: dict[tuple[str, int], str] = {}

    async def load_adapter(self, model: str, version: int, path: Path) -> None:
        content = (path / WEIGHTS).read_text()
        if content == "torn":
            raise InvalidWeights(f"{path} is torn", path=str(path))
        self._loaded[model, version] = content

    async def remove_adapter(self, model: str, version: int) -> None:
        del self._loaded[model, version]

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        job_id: str,
        wanted: Wanted = NOTHING_MORE,
    ) -> Generation:
        del token_ids, sampling, stop_token_ids, job_id
        if wanted.adapter is not None and wanted.adapter not in self._loaded:
            raise EngineFailed(f"{wanted.adapter} is not loaded")
        said, version = ("base", 0) if wanted.adapter is None else (self._loaded[wanted.adapter], wanted.adapter[1])
        ids = np.array([*encode(said), IM_END], np.int32)
        return Generation(ids, np.zeros(len(ids), np.float32), whole_span(len(ids), version), "stop")


async def main() -> None:
    backend_broker, endpoint, name, folder = sys.argv[1:]
    stop = asyncio.Event()
    with stop_signals(stop.set), zmq.Context() as context:
        options = HostOptions(
            endpoint=endpoint,
            backend_broker=backend_broker,
            backend_id=name,
            heartbeat_s=0.2,
            adapters=Path(folder) / "adapters" / name / "life",
        )
        await EngineHost(context, AdapterEngine(), options).run(stop)


if __name__ == "__main__":
    asyncio.run(main())
