from __future__ import annotations

import pytest
from msgspec.structs import replace

from prorl_zmq.wire.messages.nodes import NodeFacts

FACTS = NodeFacts(
    host="h",
    sandboxes=100,
    memory_free_bytes=500,
    memory_total_bytes=1000,
    disk_free_bytes=90_000,
    disk_total_bytes=100_000,
)


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({}, False),
        ({"memory_free_bytes": 549}, False),
        ({"memory_free_bytes": 551}, True),
        ({"disk_free_bytes": 84_000}, True),
        ({"memory_total_bytes": 1001}, True),
        ({"images": ("a",)}, True),
        ({"sandboxes": 105}, False),
        ({"sandboxes": 94}, True),
    ],
)
def test_a_few_bytes_more_or_less_are_no_news(change: dict[str, object], differs: bool) -> None:
    assert replace(FACTS, **change).differs(FACTS) is differs
