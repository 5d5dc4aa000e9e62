"""Small things about processes."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from prorl_zmq.system.processes import listens_at_tcp

LISTENER = """
import socket, sys
server = socket.socket({family})
server.bind(({host!r}, 0))
print(flush=True); sys.stdin.readline()
server.listen()
print(flush=True); sys.stdin.readline()
"""


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_process_that_listens(family: socket.AddressFamily, host: str) -> None:
    command = [sys.executable, "-c", LISTENER.format(family=int(family), host=host)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        ready = process.stdout.readline()
        if not ready and family == socket.AF_INET6:
            pytest.skip("this machine has no IPv6 on its loopback")
        assert ready
        assert not listens_at_tcp(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        assert listens_at_tcp(process.pid)
    assert not listens_at_tcp(process.pid)
