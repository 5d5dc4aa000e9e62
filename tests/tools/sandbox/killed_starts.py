"""Kills servers or their bubblewraps while a sandbox starts, and prints how many processes are left of that.

python killed_starts.py FOLDER server|runtime TIMES
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

from prorl_zmq.errors import SandboxFailed
from prorl_zmq.system.processes import become_subreaper
from prorl_zmq.tools.containers.specification import SandboxSpec
from prorl_zmq.tools.kinds.bubblewrap import BubblewrapContainer
from prorl_zmq.tools.processes.process_tree import children

START_S = 0.003
"""About as long as bubblewrap takes."""
PATIENCE_S = 20.0
draw = random.Random(1)


def container(path: Path) -> BubblewrapContainer:
    for name in ("workspace", "tmp", "shm"):
        (path / name).mkdir(parents=True)
    return BubblewrapContainer(path, SandboxSpec())


def kill_server(path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        asyncio.run(container(path).start())
        time.sleep(PATIENCE_S)
    while not children(pid):
        pass
    time.sleep(draw.uniform(0, START_S))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def kill_runtime(path: Path) -> None:
    """Kill it as soon as it has a child, which then waits for it."""

    async def main() -> None:
        made = container(path)
        starting = asyncio.create_task(made.start())
        await asyncio.sleep(0)
        (runtime,) = children(os.getpid())
        while not children(runtime):
            pass
        os.kill(runtime, signal.SIGKILL)
        with contextlib.suppress(SandboxFailed):
            await starting
        await made.close()

    asyncio.run(main())


def left() -> int:
    """Reap what ends in time, and count the others."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return 0
        if time.monotonic() > until:
            return len(children(os.getpid()))
        time.sleep(0.001)


def main(folder: Path, whom: str, times: int) -> None:
    become_subreaper()
    count = 0
    for number in range(times):
        (kill_server if whom == "server" else kill_runtime)(folder / str(number))
        if count := left():
            break
    print(count)
    for pid in children(os.getpid()):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
