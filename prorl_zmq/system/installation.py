"""Say how to install this package with an extra. No package index has it, so from a clone or a wheel."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """Return the command for a message; `docs/installation.md` says what PATH may be."""
    return f"pip install 'PATH[{extra}]', where PATH is a clone of prorl_zmq or its wheel"
