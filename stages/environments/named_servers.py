"""Servers of environments that the operator named, for adapters on the service's own interpreter.

A variable of the environment of RUN names them: `NAME=URL NAME=URL`. So a job cannot have the service call any address.
"""

from __future__ import annotations

import os


def named_server(variable: str, name: str) -> str:
    """Return a server's URL, with a final slash; without a name, that of the only server.

    Raises:
        LookupError: the variable names no such server.
    """
    servers = dict(each.split("=", 1) for each in os.environ.get(variable, "").split())
    if not name and len(servers) == 1:
        (name,) = servers
    if name not in servers:
        known = ", ".join(servers) or "none"
        raise LookupError(f"no server {name!r}: {variable} in the environment of the RUN processes names {known}")
    return servers[name].rstrip("/") + "/"


def is_named(variable: str, name: str) -> bool:
    """Return whether a variable names a server."""
    return any(each.startswith(f"{name}=") for each in os.environ.get(variable, "").split())
