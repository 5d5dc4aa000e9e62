"""How to install this package with an extra: from a clone or a wheel, since no package index has it."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """Return the command for a message; `docs/installation.md` explains PATH."""
    return f"pip install 'PATH[{extra}]', where PATH is a clone of prorl_zmq or its wheel"
