"""A `Model` that answers what a test says, and a server in front of it."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import numpy as np

from prorl_zmq.model_proxy.calls import ModelReply, ReplyCall, Usage, new_turn_id
from prorl_zmq.model_proxy.server import ModelServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_zmq.model_proxy.calls import FinishReason, ModelRequest

PROMPT_IDS = np.arange(100, 111, dtype=np.int32)
TOKEN_IDS = np.arange(7, 14, dtype=np.int32)
USAGE = Usage(prompt=11, cached=4, generated=7, reasoning=2)


def turn(
    text: str = "",
    *calls: tuple[str, str],
    reasoning: str = "",
    finish_reason: FinishReason | None = None,
) -> ModelReply:
    turn_id = new_turn_id()
    return ModelReply(
        turn_id=turn_id,
        text=text,
        reasoning=reasoning,
        calls=tuple(ReplyCall(f"call_{turn_id}_{i}", name, arguments) for i, (name, arguments) in enumerate(calls)),
        finish_reason=finish_reason or ("tool_calls" if calls else "stop"),
        usage=USAGE,
        prompt_token_ids=PROMPT_IDS,
        token_ids=TOKEN_IDS,
        logprobs=np.full(len(TOKEN_IDS), -0.5, np.float32),
    )


class ScriptedModel:
    """Answers with replies or errors, in order. Its gates are open, unless a test shuts them."""

    name = "policy"
    refusal_status = 400

    def __init__(self, *script: ModelReply | Exception) -> None:
        self.script = list(script)
        self.requests: list[ModelRequest] = []
        self.delivered: list[bool] = []
        self.closed = asyncio.Event()
        self.may_open = asyncio.Event()
        self.may_open.set()
        self.may_reply = asyncio.Event()
        self.may_reply.set()
        self.opening = asyncio.Event()
        self.replying = asyncio.Event()
        self.given_up = asyncio.Event()
        self.charged: list[int] = []

    def charge(self, cost: int) -> None:
        self.charged.append(cost)

    async def open(self, request: ModelRequest) -> _Call:
        self.requests.append(request)
        self.opening.set()
        try:
            await self.may_open.wait()
        except asyncio.CancelledError:
            self.given_up.set()
            raise
        if not isinstance(self.script[0], ModelReply) and self.may_reply.is_set():
            raise self.script.pop(0)
        return _Call(self)

    async def count_tokens(self, request: ModelRequest) -> int:
        self.requests.append(request)
        return len(PROMPT_IDS)


class _Call:
    def __init__(self, model: ScriptedModel) -> None:
        self._model = model
        said = model.script[0]
        self.turn_id = said.turn_id if isinstance(said, ModelReply) else new_turn_id()
        self.prompt_tokens = USAGE.prompt

    async def reply(self) -> ModelReply:
        self._model.replying.set()
        await self._model.may_reply.wait()
        said = self._model.script.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    def close(self, *, delivered: bool) -> None:
        self._model.delivered.append(delivered)
        self._model.closed.set()


@asynccontextmanager
async def served(model: ScriptedModel, *, keep_alive_s: float = 15.0) -> AsyncIterator[str]:
    """Serve a model; yields the URL without a slash at its end."""
    server = ModelServer(model, keep_alive_s=keep_alive_s)
    sock = socket.create_server(("127.0.0.1", 0))
    await server.start(sock)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        await server.close(timeout_s=1)
