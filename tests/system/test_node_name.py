"""Names of nodes: equal for one run folder, different for two."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import msgspec
import pytest

from prorl_zmq.system import node_name
from prorl_zmq.system.node_name import default_node, loopback_id, place_of
from prorl_zmq.wire.messages.base import Identifier, ShortText

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "RAY_NODE_ID", "POD_UID"):
        monkeypatch.delenv(name, raising=False)


def test_two_run_folders_have_two_names(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    assert default_node(one) == default_node(one) != default_node(other)
    assert place_of(one) == place_of(one) != place_of(other)
    assert default_node(one).startswith(f"{socket.gethostname()[:40]}-")


def test_an_allocation_is_in_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = socket.gethostname()[:40]
    monkeypatch.setenv("POD_UID", "0123456789abcdef")
    assert default_node(tmp_path) == f"{host}-0123456789ab"
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert default_node(tmp_path) == f"{host}-77"
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert default_node(tmp_path) == f"{host}-77_3"


def test_any_host_and_folder_make_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "-würzburg host." + 80 * "x")
    deep = tmp_path / ("y" * 200)
    deep.mkdir()
    msgspec.convert(default_node(deep), Identifier)
    msgspec.convert(place_of(deep), ShortText)


def test_a_network_namespace_has_a_loopback_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = loopback_id()
    assert here == loopback_id()
    monkeypatch.setattr(node_name, "NETWORK", tmp_path)
    assert loopback_id() != here
