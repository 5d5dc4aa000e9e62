"""A 40,000-token trajectory from broker to client, over ipc and tcp.

The real path is timed: `RolloutClient.collect(1)` from a rollout broker's process that holds many finished jobs. The
peers transfer the same five arrays: FastAPI + uvicorn + httpx as JSON lists, timed until the client has the lists (the
ProRL Agent server's `/process` returns a plain dict; two faster ways of FastAPI are measured too), and a bare Unix
socket read with `recv_into` into one reused buffer. For trajectories that stay on their node, the fetch from there is
timed by itself, mapped and over CURVE, and with the broker's part. All sides take turns in one run.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import zmq
from fetch_node import KeepingService
from harness import Row, main, picture_path
from service import BenchService, free_port

from prorl_zmq import Job, RolloutClient, Trajectory
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.base import PROTOCOL_VERSION
from prorl_zmq.wire.messages.jobs import Phase
from prorl_zmq.wire.messages.stages import PhaseDone, StageLeaving, StageReport, StartPhase, Task
from prorl_zmq.wire.sockets import bind, connect, open_socket, send

sys.path.insert(0, str(Path(__file__).with_name("peers")))
from trajectories import make_trajectory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOKENS = 40_000
BATCH = 40
"""Fetches of one side before the next side's turn."""
HTTP_BATCH = 3
WARM_UP = 5
"""Fetches of each turn that are not timed: the other sides have had the caches."""
TARGET_HTTP = 100.0
TARGET_SOCKET = 4.0
TARGET_MAPPED = 1.5
NODE = {
    "mapped": "fetch from its node, mapped on one machine",
    "node tcp": "fetch from its node, TCP with CURVE",
    "node": "result over TCP with CURVE, block mapped",
}
PEERS = Path(__file__).with_name("peers")
HTTP = {
    "dict": "FastAPI + httpx, a plain dict",
    "annotated": "FastAPI + httpx, an annotated dict",
    "json_response": "FastAPI + httpx, a JSONResponse",
}
"""The endpoints of peers/http_server.py."""


