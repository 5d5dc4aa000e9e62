"""What is read of a machine, and that a file system that hangs holds up nobody."""

from __future__ import annotations

import socket
import threading
import time
from importlib.metadata import version
from typing import TYPE_CHECKING

from prorl_zmq.tools import node_facts
from prorl_zmq.tools.node_facts import NodeFactsReader

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

WAIT_S = 10.0


def test_the_facts_of_this_machine(tmp_path: Path) -> None:
    image = tmp_path / "base.sif"
    image.touch()
    assert NodeFactsReader(tmp_path).read().sandboxes == 0
    for name in ("a.1", "b.1", ".c.1"):  # the last one is just being made
        (tmp_path / "sandboxes" / name).mkdir(parents=True)
    facts = NodeFactsReader(tmp_path, str(image), [tmp_path / "not-there"]).read()
    assert (facts.host, facts.version) == (socket.gethostname(), version("prorl-zmq"))
    assert "base.sif" in facts.images
    assert facts.sandboxes == 2
    assert 0 < facts.memory_free_bytes <= facts.memory_total_bytes
    assert 0 < facts.disk_free_bytes <= facts.disk_total_bytes


def test_they_are_read_again_when_that_is_due_and_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, answers, asked = 1000, threading.Event(), []

    def free_memory() -> tuple[int, int]:
        asked.append(free)
        assert answers.wait(WAIT_S)
        return free, 1000

    monkeypatch.setattr(node_facts, "free_memory", free_memory)
    answers.set()
    reader = NodeFactsReader(tmp_path)
    free = 500
    assert [reader.read().memory_free_bytes for _ in range(10)] == [1000] * 10
    assert asked == [1000]  # it is not due
    monkeypatch.setattr(node_facts, "READ_S", 0.0)
    reader._look()
    free = 250
    answers.clear()
    assert [reader.read().memory_free_bytes for _ in range(10)] == [500] * 10
    answers.set()
    deadline = time.monotonic() + WAIT_S
    while reader.read().memory_free_bytes != 250:
        assert time.monotonic() < deadline
    assert asked[:3] == [1000, 500, 250]
