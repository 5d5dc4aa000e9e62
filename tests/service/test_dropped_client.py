"""A client that nobody closed costs its trainer nothing: once the garbage collector waited for its sockets for ever."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_zmq.testing import LocalService

SETUP = """
import asyncio, gc, sys, threading, time
from prorl_zmq import AsyncRolloutClient, ProrlError, RolloutClient

endpoint = sys.argv[1]

def finish():
    gc.collect()
    until = time.monotonic() + 5
    while threading.active_count() > 1 and time.monotonic() < until:
        time.sleep(0.02)
    print(threading.active_count())
"""
BLOCKING = """
def use():
    client = RolloutClient(endpoint, timeout_s=0.5)
    client.itself = client  # only the collector finds it
    try:
        client.status()
        client.open_batch(1, 1)
    except ProrlError:
        pass

for _ in range(3):
    use()
    gc.collect()
finish()
"""
ASYNCIO = """
async def use():
    client = AsyncRolloutClient(endpoint, timeout_s=0.5)
    client.itself = client
    try:
        await client.status()
        await client.open_batch(1, 1)
    except ProrlError:
        pass

async def main():
    for _ in range(2):
        await use()
        gc.collect()
        await asyncio.sleep(0)
    await use()

asyncio.run(main())
finish()
"""


@pytest.mark.parametrize("script", [BLOCKING, ASYNCIO], ids=["blocking", "asyncio"])
@pytest.mark.parametrize("served", [True, False], ids=["with a service", "without one"])
def test_a_dropped_client_is_closed_by_the_collector(
    script: str, served: bool, shared_service: LocalService, tmp_path: Path
) -> None:
    endpoint = shared_service.front_door if served else "ipc://nobody"
    done = subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", "-c", SETUP + script, endpoint],
        cwd=tmp_path,
        timeout=30,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert done.stderr.count(f"a client of {endpoint} was not closed: use `with`, or call `close`") == 3
    assert "Traceback" not in done.stderr
