"""The address where an HTTP server listens: HOST:PORT."""

from __future__ import annotations

import re

from ..errors import ConfigError

_PORT = re.compile("[0-9]{1,5}")


def http_address(bind: str, prefix: str = "", key: str = "bind") -> tuple[str, int]:
    """Return the host and port where an HTTP server listens.

    Raises:
        ConfigError: `bind` is not HOST:PORT; the message begins with `prefix`, which says where `bind` is from.
    """
    host, _, port = bind.rpartition(":")
    if not host or not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        raise ConfigError(f"{prefix}{bind!r} is not HOST:PORT, such as 127.0.0.1:8080 (ports: 1 to 65535)", key=key)
    return host, int(port)
