"""No socket of the tree is bound but through a `ZapAuthenticator`, or connected but through a keyring."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
THE_WAY = {
    "bind": {"prorl_zmq/security/zap_authenticator.py"},
    "connect": {"prorl_zmq/security/keyring.py", "prorl_zmq/security/handshake.py"},
}
"""Who imports these functions of `sockets`: the modules that see to keys and listeners."""


def importers(name: str) -> set[str]:
    found = set()
    for package in ("prorl_zmq", "brokers", "stages", "tools"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(text)) if "sockets" in text else ():
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[-1] == "sockets":
                    found |= {str(path.relative_to(ROOT)) for alias in node.names if alias.name == name}
    return found


def test_sockets_are_bound_by_authenticators_and_connected_with_keyrings() -> None:
    assert {name: importers(name) for name in THE_WAY} == THE_WAY


def test_nobody_makes_sockets_of_their_own() -> None:
    own = {
        str(path.relative_to(ROOT))
        for package in ("prorl_zmq", "brokers", "stages")
        for path in (ROOT / package).rglob("*.py")
        if "context.socket(" in path.read_text(encoding="utf-8")
    }
    assert own == {"prorl_zmq/wire/sockets.py", "prorl_zmq/security/zap_authenticator.py"}