class Feeder:
    """Plays a stage process of each role towards a rollout broker, so that jobs end with a given trajectory.

    Runs in a thread of its own until closed.
    """

    def __init__(self, folder: Path, tokens: int = TOKENS, record: tuple[int, int] | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._events = open_socket(self._context, zmq.PUSH)
        connect(self._events, f"ipc://{folder}/stage_events")
        self._inboxes: dict[zmq.Socket[bytes], tuple[Phase, str]] = {}
        for role in Phase:
            inbox = open_socket(self._context, zmq.PULL)
            endpoint = bind(inbox, f"ipc://{folder}/feeder-{role}")
            self._inboxes[inbox] = (role, endpoint)
        self._blocks = [make_trajectory(seed, tokens, record) for seed in range(8)]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """Leave the broker, and end."""
        self._stopping.set()
        self._thread.join()
        self._context.destroy(linger=1000)

    def _run(self) -> None:
        poller = zmq.Poller()
        for inbox in self._inboxes:
            poller.register(inbox, zmq.POLLIN)
        report_at = 0.0
        done = 0
        while not self._stopping.is_set():
            if time.monotonic() >= report_at:
                self._report()
                report_at = time.monotonic() + 0.5
            for inbox, _ in poller.poll(50):
                header, *_rest = inbox.recv_multipart()
                if codec.unpack(header)["type"] == "start_phase":
                    self._finish(codec.decode(header, StartPhase), done)
                    done += 1
        for role in Phase:
            send(self._events, [codec.encode(StageLeaving(f"feeder-{role}"))])

    def _report(self) -> None:
        for role, endpoint in self._inboxes.values():
            report = StageReport(
                protocol=PROTOCOL_VERSION,
                stage_id=f"feeder-{role}",
                role=role,
                node="local",
                slots=10_000,
                endpoint=endpoint,
                tasks=(Task("fetch"),),
                welcomed=True,
            )
            send(self._events, [codec.encode(report)])

    def _finish(self, start: StartPhase, number: int) -> None:
        made = self._blocks[number % len(self._blocks)]
        run = start.phase == Phase.RUN
        done = PhaseDone(
            stage_id=f"feeder-{start.phase}",
            job_id=start.job_id,
            attempt=start.attempt,
            phase=start.phase,
            number=number + 1,
            origin=start.origin,
            reward=1.0 if start.phase == Phase.EVAL else None,
            stop_reason="finished" if run else "",
            metrics={"turns": 40.0, "tool_calls": 40.0} if run else {},
            timings={start.phase.value: 0.0},
            tokens=len(made.arrays.token_ids) if run else 0,
            turns=len(made.arrays.turns) if run else 0,
            records=made.records if run else (),
        )
        send(self._events, [codec.encode(done), *((made.block.data,) if run else ())])


def prepare(service: BenchService, count: int, play: Callable[[Path], Feeder] = Feeder) -> str:
    """Have a broker hold `count` finished jobs, played by what `play` makes. Returns their session."""
    feeder = play(service.folder)
    try:
        with RolloutClient(service.front_door, timeout_s=60) as client:
            client.submit((Job(task="fetch", instance={}) for _ in range(count)), timeout_s=60)
            until = time.monotonic() + 60
            while client.status().uncollected < count:
                assert time.monotonic() < until, "the broker did not end the jobs"
                time.sleep(0.05)
            return client.session
    finally:
        feeder.close()


def view_count(trajectory: Trajectory) -> int:
    """Give how many of the five arrays lie, by address, in the one frame that libzmq received."""
    owner: Any = trajectory.token_ids
    while isinstance(owner, np.ndarray):
        owner = owner.base
    assert isinstance(owner, memoryview)
    frame = np.frombuffer(owner, np.uint8)
    if not isinstance(owner.obj, zmq.Frame):
        return 0
    first, end = frame.ctypes.data, frame.ctypes.data + frame.nbytes
    arrays = (
        trajectory.token_ids,
        trajectory.loss_mask,
        trajectory.logprobs,
        trajectory.weight_versions,
        trajectory.turns,
    )
    return sum(first <= array.ctypes.data and array.ctypes.data + array.nbytes <= end for array in arrays)


def python_memory(client: RolloutClient) -> int:
    """Give the most bytes that Python and numpy held at once for one fetch; libzmq's frame is not among them."""
    tracemalloc.start()
    try:
        trajectories = client.collect(1, wait_s=10)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(trajectories) == 1
    return peak


def timed(fetch: Callable[[], object], times: int) -> list[float]:
    """Give the seconds of each of `times` fetches."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        fetched = fetch()
        seconds.append(time.perf_counter() - started)
        del fetched
    return seconds


@contextmanager
def http_server() -> Iterator[httpx.Client]:
    """Run the HTTP peer; gives a client with a connection that stays open."""
    port = free_port()
    process = subprocess.Popen([sys.executable, str(PEERS / "http_server.py"), str(port), str(TOKENS)])
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            _until_up(lambda: client.get("/openapi.json"), httpx.ConnectError)
            yield client
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def unix_server(folder: str, blocks: int, record: tuple[int, ...] = ()) -> Iterator[socket.socket]:
    """Run the bare peer; gives the connected socket."""
    path = f"{folder}/bare"
    arguments = (path, TOKENS, blocks, *record)
    process = subprocess.Popen([sys.executable, str(PEERS / "unix_server.py"), *map(str, arguments)])
    try:
        with socket.socket(socket.AF_UNIX) as line:
            _until_up(lambda: line.connect(path), OSError)
            yield line
    finally:
        process.terminate()
        process.wait(20)


def _until_up(attempt: Callable[[], object], error: type[Exception]) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            attempt()
        except error:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return


def receive_block(line: socket.socket, buffer: memoryview) -> None:
    """Ask for a block and read it into `buffer`."""
    line.sendall(b"g")
    received = 0
    while received < len(buffer):
        received += line.recv_into(buffer[received:])


def collected(client: RolloutClient) -> Trajectory:
    """Fetch one trajectory."""
    (trajectory,) = client.collect(1, wait_s=10)
    return trajectory


def fetch_json(client: httpx.Client, path: str) -> dict[str, list[float]]:
    """Fetch one trajectory as lists."""
    lists: dict[str, list[float]] = client.get(f"/{path}").json()
    return lists


def fetch_all(rounds: int) -> tuple[dict[str, list[float]], int, int]:
    """Let all sides take turns. Gives the seconds of each fetch, the arrays that are views, and Python's bytes."""
    seconds: dict[str, list[float]] = {}
    count = rounds * (WARM_UP + BATCH) + 2
    expected = {made.arrays.token_ids.tobytes() for made in (make_trajectory(seed, TOKENS) for seed in range(8))}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="prorl-bench-"))
        http = stack.enter_context(http_server())
        line = stack.enter_context(unix_server(folder, count))
        clients = {}
        for transport in ("ipc", "tcp"):
            service = stack.enter_context(BenchService([], tcp=transport == "tcp"))
            session = prepare(service, count)
            clients[transport] = stack.enter_context(RolloutClient(service.front_door, session=session))
        node = stack.enter_context(KeepingService(Path(folder), count, lambda run_dir: Feeder(run_dir).close))
        shape = (TOKENS, len(make_trajectory(0, TOKENS).arrays.turns))
        buffer = memoryview(bytearray(make_trajectory(0, TOKENS).block.nbytes))
        sides: list[tuple[str, Callable[[], object], int]] = [
            ("ipc", lambda: collected(clients["ipc"]), BATCH),
            ("tcp", lambda: collected(clients["tcp"]), BATCH),
            ("mapped", lambda: node.mapped(*shape), BATCH),
            ("node tcp", lambda: node.over_tcp(*shape), BATCH),
            ("node", node.collected, BATCH),
            ("socket", lambda: receive_block(line, buffer), BATCH),
            *((name, partial(fetch_json, http, name), HTTP_BATCH) for name in HTTP),
        ]
        for _ in range(rounds):
            for name, fetch, times in sides:
                timed(fetch, min(WARM_UP, times))
                seconds.setdefault(name, []).extend(timed(fetch, times))
        trajectory = collected(clients["ipc"])
        assert trajectory.token_ids.tobytes() in expected
        assert node.mapped(*shape).token_ids.tobytes() in expected
        assert node.over_tcp(*shape).token_ids.tobytes() in expected
        assert fetch_json(http, "dict")["token_ids"] == make_trajectory(0, TOKENS).arrays.token_ids.tolist()
        views = view_count(trajectory)
        python_bytes = python_memory(clients["ipc"])
    return seconds, views, python_bytes


