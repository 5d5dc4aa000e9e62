"""Servers of environments that the operator named, for adapters on the service's own interpreter.

A variable of the environment of RUN names them: `NAME=URL NAME=URL`. So a job cannot have the service call any address.
"""

from __future__ import annotations

import os


def named_server(variable: str, name: str, hint: str = "") -> str:
    """Return a server's URL, with a final slash.

    Args:
        variable: names the servers.
        name: the server's; empty: the only server is meant.
        hint: a name that is used if `name` is empty and the variable has it.

    Raises:
        LookupError: the variable names no such server, or has something else.
    """
    servers = {}
    for each in os.environ.get(variable, "").split():
        server, _, url = each.partition("=")
        if "://" not in url:
            raise LookupError(f"{variable} has {each!r}; write NAME=http://HOST:PORT")
        servers[server] = url
    name = name or (hint if hint in servers else "")
    if not name and len(servers) == 1:
        (name,) = servers
    if name not in servers:
        known = ", ".join(servers) or "none; write NAME=http://HOST:PORT"
        raise LookupError(f"no server {name!r}: {variable} in the environment of the RUN processes names {known}")
    return servers[name].rstrip("/") + "/"
