"""An engine host that notes which weights it serves: `noting_engine.py BACKEND_BROKER FOLDER NAME`.

FOLDER has the model as `served`; the hosts share the copy `copy`, and append `VERSION FINGERPRINT` to `NAME.log`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
from support.weight_versions import fingerprint, read_copy

from prorl_zmq.inference.checkpoint import check_checkpoint
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.hosting.host import EngineHost, HostOptions
from prorl_zmq.inference.policy import Policy, PolicyShape
from prorl_zmq.system.processes import stop_signals

if TYPE_CHECKING:
    from prorl_zmq.wire.messages.engines import UpdateMode


class NotingEngine(EmbeddedEngine):
    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(Policy.initial(PolicyShape(), seed=0))
        self._folder = folder
        self._log = folder / f"{name}.log"
        self._taken = ""

    def _read_weights(self, path: Path) -> Policy:
        check_checkpoint(path, self._folder / "served")
        self._taken = fingerprint(read_copy(path))
        return self._policy

    async def update_weights(self, path: Path, weight_version: int, mode: UpdateMode) -> float:
        pause_s = await super().update_weights(path, weight_version, mode)
        with self._log.open("a") as log:
            log.write(f"{weight_version} {self._taken}\n")
        return pause_s


async def main() -> None:
    backend_broker, folder, name = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    stop = asyncio.Event()
    with stop_signals(stop.set), zmq.Context() as context:
        options = HostOptions(
            endpoint=f"ipc://{folder}/{name}",
            backend_broker=backend_broker,
            backend_id=name,
            weights=folder / "copy",
            copies_all=True,
        )
        await EngineHost(context, NotingEngine(folder, name), options).run(stop)


if __name__ == "__main__":
    asyncio.run(main())