def draw(seconds: dict[str, list[float]]) -> None:
    """Draw the fetch times of all sides, on a logarithmic axis."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    ours = {
        "mapped": "prorl_zmq, mapped from the node",
        "node tcp": "prorl_zmq, from the node over CURVE",
        "node": "prorl_zmq, result from the broker, block mapped",
        "ipc": "prorl_zmq, ipc",
        "tcp": "prorl_zmq, tcp",
    }
    names = {"socket": "bare Unix socket, recv_into", **ours, **HTTP}
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    values = [1e3 * float(np.median(seconds[name])) for name in names]
    bars = axes.barh(list(names.values()), values, color=["tab:blue" if name in ours else "0.6" for name in names])
    axes.bar_label(bars, [f"{value:.3g} ms" for value in values], padding=3)
    axes.set_xscale("log")
    axes.set_xlim(right=max(values) * 4)
    axes.invert_yaxis()
    axes.set_xlabel(f"milliseconds to fetch a trajectory of {TOKENS:,} tokens (median)")
    figure.savefig(picture_path("fetch"), dpi=120)


def measure(quick: bool) -> list[Row]:
    seconds, views, python_bytes = fetch_all(rounds=2 if quick else 8)
    if not quick:
        draw(seconds)
    median = {name: float(np.median(values)) for name, values in seconds.items()}
    block_bytes = make_trajectory(0, TOKENS).block.nbytes
    rows = []
    for transport in ("ipc", "tcp"):
        micros = 1e6 * median[transport]
        faster, longer = median["dict"] / median[transport], median[transport] / median["socket"]
        http, bare = f"at least {TARGET_HTTP:g}× faster", f"at most {TARGET_SOCKET:g}× as long"
        rows += [
            Row(
                f"fetch over {transport}",
                micros,
                "µs",
                "as JSON lists, a plain dict",
                faster,
                http,
                faster >= TARGET_HTTP,
            ),
            Row(f"fetch over {transport}", micros, "µs", "bare Unix socket", longer, bare, longer <= TARGET_SOCKET),
        ]
    for name, what in NODE.items():
        ratio = median[name] / median["socket"]
        goal = (
            {"target": f"at most {TARGET_MAPPED:g}× as long", "holds": ratio <= TARGET_MAPPED}
            if name == "mapped"
            else {}
        )
        rows.append(Row(what, 1e6 * median[name], "µs", "bare Unix socket", ratio, **goal))
    return [
        *rows,
        Row("the same bytes over a bare Unix socket", 1e6 * median["socket"], "µs"),
        *(Row(what, 1e3 * median[name], "ms", "ipc", median[name] / median["ipc"]) for name, what in HTTP.items()),
        Row("arrays that lie in the received frame", views, "of 5", target="all 5, by address", holds=views == 5),
        Row(
            "Python memory for one fetch",
            python_bytes / 1024,
            "KiB",
            "the trajectory's bytes",
            python_bytes / block_bytes,
            "under a tenth: no copy",
            python_bytes < block_bytes / 10,
        ),
    ]


if __name__ == "__main__":
    main("fetch", f"a trajectory of {TOKENS:,} tokens from broker to client", measure)
