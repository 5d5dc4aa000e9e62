"""Parses turns of the policy with vLLM's parsers of tool calls and reasoning, on a server of `vllm launch render`.

    POST /v1/chat/completions/derender    the ids of a prompt and a turn → the message that vLLM would have answered

If the server fails, is slow, has no parser or returns an unreadable answer, parsing the turn fails; there is no
fallback. A turn that the server rejects, although it parses a plain one, is refused. A call that vLLM's parser cannot
parse is text, as in vLLM. Not supported: a key for the server, and its streamed form.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import EngineFailed
from ..chat import ReadTurn
from ..tool_calls.call import MalformedCall, ToolCall
from .answers import decoded
from .connections import Connections

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..chat import ChatFormat

PATH = "/v1/chat/completions/derender"
_CALLERS_FAULT = frozenset({400, 413, 422})
READ_S = 60.0
"""Longest parse of a turn in seconds, including the time that the server is busy."""


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    function: _Function


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] = []


class _Choice(msgspec.Struct):
    message: _Message


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class TurnParser:
    """Parses turns; made and used on a running loop, and closed by its owner.

    Args:
        url: of the server.
        chat: of the policy; it knows which ids end a turn.
        limit: most turns at one time.
        read_s: limit of one turn, in seconds.
    """

    def __init__(self, url: str, chat: ChatFormat, *, limit: int, read_s: float = READ_S) -> None:
        self._connections = Connections(url, limit=limit, retry_s=read_s)
        self._chat = chat
        self._read_s = read_s
        self._has_parser = False

    async def read_turn(
        self, prompt: NDArray[np.int32], generated: NDArray[np.int32], tools: Sequence[dict[str, Any]]
    ) -> ReadTurn:
        """Parse a turn, int32 [G], as the engine generated it after a prompt, int32 [P].

        Raises:
            EngineFailed: the server did not parse it (field `parser`); with `refused`, the turn or the tools are wrong,
                and the server is healthy.
        """
        try:
            return await self._read(prompt, generated, tools)
        except EngineFailed as error:
            error.fields["parser"] = True  # no backend is to blame
            raise

    async def _read(
        self, prompt: NDArray[np.int32], generated: NDArray[np.int32], tools: Sequence[dict[str, Any]]
    ) -> ReadTurn:
        ended = len(generated) > 0 and int(generated[-1]) in self._chat.stop_token_ids
        ended_by = self._chat.decode(generated[-1:]) if ended else ""
        said = generated[:-1] if ended else generated  # vLLM omits the end token before its parsers
        if not len(said):  # which the server rejects
            return ReadTurn(None, "", "", (), ended, ended_by)
        try:
            async with asyncio.timeout(self._read_s):
                await self._check_has_parser()
                answer = await self._ask(prompt, said, tools)
        except TimeoutError:
            problem = f"the parser server {self._connections.url} did not read a turn within {self._read_s:g} s"
            raise EngineFailed(problem, unreachable=True) from None
        if len(answer.choices) != 1:
            raise EngineFailed(
                f"the parser server {self._connections.url} gave {len(answer.choices)} readings of a turn"
            )
        message = answer.choices[0].message
        text = message.content or ""
        return ReadTurn(message.reasoning, text, text, tuple(map(_call, message.tool_calls)), ended, ended_by)

    async def close(self) -> None:
        await self._connections.close()

    async def _check_has_parser(self) -> None:
        """Check once that the server has a parser: a server with one rejects a turn without its request."""
        if self._has_parser:
            return
        body = msgspec.json.encode({"generate_response": {"choices": [{"index": 0, "token_ids": [0]}]}})
        answer = await self._connections.generate(PATH, body)
        if answer.status == 200:
            raise EngineFailed(
                f"the server {self._connections.url} has no parser and would read all as text: start it with vllm "
                "launch render MODEL --enable-auto-tool-choice --tool-call-parser NAME --reasoning-parser NAME"
            )
        self._has_parser = answer.status == 400

    async def _ask(
        self, prompt: NDArray[np.int32], said: NDArray[np.int32], tools: Sequence[dict[str, Any]]
    ) -> _Answer:
        body = _asking(prompt, said, tools)
        answer = await self._connections.generate(PATH, body)
        if answer.status == 200:
            return decoded(answer.body, _Answer)
        # A program chooses the tools, and the policy its text: neither may cause a failure of the service.
        wrong = answer.status in _CALLERS_FAULT
        if not wrong and answer.status >= 500:
            plain = _asking(prompt[:1], said[:1], ())
            wrong = plain != body and (await self._connections.generate(PATH, plain)).status == 200
        message = f"the parser server {self._connections.url} did not read a turn: {answer.excerpt()}"
        raise EngineFailed(message, refused=wrong)


def _asking(prompt: NDArray[np.int32], said: NDArray[np.int32], tools: Sequence[dict[str, Any]]) -> bytes:
    generation = {"choices": [{"index": 0, "token_ids": said.tolist()}], "prompt_token_ids": prompt.tolist()}
    request: dict[str, Any] = {"messages": [{"role": "user", "content": ""}]}  # its parsers look at tools only
    if tools:
        request["tools"] = tools
    return msgspec.json.encode({"generate_response": generation, "chat_request": request})


def _call(call: _Call) -> ToolCall | MalformedCall:
    name, arguments = call.function.name, call.function.arguments
    try:
        return ToolCall(name, msgspec.json.decode(arguments, type=dict[str, Any]))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        return MalformedCall(f"The arguments of {name} could not be read: {error}", name, arguments)
