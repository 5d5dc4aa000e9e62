r"""`EndpointChat`: a chat model behind an HTTP endpoint, as a `ChatFormat` and a `Generator`.

What holds a conversation as token ids holds this one too: its ids are bytes, one JSON line per message.

    {"tools": […]}\n{"role": "user", "content": "Hello"}\n   → POST …/v1/chat/completions
    {"role": "assistant", "content": "Hi."}\n                ← the turn

`generate` reads the whole conversation from the prompt, so this object has no state. The ids have no log-probs and
belong to no vocabulary: they must not become part of a trajectory.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ..data.trajectory import Role
from ..errors import ConfigError, EngineFailed
from ..inference.chat import Piece, Prompt, ReadTurn
from ..inference.engine import Generation
from ..inference.tool_calls.call import MalformedCall, ToolCall
from ..wire.messages.base import endpoint_variables
from ..wire.messages.engines import VersionSpan
from .chat_endpoint import CalledFunction, Completion

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from ..inference.chat import ChatMessage
    from ..wire.messages.engines import FinishReason
    from ..wire.messages.jobs import Sampling
    from .chat_endpoint import ChatEndpoint

_ROLES = {Role.SYSTEM: "system", Role.USER: "user", Role.ASSISTANT: "assistant", Role.TOOL: "tool"}


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line: a message, or the tools."""

    role: str = ""
    content: str = ""
    reasoning: str = ""
    calls: tuple[CalledFunction, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class EndpointChat:
    """Implements `ChatFormat`; `generate` is its `Generator`."""

    endpoint: ChatEndpoint
    name: str
    """The model's name in the service."""
    stop_token_ids: tuple[int, ...] = ()
    warning: str = ""

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        stop_token_ids: Sequence[int],  # noqa: ARG002 - a server ends its turns itself
        rows_known: int = 0,  # noqa: ARG002 - nothing of it is recorded
    ) -> Generation:
        """Have the endpoint continue a conversation.

        Raises:
            EngineFailed: the endpoint failed or is not configured; `model` is its name.
        """
        lines = [msgspec.json.decode(line, type=_Line) for line in _lines(token_ids)]
        try:
            reply = msgspec.json.decode(await self.endpoint.complete(_body(lines, sampling)), type=Completion)
            choice = reply.choices[0]
        except EngineFailed as error:
            error.fields["model"] = self.name
            raise
        except ConfigError as error:
            raise EngineFailed(error.message, model=self.name) from error
        except (msgspec.MsgspecError, UnicodeError, IndexError) as error:
            url = f"{endpoint_variables(self.name)}_URL"
            message = f"the model {self.name} did not answer with a chat completion; check {url}: {error}"
            raise EngineFailed(message, model=self.name) from error
        said = choice.message
        content = said.content or ""
        for stop in sampling.stop:
            content = content.partition(stop)[0]
        turn = _Line(
            "assistant",
            content,
            said.reasoning_content or said.reasoning or "",
            tuple(call.function for call in said.tool_calls or ()),
        )
        ids = _ids(turn)
        logprobs = np.full(len(ids), np.nan, np.float32)
        finish: FinishReason = "length" if choice.finish_reason == "length" else "stop"
        return Generation(ids, logprobs, (VersionSpan(0, 0, len(ids)),), finish)

    def conversation(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> EndpointConversation:
        return EndpointConversation(self, self.opening(messages, tools), tuple(tools))

    def opening(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> tuple[Piece, ...]:
        offered = tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in tools)
        head = [Piece(Role.SYSTEM, _ids(_Line(tools=offered)))] if offered else []
        return (*head, *map(_piece, messages))

    def following(
        self,
        turn: ReadTurn,  # noqa: ARG002 - it ends itself
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]],  # noqa: ARG002 - those of the opening
    ) -> tuple[Piece, ...]:
        return tuple(map(_piece, messages))

    def read_turn(self, generated: NDArray[np.int32], tools: Sequence[dict[str, Any]] = ()) -> ReadTurn:  # noqa: ARG002
        try:
            turn = msgspec.json.decode(_text(generated), type=_Line)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise EngineFailed(f"a turn of the model {self.name} cannot be read: {error}", model=self.name) from error
        calls = tuple(map(_call, turn.calls))
        return ReadTurn(turn.reasoning or None, turn.content, turn.content, calls, ended=True)

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        """Return the text of whole turns; of a part of one, nothing."""
        texts: list[str] = []
        for line in _lines(token_ids):
            try:
                said = msgspec.json.decode(line, type=_Line)
            except msgspec.MsgspecError:
                continue
            texts.append(said.reasoning + said.content)
        return "".join(texts)


class EndpointConversation:
    """Implements `chat.Conversation`."""

    def __init__(self, chat: EndpointChat, opening: Sequence[Piece], tools: Sequence[dict[str, Any]]) -> None:
        self._chat = chat
        self._tools = tools
        self._coming = list(opening)

    def prompt(self) -> Prompt:
        return Prompt(tuple(self._coming))

    def add_turn(self, generated: NDArray[np.int32]) -> ReadTurn:
        self._coming = []
        return self._chat.read_turn(generated, self._tools)

    def add_tool_results(self, results: Sequence[str]) -> None:
        self._coming += [Piece(Role.TOOL, _ids(_Line("tool", result))) for result in results]

    def add_messages(self, messages: Sequence[ChatMessage]) -> None:
        self._coming += map(_piece, messages)


def _body(lines: Sequence[_Line], sampling: Sampling) -> dict[str, Any]:
    tools = [tool for line in lines for tool in line.tools]
    body: dict[str, Any] = {
        "messages": list(_messages(line for line in lines if line.role)),
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
    }
    if tools:
        body["tools"] = tools
    for name, default in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0), ("seed", None), ("stop", ())):
        value = getattr(sampling, name)
        if value != default:
            body[name] = value
    return body


def _messages(lines: Iterator[_Line]) -> Iterator[dict[str, Any]]:
    """Yield messages as the API has them; calls get ids of their own, which their answers name in order."""
    made, unanswered = 0, deque[str]()
    for line in lines:
        message: dict[str, Any] = {"role": line.role, "content": line.content}
        if line.calls:
            ids = [f"call_{made + number}" for number in range(len(line.calls))]
            made, unanswered = made + len(ids), deque(ids)
            calls = zip(ids, line.calls, strict=True)
            message["tool_calls"] = [{"id": one, "type": "function", "function": call} for one, call in calls]
        elif line.role == "tool":
            message["tool_call_id"] = unanswered.popleft() if unanswered else "call"
        yield message


def _piece(message: ChatMessage) -> Piece:
    calls = tuple(CalledFunction(call.name, msgspec.json.encode(call.arguments).decode()) for call in message.calls)
    return Piece(message.role, _ids(_Line(_ROLES[message.role], message.content, message.reasoning or "", calls)))


def _call(call: CalledFunction) -> ToolCall | MalformedCall:
    try:
        arguments = msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError) as error:
        return MalformedCall(f"The arguments of {call.name} must be a JSON object: {error}", call.name, call.arguments)
    return ToolCall(call.name, arguments)


def _ids(line: _Line) -> NDArray[np.int32]:
    return np.frombuffer(msgspec.json.encode(line) + b"\n", np.uint8).astype(np.int32)


def _lines(token_ids: NDArray[np.int32]) -> list[str]:
    # Not splitlines: messages may have other line separators, which JSON leaves as they are.
    return [line for line in _text(token_ids).split("\n") if line]


def _text(token_ids: NDArray[np.int32]) -> str:
    return token_ids.astype(np.uint8).tobytes().decode()
