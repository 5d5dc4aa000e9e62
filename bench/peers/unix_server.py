"""The same bytes over a bare Unix socket, one byte in, one block out.

python unix_server.py PATH TOKENS BLOCKS [LAYERS EXPERTS]
"""

from __future__ import annotations

import socket
import sys
from itertools import cycle

from trajectories import make_trajectory


def main() -> None:
    path, tokens, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    record = (int(sys.argv[4]), int(sys.argv[5])) if sys.argv[4:] else None
    # As many blocks as the broker holds: one alone would stay in the cache.
    blocks = cycle([make_trajectory(seed, tokens, record).block for seed in range(count)])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        line, _ = listener.accept()
        with line:
            while line.recv(1):
                line.sendall(next(blocks))


if __name__ == "__main__":
    main()
