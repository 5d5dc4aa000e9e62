"""A program's calls of a rollout's model over HTTP, in all APIs, without a sandbox: only the engine is scripted."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np

from prorl_zmq.data.trajectory import Role
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.inference.engine import Generation
from prorl_zmq.model_proxy.server import ModelServer
from prorl_zmq.stages.episode import Episode, JobPolicy
from prorl_zmq.stages.harness.harness_model import HarnessModel
from prorl_zmq.stages.turn_sampler import cut_at
from prorl_zmq.wire.messages.engines import VersionSpan
from prorl_zmq.wire.messages.jobs import EpisodeLimits, Job, Sampling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from numpy.typing import NDArray

    from prorl_zmq.inference.chat import ChatFormat

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
GEMINI = "/v1beta/models/m:generateContent"
APIS = (CHAT, RESPONSES, MESSAGES, GEMINI)
BASH: dict[str, Any] = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOLS: dict[str, list[dict[str, Any]]] = {
    CHAT: [{"type": "function", "function": {"name": "bash", "parameters": BASH}}],
    RESPONSES: [{"type": "function", "name": "bash", "parameters": BASH}],
    MESSAGES: [{"name": "bash", "input_schema": BASH}],
    GEMINI: [{"functionDeclarations": [{"name": "bash", "parametersJsonSchema": BASH}]}],
}


class Talk:
    """One rollout's model, and a client of it.

    Args:
        chat: of the policy.
        encode: returns the ids of a turn that the policy says, with the token that ends it.
        turns: what it says, in order, and the last for ever.
    """

    def __init__(
        self,
        chat: ChatFormat,
        encode: Callable[[str], NDArray[np.int32]],
        turns: Sequence[str],
        *,
        sampling: Sampling | None = None,
        limits: EpisodeLimits | None = None,
        prompt: str = "",
    ) -> None:
        self.episode = Episode()
        self.prompts: list[str] = []
        """What the policy saw before each turn, as text."""
        sampling, limits = sampling or Sampling(max_tokens=512), limits or EpisodeLimits(max_turns=32)
        job = Job(task="t", instance={}, sampling=sampling, episode=limits)
        policy = JobPolicy(self._generate, chat, 0, job, self.episode)
        self.model = HarnessModel(policy, [ChatMessage(Role.USER, prompt)])
        self._chat = chat
        self._encode = encode
        self._turns = list(turns)

    async def _generate(
        self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int]
    ) -> Generation:
        del stop_token_ids
        await asyncio.sleep(0)
        self.prompts.append(self._chat.decode(token_ids))
        ids = self._encode(self._turns.pop(0) if len(self._turns) > 1 else self._turns[0])
        reason = "length" if len(ids) > sampling.max_tokens else "stop"
        ids = ids[: sampling.max_tokens]
        generation = Generation(ids, -np.ones(len(ids), np.float32), (VersionSpan(1, 0, len(ids)),), reason)
        return cut_at(generation, sampling.stop, self._chat.decode)

    def run(self, talk: Callable[[Client], Coroutine[Any, Any, None]]) -> Episode:
        """Have a program talk to the model; return the episode as it was written at the end."""

        async def main() -> None:
            async with self.served() as client:
                await talk(client)
            await self.model.finish()

        asyncio.run(main())
        return self.episode

    @asynccontextmanager
    async def served(self, **options: Any) -> AsyncIterator[Client]:
        """Serve the model, and yield a client."""
        server = ModelServer(self.model, **options)
        sock = socket.create_server(("127.0.0.1", 0))
        await server.start(sock)
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{sock.getsockname()[1]}") as session:
                yield Client(session)
        finally:
            await server.close(timeout_s=1)


class Client:
    """Asks the model."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON of an answer, which must be 200."""
        status, data = await self.asked(path, body)
        assert status == 200, data
        return data

    async def asked(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the status and the JSON of an answer."""
        async with self.session.post(path, json=body) as response:
            return response.status, await response.json()


def asking(path: str, said: str, **more: Any) -> dict[str, Any]:
    """A request of one message of the user."""
    body: dict[str, Any]
    if path == GEMINI:
        body = {"contents": [{"role": "user", "parts": [{"text": said}]}]}
    else:
        body = {"input" if path == RESPONSES else "messages": [{"role": "user", "content": said}]}
    return body | ({"max_tokens": 512} if path == MESSAGES else {}) | more


def sent_back(path: str, body: dict[str, Any], answer: dict[str, Any], *more: dict[str, Any]) -> dict[str, Any]:
    """The next request: what was answered, as it came, and what follows it."""
    if path == CHAT:
        return body | {"messages": [*body["messages"], answer["choices"][0]["message"], *more]}
    if path == RESPONSES:
        return body | {"input": [*body["input"], *answer["output"], *more]}
    if path == MESSAGES:
        return body | {"messages": [*body["messages"], {"role": "assistant", "content": answer["content"]}, *more]}
    return body | {"contents": [*body["contents"], answer["candidates"][0]["content"], *more]}


def call_ids(path: str, answer: dict[str, Any]) -> list[str]:
    """The ids of the calls of an answer."""
    if path == CHAT:
        return [call["id"] for call in answer["choices"][0]["message"].get("tool_calls", [])]
    if path == RESPONSES:
        return [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
    if path == MESSAGES:
        return [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
    parts = answer["candidates"][0]["content"]["parts"]
    return [part["functionCall"]["id"] for part in parts if "functionCall" in part]


def text_of(path: str, answer: dict[str, Any]) -> str:
    """The text of an answer."""
    if path == CHAT:
        return answer["choices"][0]["message"]["content"] or ""
    if path == RESPONSES:
        texts = [item["content"][0]["text"] for item in answer["output"] if item["type"] == "message"]
    elif path == MESSAGES:
        texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
    else:
        texts = [part.get("text", "") for part in answer["candidates"][0]["content"]["parts"]]
    return "".join(texts)


def tool_answers(path: str, *answers: tuple[str, str]) -> list[dict[str, Any]]:
    """What tells the model of tools' answers, each with the id of its call, in this order."""
    if path == CHAT:
        return [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in answers]
    if path == RESPONSES:
        return [{"type": "function_call_output", "call_id": call_id, "output": text} for call_id, text in answers]
    if path == MESSAGES:
        blocks = [{"type": "tool_result", "tool_use_id": call_id, "content": text} for call_id, text in answers]
        return [{"role": "user", "content": blocks}]
    parts = [
        {"functionResponse": {"id": call_id, "name": "bash", "response": {"output": text}}} for call_id, text in answers
    ]
    return [{"role": "user", "parts": parts}]
