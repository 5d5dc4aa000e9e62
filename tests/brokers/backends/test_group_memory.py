from __future__ import annotations

from typing import TYPE_CHECKING

from prorl_zmq.brokers.backends import group_memory
from prorl_zmq.brokers.backends.group_memory import SPREAD_LIMIT, GroupMemory

if TYPE_CHECKING:
    import pytest


def test_the_earliest_backend_comes_first_and_each_once() -> None:
    memory = GroupMemory()
    for backend_id in ("x", "y", "x"):
        memory.add("g", backend_id)
    assert memory.backends("g") == ("x", "y")
    memory.forget("g", "x")
    memory.add("g", "x")
    assert memory.backends("g") == ("y", "x")
    assert memory.backends("unheard-of") == ()


def test_the_group_that_was_used_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_memory, "GROUP_LIMIT", 2)
    memory = GroupMemory()
    for group in ("a", "b", "a", "c"):
        memory.add(group, "x")
    assert len(memory) == 2
    assert [memory.backends(group) for group in "abc"] == [("x",), (), ("x",)]


def test_a_group_is_remembered_on_so_many_backends_and_no_more() -> None:
    memory = GroupMemory()
    for number in range(2 * SPREAD_LIMIT):
        memory.add("g", f"x{number}")
    assert memory.backends("g") == tuple(f"x{number}" for number in range(SPREAD_LIMIT))
