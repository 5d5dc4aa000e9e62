"""The action of each strike of bench/chaos.py, and the end of a lasting one."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import time
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from chaos_plan import LAST_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from chaos_pipeline import Pipeline
    from chaos_plan import Strike

VICTIM_S = 10.0
"""How long a strike waits for a process of its kind."""
CROWD = 3000
"""Idle connections: more than the brokers have room for (see `chaos_pipeline.OPEN_FILES`)."""
CHUNK = bytes(2**20)


async def strike_once(pipeline: Pipeline, strike: Strike) -> None:
    """Do what a strike says, and lift it; note when that was. Without a victim, nothing."""
    if strike.kind == "kill":
        with suppress(ProcessLookupError):
            _signal(await _victims(pipeline, strike), signal.SIGKILL)
            strike.began = strike.lifted = time.monotonic()
        return
    with suppress(ProcessLookupError):
        async with await _lasting(pipeline, strike):
            strike.began = time.monotonic()
            await asyncio.sleep(LAST_S)
        strike.lifted = time.monotonic()


async def _lasting(pipeline: Pipeline, strike: Strike) -> AbstractAsyncContextManager[None]:
    match strike.kind:
        case "stop":
            return _stopped(await _victims(pipeline, strike))
        case "starve":
            return _starved((await _victims(pipeline, strike))[0])
        case "crowd":
            return _crowded(pipeline.front_door.removeprefix("ipc://"))
        case "cut":
            return _cut(pipeline, strike.chosen(pipeline.far_nodes))
    return _filled(pipeline)


async def _victims(pipeline: Pipeline, strike: Strike) -> list[int]:
    """Give the process to strike, or all of a node; if the strike before has ended those of its kind, one of the next.

    Raises:
        ProcessLookupError: none came.
    """
    until = time.monotonic() + VICTIM_S
    while True:
        if strike.victim == "node":
            there = [pipeline.on_node(node) for node in pipeline.far_nodes]
        else:
            there = [[process.pid] for process in pipeline.processes() if process.kind == strike.victim]
        if there and (chosen := strike.chosen(there)):
            return chosen
        if time.monotonic() > until:
            raise ProcessLookupError(strike.victim)
        await asyncio.sleep(0.1)


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@asynccontextmanager
async def _stopped(pids: Sequence[int]) -> AsyncIterator[None]:
    _signal(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(pids, signal.SIGCONT)


@asynccontextmanager
async def _starved(pid: int) -> AsyncIterator[None]:
    """Leave a process no descriptor beyond those that it has."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (_open_files(pid), before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@asynccontextmanager
async def _crowded(path: str) -> AsyncIterator[None]:
    with ExitStack() as crowd:
        for number in range(CROWD):
            connection = crowd.enter_context(socket.socket(socket.AF_UNIX))
            connection.setblocking(False)
            with suppress(OSError):  # it is turned away, or the queue is full
                connection.connect(path)
            if number % 50 == 0:
                await asyncio.sleep(0.01)
        yield


@asynccontextmanager
async def _cut(pipeline: Pipeline, node: str) -> AsyncIterator[None]:
    await pipeline.nodes.cut(node)
    try:
        yield
    finally:
        await pipeline.nodes.mend(node)


@asynccontextmanager
async def _filled(pipeline: Pipeline) -> AsyncIterator[None]:
    """Fill the disk with a file that is no sandbox's.

    Raises:
        ProcessLookupError: it is not ours to fill.
    """
    if not pipeline.disk_is_small:
        raise ProcessLookupError("disk")
    full = pipeline.disk / "full"
    try:
        with suppress(OSError), full.open("wb", buffering=0) as file:
            for chunk in _endless(CHUNK):
                file.write(chunk)
        yield
    finally:
        full.unlink()


def _open_files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def _endless(chunk: bytes) -> Iterator[bytes]:
    while True:
        yield chunk
