"""Ports of this machine for what a test starts."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a port of the loopback address that nothing is bound to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
