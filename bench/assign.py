"""Assignments of the backend broker: assign+release pairs per second from 4 client processes over ipc.

The peer is a bare ROUTER loop in Python that echoes each message: the cost of any such broker before it decodes,
decides or encodes. The same four clients use both in turns, with the same frames.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import zmq
from harness import Row, main, quantiles
from service import BenchService

from prorl_zmq import Backend, RolloutClient
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.backends import AnyBackendReply, Assign, Assigned, Release
from prorl_zmq.wire.messages.base import Done, new_id
from prorl_zmq.wire.sockets import bind, connect, open_socket

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Barrier

CLIENTS = 4
BACKENDS = 16
TARGET_RATIO = 0.7
PEER = "bare ROUTER echo loop"


class Round(NamedTuple):
    """What one client did in one round."""

    started: float
    ended: float
    pairs_s: list[float]
    """Seconds of each pair."""


def echo(endpoint: str) -> None:
    """Send every message back, until terminated."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = open_socket(context, zmq.ROUTER)
    bind(router, endpoint)
    while True:
        router.send_multipart(router.recv_multipart())


def client(endpoints: list[str], rounds: int, pairs: int, barrier: Barrier, results: Connection) -> None:
    """Ask each endpoint in turn, together with the other clients, and send a `Round` per turn to `results`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    lines = [open_socket(context, zmq.REQ) for _ in endpoints]
    for line, endpoint in zip(lines, endpoints, strict=True):
        connect(line, endpoint)
    owner = f"bench-{new_id()[:8]}"
    for number in range(rounds * len(lines)):
        results.send(_round(lines[number % len(lines)], owner, pairs, barrier))
    context.destroy(linger=0)


def _round(line: zmq.Socket[bytes], owner: str, pairs: int, barrier: Barrier) -> Round:
    requests = [_pair(owner) for _ in range(pairs)]
    replies: list[bytes] = []
    seconds: list[float] = []
    barrier.wait()
    started = time.perf_counter()
    for assign, release in requests:
        begun = time.perf_counter()
        line.send(assign)
        replies.append(line.recv())
        line.send(release)
        replies.append(line.recv())
        seconds.append(time.perf_counter() - begun)
    ended = time.perf_counter()
    if replies != [frame for pair in requests for frame in pair]:  # not the echo's: what was asked must have been done
        kinds = {(type(codec.decode(reply, AnyBackendReply)), number % 2) for number, reply in enumerate(replies)}
        assert kinds == {(Assigned, 0), (Done, 1)}
    return Round(started, ended, seconds)


def _pair(owner: str) -> tuple[bytes, bytes]:
    job_id = new_id()
    assign = Assign(new_id(), owner=owner, job_id=job_id, attempt=1, wait_s=60.0)
    return codec.encode(assign), codec.encode(Release(new_id(), job_id, 1))


def rounds_of_all(endpoints: list[str], rounds: int, pairs: int) -> list[list[Round]]:
    """Run the clients; give for each round of each endpoint (A B A B …) what each client did."""
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(CLIENTS)
    pipes = [spawn.Pipe(duplex=False) for _ in range(CLIENTS)]
    processes = [
        spawn.Process(target=client, args=(endpoints, rounds, pairs, barrier, sender), daemon=True)
        for _, sender in pipes
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()  # so that a client's death ends the wait below
    done = [[receiver.recv() for receiver, _ in pipes] for _ in range(rounds * len(endpoints))]
    for process in processes:
        process.join()
    return done


def rate(rounds: list[list[Round]]) -> float:
    """Give the pairs per second of the median round."""
    return float(
        np.median(
            [
                sum(len(one.pairs_s) for one in clients)
                / (max(one.ended for one in clients) - min(one.started for one in clients))
                for clients in rounds
            ]
        )
    )


def measure(quick: bool) -> list[Row]:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder, BenchService([]) as service:
        peer = spawn.Process(target=echo, args=(f"ipc://{folder}/echo",), daemon=True)
        peer.start()
        try:
            with RolloutClient(service.front_door) as trainer:
                for number in range(BACKENDS):
                    trainer.backends.add(Backend(backend_id=f"b{number}", endpoint=f"ipc:///nowhere/{number}"))
            endpoints = [service.backend_broker, f"ipc://{folder}/echo"]
            warm_up = 1
            done = rounds_of_all(endpoints, warm_up + (3 if quick else 11), 300 if quick else 1000)[warm_up * 2 :]
        finally:
            peer.terminate()
            peer.join()
    ours, theirs = done[::2], done[1::2]
    seconds = [[s for clients in side for one in clients for s in one.pairs_s] for side in (ours, theirs)]
    (p50, _, p99), (echo_p50, _, echo_p99) = (quantiles(side) for side in seconds)
    ratio = rate(ours) / rate(theirs)
    return [
        Row(
            "assign+release",
            rate(ours),
            "pairs/s",
            PEER,
            ratio,
            f"at least {TARGET_RATIO:g}× the echo's rate",
            ratio >= TARGET_RATIO,
        ),
        Row("the echo's two round trips", rate(theirs), "pairs/s"),
        Row("pair p50", 1e6 * p50, "µs", PEER, p50 / echo_p50),
        Row("pair p99", 1e6 * p99, "µs", PEER, p99 / echo_p99),
    ]


if __name__ == "__main__":
    main("assign", "assign+release pairs on the backend broker, from 4 client processes over ipc", measure)
