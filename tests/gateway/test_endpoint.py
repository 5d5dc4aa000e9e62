from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from prorl_zmq.errors import MalformedMessage
from prorl_zmq.gateway import endpoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Asked:
    """The part of a request that has a body."""

    client_max_size = 2**20

    def __init__(self, body: bytes) -> None:
        self.content = self
        self.body = body

    async def iter_any(self) -> AsyncIterator[bytes]:
        yield self.body


@pytest.mark.parametrize(("size", "aside"), [(100, False), (endpoint.ASIDE_BYTES, True)])
def test_a_large_body_is_decoded_aside(size: int, aside: bool) -> None:
    def decode(_data: bytes) -> bool:
        return threading.current_thread() is not threading.main_thread()

    request: Any = Asked(b"x" * size)
    assert asyncio.run(endpoint.decoded_body(request, decode)) == aside


def test_a_body_of_too_many_values_is_never_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "VALUES_LIMIT", 9)
    monkeypatch.setattr(endpoint, "ASIDE_BYTES", 0)
    decoded: list[bytes] = []
    request: Any = Asked(b"[1,2,3,4,5,6,7,8,9,10]")
    with pytest.raises(MalformedMessage, match="more than 9 values"):
        asyncio.run(endpoint.decoded_body(request, decoded.append))
    assert decoded == []
