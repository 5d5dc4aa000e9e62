"""The same bytes over ZeroMQ's ipc without a copy, one byte in, one block out.

python ipc_server.py ENDPOINT TOKENS BLOCKS LAYERS EXPERTS
"""

from __future__ import annotations

import sys
from itertools import cycle

import zmq
from trajectories import make_trajectory


def main() -> None:
    tokens, count, *record = map(int, sys.argv[2:])
    layers, experts = record
    blocks = cycle([make_trajectory(seed, tokens, (layers, experts)).block for seed in range(count)])
    with zmq.Context() as context, context.socket(zmq.PAIR) as line:
        line.bind(sys.argv[1])
        while line.recv():
            line.send(next(blocks), copy=False)


if __name__ == "__main__":
    main()
