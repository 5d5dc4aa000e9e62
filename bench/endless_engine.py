"""An engine host whose generations end only when they are stopped: `endless_engine.py BACKEND_BROKER ENDPOINT BELL`.

Each generation rings the bell when it begins (see bell.py); its connection closes when the generation ends.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import uvloop
import zmq
from bell import rung

from prorl_zmq.errors import EngineFailed
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.hosting.host import EngineHost, HostOptions
from prorl_zmq.inference.policy import Policy, PolicyShape
from prorl_zmq.system.processes import stop_signals

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from prorl_zmq.inference.engine import Generation
    from prorl_zmq.wire.messages.jobs import Sampling


class EndlessEngine(EmbeddedEngine):
    """An embedded engine in all but its generations.

    Args:
        bell: the path of the bell.
    """

    def __init__(self, bell: str) -> None:
        super().__init__(Policy.initial(PolicyShape(), seed=0))
        self._bell = bell

    async def generate(
        self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int], job_id: str
    ) -> Generation:
        """Generate nothing, until the call is cancelled."""
        del token_ids, sampling, stop_token_ids
        async with rung(self._bell, "generation", job_id) as go:
            await go()
        raise EngineFailed("the benchmark is over")


async def main() -> None:
    backend_broker, endpoint, bell = sys.argv[1:]
    stop = asyncio.Event()
    with stop_signals(stop.set), zmq.Context() as context:
        options = HostOptions(endpoint=endpoint, backend_broker=backend_broker, backend_id="endless")
        await EngineHost(context, EndlessEngine(bell), options).run(stop)


if __name__ == "__main__":
    uvloop.run(main())
