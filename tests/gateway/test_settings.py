"""What a gateway is told: how it may be reached from other machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl_zmq.config import GatewaySettings
from prorl_zmq.errors import ConfigError
from prorl_zmq.gateway.settings import GatewayOptions
from prorl_zmq.security.keys import KeyFolder
from prorl_zmq.wire.messages.base import KeyRole


def options(bind: str, **more: object) -> GatewayOptions:
    return GatewayOptions(front_door="ipc:///run/x", settings=GatewaySettings(bind), run_dir=Path("/run"), **more)  # type: ignore[arg-type]


def test_loopback_needs_neither_keys_nor_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRORL_KEYS", raising=False)
    for bind in ("127.0.0.1:80", "localhost:80", "[::1]:80"):
        assert options(bind).tls() is None
        assert options(bind).bearers().sender("").role is None


def test_beyond_loopback_both_are_needed_or_a_word_that_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PRORL_KEYS", raising=False)
    with pytest.raises(ConfigError, match="--insecure"):
        options("10.0.0.1:80").tls()
    with pytest.raises(ConfigError, match="prorl keys bearer"):
        options("10.0.0.1:80").bearers()
    assert options("10.0.0.1:80", insecure=True).tls() is None
    assert options("10.0.0.1:80", insecure=True).bearers().sender("").role is None
    token = KeyFolder(tmp_path / "keys").new_bearer("alice", KeyRole.TRAINER)
    let_in = options("10.0.0.1:80", keys=tmp_path / "keys", insecure=True).bearers()
    assert let_in.sender(token).name == "alice"


def test_gateways_have_names_of_their_own() -> None:
    names = {options(bind).own_name for bind in ("127.0.0.1:80", "127.0.0.1:81", "[::1]:80")}
    assert len(names) == 3
    assert options("127.0.0.1:80", name="west").own_name == "west"
