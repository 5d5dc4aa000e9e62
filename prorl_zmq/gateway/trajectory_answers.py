"""HTTP answers with trajectories: JSON, or one binary block."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..client.requests import Received
    from ..data.trajectory import Trajectory

ASIDE_TOKENS = 16_384
"""More tokens are encoded in a thread."""


async def json_of(trajectories: Sequence[Trajectory], make: Callable[[], object]) -> web.Response:
    """Return the result of `make` as JSON."""

    def written() -> bytes:
        return msgspec.json.encode(make())

    many = sum(len(one.token_ids) for one in trajectories) >= ASIDE_TOKENS
    body = await asyncio.to_thread(written) if many else written()
    return web.Response(body=body, content_type="application/json")


def binary(trajectory: Trajectory, block: Received) -> web.Response:
    """Return a trajectory's block; two headers have the numbers that define its layout."""
    result = trajectory.result
    headers = {"Prorl-Tokens": str(result.tokens), "Prorl-Turns": str(result.turns), "Prorl-Outcome": result.outcome}
    if result.reward is not None:
        headers["Prorl-Reward"] = repr(result.reward)
    body = block if isinstance(block, bytes) else block.bytes
    return web.Response(body=body, headers=headers, content_type="application/octet-stream")
