"""The conversations of `gateway.py`: a harness's requests, turn by turn, and the clients that send them.

Each request holds the whole history, as in chat completions: tools and a system message, a task, and then for each turn
the policy's reply, unchanged, and a tool's output. The messages are encoded to JSON beforehand; only the reply's calls
are parsed, for their ids. The text is words that the embedded tokenizer has pieces for: about five characters a token,
as with a real model. All conversations of a round are open from its start to its end, `at_once` calls of them under
way.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import msgspec
import numpy as np

from prorl_zmq.inference.tokenizer import WORD_PIECES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from numpy.typing import NDArray

TURNS = 5
SYSTEM_CHARS, TASK_CHARS, OUTPUT_CHARS = 6_000, 2_000, 5_000
TOOLS, TOOL_CHARS = 8, 1_200
SAID = "I look at the files first, and then I run the tests again to see what is still wrong with them."
COMMAND = "cd repository && git diff --stat && python -m pytest -q tests/test_module.py 2>&1 | tail -n 40"
"""What the policy says in each turn, and the call that ends it: as many tokens as a short turn of a real one."""
LIMIT_S = 120.0
WORDS = np.array([piece.strip() for piece in WORD_PIECES if piece.startswith(" ")])


class Call(NamedTuple):
    """One call of the model."""

    seconds: float
    prompt_tokens: int
    """As the reply tells."""


Calls = list[list[Call]]
"""By conversation and turn."""


class _CallId(msgspec.Struct):
    id: str


class _Message(msgspec.Struct):
    tool_calls: list[_CallId]


class _Choice(msgspec.Struct):
    message: msgspec.Raw


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Whole(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage


@dataclass
class Conversation:
    """One conversation, as far as it has come."""

    number: int
    messages: list[bytes]
    outputs: list[str]
    """Of the tool, by turn."""
    history: list[bytes] = field(default_factory=list)

    def body(self, *, stream: bool) -> bytes:
        """Return the next request."""
        options = b'"stream":true,"stream_options":{"include_usage":true},' if stream else b""
        messages = b",".join([*self.messages, *self.history])
        return b'{"model":"policy","temperature":1.0,%b"tools":%b,"messages":[%b]}' % (options, _TOOLS, messages)

    def go_on(self, message: bytes, turn: int) -> None:
        """Take a reply, and have its calls answered by the tool."""
        calls = msgspec.json.decode(message, type=_Message).tool_calls
        assert calls, message
        self.history.append(message)
        for call in calls:
            answer = {"role": "tool", "tool_call_id": call.id, "content": self.outputs[turn]}
            self.history.append(msgspec.json.encode(answer))


def conversations(count: int) -> list[Conversation]:
    """Return conversations at their start, the same each time."""
    made = []
    for number in range(count):
        draw = np.random.default_rng(number)
        opening = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": text(draw, TASK_CHARS)}]
        outputs = [text(draw, OUTPUT_CHARS) for _ in range(TURNS)]
        made.append(Conversation(number, [msgspec.json.encode(message) for message in opening], outputs))
    return made


def text(draw: np.random.Generator, chars: int) -> str:
    """Return words, in lines, with about so many characters."""
    words = draw.choice(WORDS, chars // 5).tolist()
    return "\n".join(" ".join(words[start : start + 12]) for start in range(0, len(words), 12))


async def run(made: Sequence[Conversation], at_once: int, ask: Callable[[Conversation, int], Awaitable[Call]]) -> Calls:
    """Take all conversations to their end."""
    places = asyncio.Semaphore(at_once)

    async def one(conversation: Conversation) -> list[Call]:
        calls = []
        for turn in range(TURNS):
            async with places:
                calls.append(await ask(conversation, turn))
        return calls

    async with asyncio.timeout(LIMIT_S):
        return await asyncio.gather(*(one(conversation) for conversation in made))


class HttpClient:
    """Sends calls of conversations to URLs, each over a connection that stays open.

    Args:
        urls: by conversation.
        prompt_tokens: that a scripted upstream is to answer with, by conversation and turn.
        stream: whether replies are streamed.
    """

    def __init__(self, urls: Sequence[str], prompt_tokens: NDArray[np.int64] | None = None, *, stream: bool) -> None:
        self._urls = urls
        self._prompt_tokens = prompt_tokens
        self._stream = stream
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        headers = {"Content-Type": "application/json", "Authorization": "Bearer none"}
        self.session = aiohttp.ClientSession(connector=connector, headers=headers)

    async def ask(self, conversation: Conversation, turn: int) -> Call:
        """Send the next request of a conversation, and continue with the reply."""
        headers = {}
        if self._prompt_tokens is not None:
            headers["x-prompt-tokens"] = str(self._prompt_tokens[conversation.number, turn])
        body = conversation.body(stream=self._stream)
        url = f"{self._urls[conversation.number]}/chat/completions"
        started = time.perf_counter()
        async with self.session.post(url, data=body, headers=headers) as response:
            content = await response.read()
        seconds = time.perf_counter() - started
        assert response.status == 200, content
        message, usage = _streamed(content) if self._stream else _whole(content)
        conversation.go_on(message, turn)
        return Call(seconds, usage.prompt_tokens)


def _whole(content: bytes) -> tuple[bytes, _Usage]:
    reply = msgspec.json.decode(content, type=_Whole)
    return bytes(reply.choices[0].message), reply.usage


def _streamed(content: bytes) -> tuple[bytes, _Usage]:
    """Put the events of a reply together."""
    assert content.endswith(b"data: [DONE]\n\n"), content[-200:]
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    usage = None
    for event in content.split(b"\n\n")[:-2]:
        chunk = msgspec.json.decode(event.removeprefix(b"data: "))
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            message["content"] += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", ()):
                message["tool_calls"].append({name: call[name] for name in ("id", "type", "function")})
    return msgspec.json.encode(message), msgspec.convert(usage, _Usage)


def _tool(number: int) -> dict[str, Any]:
    draw = np.random.default_rng(1_000_000 + number)
    names = [f"{WORDS[number + place]}_{place}" for place in range(4)]
    fields = {name: {"type": "string", "description": text(draw, TOOL_CHARS // 6)} for name in names}
    schema = {"type": "object", "properties": fields, "required": names[:2], "additionalProperties": False}
    function = {"name": "bash" if not number else f"tool_{number}", "description": text(draw, TOOL_CHARS // 3)}
    return {"type": "function", "function": {**function, "parameters": schema}}


_SYSTEM = text(np.random.default_rng(0), SYSTEM_CHARS)
_TOOLS = msgspec.json.encode([_tool(number) for number in range(TOOLS)])
