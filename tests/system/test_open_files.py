"""`wait_for_descriptors`: it counts what can be opened, wherever the free numbers are."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMIT = 64
CODE = """
import asyncio, logging, os, resource, sys
from prorl_zmq.system.open_files import wait_for_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
logging.basicConfig(format="%(message)s", stream=sys.stdout)
with asyncio.Runner() as runner:
    runner.get_loop()
    opened = []
    try:
        while len(opened) < {limit} - {reserve}:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    for descriptor in {closed}:
        os.close(descriptor)
    for count in (15, 16):
        print(count)
        runner.run(wait_for_descriptors(count, 0.01))
"""
WAITED = "no 16 descriptors are free: waiting for some; raise the limit (ulimit -n)"


@pytest.mark.parametrize(
    ("reserve", "closed", "waits"),
    [
        pytest.param(0, "opened[:15]", True, id="low"),
        pytest.param(0, "opened[-15:]", True, id="high"),
        pytest.param(0, "opened[:8] + opened[-8:]", False, id="both"),
        pytest.param(0, "opened[5:21]", False, id="middle"),
        pytest.param(40, "[]", False, id="never near the limit"),
    ],
)
def test_free_numbers_count_wherever_they_are(reserve: int, closed: str, waits: bool) -> None:
    code = CODE.format(limit=LIMIT, reserve=reserve, closed=closed)
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["15", "16", *([WAITED] if waits else [])]
