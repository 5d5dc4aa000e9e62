"""An engine host that takes what fits a model's folder.

folder_engine.py BACKEND_BROKER ENDPOINT MODEL [NAME COPY]
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import zmq

from prorl_zmq.inference.checkpoint import check_checkpoint
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.hosting.host import EngineHost, HostOptions
from prorl_zmq.inference.policy import Policy, PolicyShape
from prorl_zmq.system.processes import stop_signals


class FolderEngine(EmbeddedEngine):
    def __init__(self, model: Path) -> None:
        super().__init__(Policy.initial(PolicyShape(), seed=0))
        self._model = model

    def _read_weights(self, path: Path) -> Policy:
        check_checkpoint(path, self._model)
        return self._policy


async def main() -> None:
    backend_broker, endpoint, model, *more = sys.argv[1:]
    name, copy = more or ("folder", str(Path(model).with_name("copy")))
    stop = asyncio.Event()
    with stop_signals(stop.set), zmq.Context() as context:
        options = HostOptions(endpoint=endpoint, backend_broker=backend_broker, backend_id=name, weights=Path(copy))
        await EngineHost(context, FolderEngine(Path(model)), options).run(stop)


if __name__ == "__main__":
    asyncio.run(main())
