"""Kills processes while they start a bubblewrap sandbox, and prints how many processes are left of that.

python killed_starts.py FOLDER TIMES
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from pathlib import Path

from prorl_zmq.tools.processes import become_subreaper, children
from prorl_zmq.tools.sandbox.bubblewrap import BubblewrapContainer
from prorl_zmq.tools.sandbox.specification import SandboxSpec

RUNTIME_S = 0.003
"""About as long as bubblewrap takes."""
PATIENCE_S = 20.0


def start(path: Path) -> None:
    for name in ("workspace", "tmp", "shm"):
        (path / name).mkdir(parents=True)
    asyncio.run(BubblewrapContainer(path, SandboxSpec()).start())
    time.sleep(PATIENCE_S)


def left() -> int:
    """Reap what has ended, and count the others."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return len(children(os.getpid()))
        except ChildProcessError:
            return 0


def main(folder: Path, times: int) -> None:
    become_subreaper()
    draw = random.Random(1)
    for number in range(times):
        pid = os.fork()
        if pid == 0:
            start(folder / str(number))
        while not children(pid):
            pass
        time.sleep(draw.uniform(0, RUNTIME_S))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    until = time.monotonic() + PATIENCE_S
    while left() and time.monotonic() < until:
        time.sleep(0.05)
    print(left())
    for pid in children(os.getpid()):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
