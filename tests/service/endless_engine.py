"""An engine host whose generations never end: `python endless_engine.py BACKEND_BROKER ENDPOINT MARK`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.hosting.host import EngineHost, HostOptions
from prorl_zmq.inference.policy import Policy, PolicyShape
from prorl_zmq.system.processes import stop_signals

if TYPE_CHECKING:
    from prorl_zmq.inference.engine import Generation


class EndlessEngine(EmbeddedEngine):
    """Notes in a file what happens to its generations."""

    def __init__(self, mark: Path) -> None:
        super().__init__(Policy.initial(PolicyShape(), seed=0), model="base policy")
        self._mark = mark

    async def generate(self, *_: object) -> Generation:
        self._mark.write_text("generating")
        try:
            await asyncio.Event().wait()
        finally:
            self._mark.write_text("aborted")
        raise AssertionError


async def main() -> None:
    backend_broker, endpoint, mark = sys.argv[1:]
    stop = asyncio.Event()
    with stop_signals(stop.set), zmq.Context() as context:
        host = EngineHost(
            context,
            EndlessEngine(Path(mark)),
            HostOptions(endpoint=endpoint, backend_broker=backend_broker, backend_id="endless"),
        )
        await host.run(stop)


if __name__ == "__main__":
    asyncio.run(main())
