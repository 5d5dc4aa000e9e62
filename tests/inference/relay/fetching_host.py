"""An engine host's relay as a process: `fetching_host.py FOLDER NAME REQUEST DIES_AT`.

It prints a line once it serves, and waits for one. Then it brings the copy in FOLDER/NAME to the version of REQUEST,
kills itself after DIES_AT chunks (0: never), and prints what it was fed as JSON. It serves until its input ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from prorl_zmq.inference.relay import offered_folder, weights_relay
from prorl_zmq.inference.relay.chunk_server import ChunkServer
from prorl_zmq.inference.relay.offered_copy import offered_copy
from prorl_zmq.inference.relay.weights_relay import WeightsRelay
from prorl_zmq.inference.weights import version_folder
from prorl_zmq.inference.weights.local_copy import LocalCopy
from prorl_zmq.inference.weights.version_chain import Content
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.engines import WeightUpdate

CHUNK_BYTES = 32 * 1024


def main(folder: Path, name: str, request: WeightUpdate, dies_at: int) -> None:
    for module in (version_folder, offered_folder, weights_relay):
        module.CHUNK_BYTES = CHUNK_BYTES
    came = 0
    add = offered_folder.OfferedFolder.add

    def counted(self: offered_folder.OfferedFolder, file: int, chunk: int) -> None:
        nonlocal came
        add(self, file, chunk)
        came += 1
        if came == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    offered_folder.OfferedFolder.add = counted  # type: ignore[method-assign]
    copy = LocalCopy(folder / name, None, threads=1)
    server = ChunkServer(f"ipc://{folder}/{name}.w", None, find_copy=partial(offered_copy, copy))
    relay = WeightsRelay(copy, server, name, None)
    print("ready", flush=True)
    sys.stdin.readline()
    assert request.relay is not None
    content = Content(request.weight_version, request.digest)
    relay.bring(Path(request.path), content, request.relay, time.monotonic() + 60)
    print(json.dumps(relay.state.fed_by), flush=True)
    sys.stdin.read()
    relay.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], codec.decode(bytes.fromhex(sys.argv[3]), WeightUpdate), int(sys.argv[4]))
