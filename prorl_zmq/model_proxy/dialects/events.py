"""Server-sent events, and the signature that carries a turn id."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """Return an event without a name."""
    return b"data: %b\n\n" % msgspec.json.encode(data)


def named_event(data: dict[str, Any]) -> bytes:
    """Return an event that is called what its `type` says."""
    return b"event: %b\n%b" % (data["type"].encode(), event(data))


def signature(turn_id: str) -> str:
    """Return what clients keep of a turn without looking into it: base64, or some SDKs refuse it."""
    return f"{turn_id}A"
