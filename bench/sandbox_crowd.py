"""Many containers at once, for bench/sandbox.py: start time, memory, and leftovers.

Memory is PSS, from the kernel's smaps_rollup: a page that n processes share counts 1/n in each. It covers all processes
below this one: spawner, execution servers, runtimes, shells, without this process itself.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tool_verdicts import command_line

from prorl_zmq.tools.processes.process_tree import children, descendants
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from sandbox_sides import Side

    from prorl_zmq.tools.execution.client import RemoteBash
    from prorl_zmq.tools.sandbox.sandbox import Sandbox

STARTERS = 8
"""How many are started, or closed, at one time."""
IDLE_S = 2.0
"""For how long their idle CPU time is counted."""
LIMIT_S = 60.0


@dataclass(frozen=True)
class Crowd:
    """What many containers at once came to."""

    count: int
    starts_per_s: float
    each_bytes: float
    servers_bytes: float = 0.0
    """The part of `each_bytes` that execution servers and spawner have."""
    answered: int = 0
    action_s: tuple[float, ...] = ()
    idle: float = 0.0
    """CPU seconds that each uses in a second in which nothing is asked of it."""
    closes_per_s: float = 0.0
    left: tuple[str, ...] = ()
    """Command lines of what ran on after the close."""


async def crowd_of_ours(side: Side, count: int, root: Path) -> Crowd:
    """Have many sandboxes at once, each with a live bash, and ask each of them something."""
    sandboxes = Sandboxes(side.kind, root)
    made: list[Sandbox] = []
    shells: list[RemoteBash] = []

    async def start(number: int) -> None:
        sandbox = await sandboxes.create(f"crowd-{number}", side.spec)
        made.append(sandbox)
        shells.append(await sandbox.bash())

    first = await sandboxes.create("first", side.spec)  # now the spawner runs
    await first.close()
    try:
        starts_s = await few_at_once(start, count)
        action_s = []
        answers = []
        for number, bash in enumerate(shells):
            started = time.perf_counter()
            answers.append((await bash.run(f"echo $(({number} + 1))", LIMIT_S)).output == f"{number + 1}\n")
            action_s.append(time.perf_counter() - started)
        (spawner,) = (pid for pid in children(os.getpid()) if b"execution.spawner" in command_line(pid))
        each = pss_bytes(descendants(os.getpid())) / count
        servers = pss_bytes([spawner, *children(spawner)]) / count
        before = cpu_s(descendants(os.getpid()))
        await asyncio.sleep(IDLE_S)
        idle = (cpu_s(descendants(os.getpid())) - before) / IDLE_S / count
        together = await asyncio.gather(*(bash.run("echo on", LIMIT_S) for bash in shells))
        answers = [alone and result.output == "on\n" for alone, result in zip(answers, together, strict=True)]
    finally:
        closes_s = await few_at_once(lambda number: made[number].close(), len(made))
        sandboxes.close()
    left = await living_below()
    left += await asyncio.to_thread(os.listdir, root)
    return Crowd(
        count,
        count / starts_s,
        each,
        servers,
        answered=sum(answers),
        action_s=tuple(action_s),
        idle=idle,
        closes_per_s=count / closes_s,
        left=tuple(left),
    )


async def bare_crowd(side: Side, count: int) -> Crowd:
    """Have many bare containers at once."""
    command = [*side.bare, "sh", "-c", "echo ready; exec sleep 3600"]
    async with AsyncExitStack() as stack:

        async def start(_: int) -> None:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            stack.push_async_callback(lambda: asyncio.wait_for(process.wait(), LIMIT_S))
            stack.callback(process.terminate)
            assert process.stdout is not None
            assert await asyncio.wait_for(process.stdout.readline(), LIMIT_S) == b"ready\n"

        starts_s = await few_at_once(start, count)
        each = pss_bytes(descendants(os.getpid())) / count
    return Crowd(count, count / starts_s, each)


async def few_at_once(work: Callable[[int], Awaitable[None]], count: int) -> float:
    """Do something so many times, `STARTERS` at a time; give the seconds that all took."""
    places = asyncio.Semaphore(STARTERS)

    async def one(number: int) -> None:
        async with places:
            await work(number)

    started = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(count)))
    return time.perf_counter() - started


def pss_bytes(pids: Sequence[int]) -> int:
    """Give the proportional memory of processes; one that has just ended has none."""
    total = 0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    return total


def cpu_s(pids: Sequence[int]) -> float:
    """Give the CPU seconds that processes have had."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
    return total / 1e9


async def living_below(limit_s: float = 10.0) -> list[str]:
    """Give the command lines of all processes below this one, once they have had time to go."""
    until = time.monotonic() + limit_s
    while living := [words for pid in descendants(os.getpid()) if (words := command_line(pid))]:
        if time.monotonic() > until:
            break
        await asyncio.sleep(0.05)
    return [words.replace(b"\0", b" ").decode("utf-8", "replace") for words in living]
