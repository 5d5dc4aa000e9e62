"""Looking for processes, and signalling those that are ours."""

from __future__ import annotations

import subprocess
import sys
import time

from prorl_zmq.tools.processes.process_tree import children, descendants, kill


def test_only_what_is_below_is_signalled() -> None:
    process = subprocess.Popen(["sleep", "60"])
    others = "import os; from prorl_zmq.tools.processes.process_tree import kill; "
    others += f"kill({process.pid}, os.getppid(), 2**22 - 1)"
    subprocess.check_call([sys.executable, "-P", "-c", others])
    assert process.poll() is None
    kill(process.pid)
    assert process.wait() == -9


def test_no_more_are_looked_for_than_asked() -> None:
    tree = subprocess.Popen(["bash", "-c", "for i in {1..20}; do (sleep 60; true) & done; wait"])
    try:
        while len(descendants(tree.pid)) < 40:
            time.sleep(0.01)
        assert len(children(tree.pid)) == 20
        assert children(tree.pid, 7) == descendants(tree.pid, 7) == children(tree.pid)[:7]
        assert descendants(tree.pid, 25) == descendants(tree.pid)[:25]
    finally:
        kill(*descendants(tree.pid), tree.pid)
        tree.wait()
