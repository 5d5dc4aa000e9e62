"""What a child in a session of its own is like."""

from __future__ import annotations

import os
import subprocess
from functools import partial

import pytest

from prorl_zmq.system.processes import AUTOGROUP, begin_session

LEAST_PRIORITY = 19
"""A higher value is this one."""


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel has no CONFIG_SCHED_AUTOGROUP")
@pytest.mark.parametrize("nice", [0, 7])
def test_a_session_gives_way_as_its_process_does(nice: int) -> None:
    said = subprocess.check_output(
        ["sh", "-c", "nice; cat /proc/self/autogroup"],
        start_new_session=True,
        preexec_fn=partial(begin_session, os.getpid(), nice),
        text=True,
    )
    own, group = said.splitlines()
    assert int(own) == min(os.nice(0) + nice, LEAST_PRIORITY)
    assert group.endswith(f" nice {own}")
