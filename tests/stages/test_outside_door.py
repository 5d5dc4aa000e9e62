"""Where a stage process listens for programs outside, and that it does so for those only."""

from __future__ import annotations

import subprocess
import sys

import pytest

from prorl_zmq.stages.stage_process import host_beside


@pytest.mark.parametrize(
    ("endpoint", "insecure", "host"),
    [
        ("ipc:///run/prorl/run-1", True, "127.0.0.1"),
        ("tcp://10.0.0.7:41234", True, "10.0.0.7"),
        ("tcp://[fd00::7]:41234", True, "fd00::7"),
        ("tcp://10.0.0.7:41234", False, "127.0.0.1"),
    ],
)
def test_plaintext_goes_beyond_loopback_only_where_that_is_allowed(endpoint: str, *, insecure: bool, host: str) -> None:
    assert host_beside(endpoint, insecure=insecure) == host


def test_a_door_that_nobody_asks_for_is_none() -> None:
    code = "import sys, prorl_zmq.stages.stage_process; print('aiohttp.web' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
