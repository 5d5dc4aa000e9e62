"""Fixtures of the relay's tests."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.relay_world import CHUNK, World

from prorl_zmq.inference.relay import chunk_server, chunk_source, offered_folder, weights_relay
from prorl_zmq.inference.weights import version_folder

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose sockets have short names."""
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        yield Path(folder)


@pytest.fixture
def world(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    for module in (version_folder, offered_folder, weights_relay):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(chunk_source, "SILENCE_S", 1.0)
    monkeypatch.setattr(chunk_server, "UNKNOWN_S", 0.5)
    world = World(short_path)
    yield world
    world.close()
