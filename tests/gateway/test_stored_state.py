from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from prorl_zmq.config import SERVICE_VARIABLE
from prorl_zmq.gateway.stored_state import StoredState

if TYPE_CHECKING:
    from pathlib import Path


def stored(path: Path) -> StoredState:
    state = StoredState(path)
    state.of("alice").is_running = True
    state.of("alice").addresses.append("http://a")
    state.of("bob").addresses += ["http://a", "http://b"]
    state.tokenizer = "/models/x"
    state.write()
    return state


def test_what_was_written_is_known_again(tmp_path: Path) -> None:
    stored(tmp_path / "gateway.json")
    again = StoredState(tmp_path / "gateway.json")
    assert (again.of("alice").is_running, again.of("bob").is_running, again.of("carol").is_running) == (
        True,
        False,
        False,
    )
    assert (again.addresses, again.tokenizer) == ({"http://a", "http://b"}, "/models/x")


def test_that_of_another_life_of_the_service_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SERVICE_VARIABLE, "first")
    stored(tmp_path / "gateway.json")
    assert StoredState(tmp_path / "gateway.json").addresses
    monkeypatch.setenv(SERVICE_VARIABLE, "second")
    assert not StoredState(tmp_path / "gateway.json").addresses


@pytest.mark.parametrize("content", ["", "{", '{"service": 1}'])
def test_a_file_that_cannot_be_read_is_begun_again(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "gateway.json"
    path.write_text(content)
    assert not StoredState(path).addresses
    assert "is begun again" in caplog.text
    stored(path)
    assert StoredState(path).addresses
