"""The memory of a process is that of its children too."""

from __future__ import annotations

import subprocess
import sys

from prorl_zmq.system.used_memory import used_memory

MANY_BYTES = 200 * 2**20


def test_the_memory_of_a_child_counts_while_it_lives() -> None:
    alone = used_memory()
    assert alone > 2**20
    holding = f"import sys; held = bytearray(b'x') * {MANY_BYTES}; print(flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", holding], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        assert used_memory() > alone + MANY_BYTES // 2
    assert used_memory() < alone + MANY_BYTES // 2
