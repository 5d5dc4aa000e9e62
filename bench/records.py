"""Records of 384 bytes a token beside a trajectory of 40,000 tokens, 15 MB, from the store to the client.

The real path is timed: `RolloutClient.collect(1)` over ipc from a rollout broker that stores the blocks, and the fetch
of a block from its node, mapped. The peers transfer the same bytes over a bare Unix socket, read with `recv_into` into
one reused buffer, and over ZeroMQ alone: what ipc costs without a broker. The broker's CPU time of a job whose block
stays on its node is measured with and without records. All sides take turns in one run. Then 1,000 such rollouts run
while processes of each kind are killed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import psutil
import zmq
from fetch import PEERS, Feeder, prepare, receive_block, unix_server
from fetch_node import KeepingService
from harness import Row, main
from record_losses import STRIKES, loss_rows
from recorded_tokens import CHOSEN, LAYERS
from service import BenchService

from prorl_zmq import RolloutClient

sys.path.insert(0, str(Path(__file__).with_name("peers")))
from trajectories import make_trajectory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prorl_zmq import Trajectory

TOKENS = 40_000
RECORD = (LAYERS, CHOSEN)
CPU_TOKENS = 500
"""Of the trajectories with which the broker's CPU time is measured: it never sees them."""
HELD = 8
"""Kept blocks that are fetched in turns."""
TARGET_IPC, TARGET_MAPPED, TARGET_CPU, TARGET_MEMORY = 1.5, 1.1, 1.05, 1.1


def feeder(folder: Path) -> Feeder:
    """Play the stage processes of a run folder, whose trajectories have records."""
    return Feeder(folder, TOKENS, RECORD)


def collected(client: RolloutClient) -> Trajectory:
    """Fetch one trajectory."""
    (trajectory,) = client.collect(1, wait_s=30)
    return trajectory


@contextmanager
def ipc_server(folder: Path, blocks: int) -> Iterator[zmq.Socket[bytes]]:
    """Run the peer over ZeroMQ; gives the connected socket."""
    endpoint = f"ipc://{folder}/zeromq"
    words = (endpoint, TOKENS, blocks, *RECORD)
    process = subprocess.Popen([sys.executable, str(PEERS / "ipc_server.py"), *map(str, words)])
    try:
        with zmq.Context() as context, context.socket(zmq.PAIR) as line:
            line.connect(endpoint)
            yield line
    finally:
        process.kill()
        process.wait()


def receive_frame(line: zmq.Socket[bytes]) -> zmq.Frame:
    """Ask for a block, and receive it without a copy."""
    line.send(b"g")
    return line.recv(copy=False)


def timed(fetch: Callable[[], object], seconds: list[float]) -> None:
    """Fetch, and note the time by the clock."""
    started = time.perf_counter()
    fetched = fetch()
    seconds.append(time.perf_counter() - started)
    del fetched


def broker_cpu(folder: Path, record: tuple[int, int] | None, jobs: int) -> float:
    """Give the rollout broker's CPU seconds of a job whose trajectory stays on its node, from submission to its end."""
    folder.mkdir()
    with KeepingService(folder, jobs, lambda run_dir: Feeder(run_dir, CPU_TOKENS, record).close, handles=1) as node:
        for _ in range(jobs):
            node.collected()
        return node.broker_cpu_s() / (jobs + 1)


def client_memory(client: RolloutClient, batch: int) -> float:
    """Give how much a batch of trajectories adds to this process, against the bytes of the batch."""
    process = psutil.Process()
    before = process.memory_info().rss
    trajectories = [collected(client) for _ in range(batch)]
    size = sum(one.records["experts"].nbytes + 13 * TOKENS + one.turns.nbytes for one in trajectories)
    touched = sum(int(one.records["experts"].max()) for one in trajectories)
    assert touched > 0
    return (process.memory_info().rss - before) / size


def measure(quick: bool) -> list[Row]:
    rounds, batch = (8, 4) if quick else (32, 12)
    seconds: dict[str, list[float]] = {"ipc": [], "mapped": [], "socket": [], "zeromq": []}
    made = make_trajectory(0, TOKENS, RECORD)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="prorl-bench-")))
        line = stack.enter_context(unix_server(str(folder), 8, RECORD))
        zeromq = stack.enter_context(ipc_server(folder, 8))
        service = stack.enter_context(BenchService([]))
        session = prepare(service, rounds + 1 + batch, feeder)
        client = stack.enter_context(RolloutClient(service.front_door, session=session, timeout_s=60))
        place = folder / "node"
        place.mkdir()
        node = stack.enter_context(KeepingService(place, 1, lambda run_dir: feeder(run_dir).close, HELD))
        shape = (TOKENS, len(made.arrays.turns), made.records)
        buffer = memoryview(bytearray(made.block.nbytes))
        sides = {
            "ipc": lambda: collected(client),
            "mapped": partial(node.mapped, *shape),
            "socket": partial(receive_block, line, buffer),
            "zeromq": partial(receive_frame, zeromq),
        }
        receive_frame(zeromq)  # it may have to start
        for _ in range(rounds):
            for name, fetch in sides.items():
                timed(fetch, seconds[name])
        memory = client_memory(client, batch)
        expected = {make_trajectory(seed, TOKENS, RECORD).block[made.at + 64 :][:384].tobytes() for seed in range(8)}
        assert collected(client).records["experts"][0].tobytes() in expected
    cpu_s: dict[bool, list[float]] = {False: [], True: []}
    for number in range(1 if quick else 6):
        with TemporaryDirectory(prefix="prorl-bench-") as name:
            for has_records in (False, True) if number % 2 else (True, False):
                each = broker_cpu(Path(name, str(has_records)), RECORD if has_records else None, 500 if quick else 2000)
                cpu_s[has_records].append(each)
    without, with_records = (float(np.median(cpu_s[has_records])) for has_records in (False, True))
    median = {name: float(np.median(values)) for name, values in seconds.items()}
    ipc, mapped = median["ipc"] / median["socket"], median["mapped"] / median["socket"]
    cpu = with_records / without
    most = "at most {:g}×".format
    return [
        Row("fetch over ipc", 1e3 * median["ipc"], "ms", "bare Unix socket", ipc, most(TARGET_IPC), ipc <= TARGET_IPC),
        Row(
            "fetch from its node, mapped",
            1e3 * median["mapped"],
            "ms",
            "bare Unix socket",
            mapped,
            most(TARGET_MAPPED),
            mapped <= TARGET_MAPPED,
        ),
        Row("the same bytes over a bare Unix socket", 1e3 * median["socket"], "ms"),
        Row(
            "the same bytes over ZeroMQ alone",
            1e3 * median["zeromq"],
            "ms",
            "bare Unix socket",
            median["zeromq"] / median["socket"],
        ),
        Row(
            "rollout broker's CPU time of a job, kept by its node",
            1e6 * with_records,
            "µs",
            "without records",
            cpu,
            most(TARGET_CPU),
            cpu <= TARGET_CPU,
        ),
        Row(
            f"client's memory for {batch} trajectories",
            memory,
            "× their bytes",
            target=most(TARGET_MEMORY),
            holds=memory <= TARGET_MEMORY,
        ),
        *(loss_rows(16, 1000, STRIKES[:1]) if quick else loss_rows(1000, TOKENS, 3 * STRIKES)),
    ]


if __name__ == "__main__":
    main("records", "15 MB of records beside a trajectory, from broker and node to client", measure)
