"""Anthropic's Messages, as Claude Code uses it.

A user's message holds texts and answers of tools; each answer becomes a message, as do the texts between them. Thinking
blocks are sent only if the request enables thinking: other clients expect text in the first block. Arguments that are
not a JSON object are streamed unchanged, and Claude Code reports them to the policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from ...data.trajectory import Role
from ..calls import ModelRequest, Problem, RequestCall
from ..dialect import Route
from .common import (
    arguments_object,
    arguments_text,
    converted,
    error_text,
    function_tool,
    invalid,
    kind_of,
    may_call,
    named_event,
    sampling_of,
    signature,
    status_of,
    texts,
    token_limit,
)
from .history import History

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..calls import CallRefused, ModelReply, RequestMessage

_BILLING: Final = "x-anthropic-billing-header:"
"""A line of the system prompt for Anthropic's accounts: other in sub-agents and after compaction, so left out."""


class _Block(msgspec.Struct):
    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    is_error: bool | None = None
    content: str | list[_Block] | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class _Thinking(msgspec.Struct):
    type: str = "disabled"


class _Body(msgspec.Struct):
    messages: list[_Message]
    system: str | list[_Block] | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    model: str | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    thinking: _Thinking | None = None


def _messages(asked: _Body) -> tuple[RequestMessage, ...]:
    """Return the conversation.

    Raises:
        CallRefused: a message has an unknown role.
    """
    history = History()
    system = (
        [asked.system] if isinstance(asked.system, str) else [_text(block, history) for block in asked.system or ()]
    )
    if any(kept := [text for text in system if not text.startswith(_BILLING)]):
        history.say(Role.SYSTEM, "\n".join(kept))
    for index, message in enumerate(asked.messages):
        content = [_Block("text", message.content)] if isinstance(message.content, str) else message.content
        match message.role:
            case "assistant":
                _read_assistant(history, content)
            case "user":
                _read_user(history, content)
            case "system":
                history.say(Role.SYSTEM, "\n".join(_text(block, history) for block in content))
            case role:
                raise invalid(f"messages[{index}] has the role {role!r}; known are user, assistant and system")
    return history.messages


def _read_assistant(history: History, content: list[_Block]) -> None:
    text, reasoning = "", ""
    calls: list[RequestCall] = []
    ids: list[str | None] = []
    for block in content:
        match block.type:
            case "thinking":
                reasoning += block.thinking or ""
                ids.append(block.signature)
            case "redacted_thinking":
                ids.append(block.data)
            case "tool_use":
                calls.append(RequestCall(block.id or "", block.name or "", arguments_text(block.input)))
            case _:
                text += _text(block, history)
    history.assistant(text, reasoning, calls, ids)


def _read_user(history: History, content: list[_Block]) -> None:
    """Read answers of tools, each a message, and the texts between and after them."""
    said: list[str] = []
    for block in content:
        if block.type != "tool_result":
            said.append(_text(block, history))
            continue
        if said:
            history.say(Role.USER, "\n".join(said))
            said = []
        answer = block.content
        if isinstance(answer, list):
            answer = "\n".join(_text(part, history) for part in answer)
        answer = error_text(answer or "") if block.is_error else answer or ""
        history.answer(block.tool_use_id or "", answer)
    if said or not content:
        history.say(Role.USER, "\n".join(said))


def _text(block: _Block, history: History) -> str:
    if block.type == "tool_reference":
        return block.tool_name or ""
    return block.text or "" if block.type == "text" else history.placeholder(block.type)


_SAMPLING: Final = {name: name for name in ("temperature", "top_p", "top_k")}
_STOP_REASONS: Final = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_ERRORS: Final = {
    Problem.TOO_LARGE: "request_too_large",
    Problem.BUSY: "rate_limit_error",
    Problem.FAILED: "overloaded_error",
    Problem.NOT_ALLOWED: "authentication_error",
    Problem.NOT_FOUND: "not_found_error",
    Problem.INTERNAL: "api_error",
}
_OVERLOADED: Final = 529
_FORBIDDEN: Final = 403


class Messages:
    """Implements `Dialect`."""

    routes: tuple[Route, ...] = (
        Route("POST", "/messages", "create"),
        Route("POST", "/messages/count_tokens", "count", "input_tokens"),
    )

    def read(self, body: dict[str, Any], headers: Mapping[str, str]) -> ModelRequest:
        asked = converted(body, _Body)
        return ModelRequest(
            messages=_messages(asked),
            tools=tuple(
                function_tool(tool.name, tool.description, tool.input_schema)
                for tool in asked.tools or ()
                if tool.name and tool.input_schema is not None  # others are Anthropic's own
            ),
            may_call=may_call(kind_of(asked.tool_choice), "tool_choice"),
            model=asked.model or "",
            max_tokens=token_limit(asked.max_tokens),
            stop=texts(asked.stop_sequences),
            stream=bool(asked.stream),
            sampling=sampling_of(body, _SAMPLING),
            headers=headers,
            extra=asked.thinking is not None and asked.thinking.type != "disabled",
        )

    def write(self, request: ModelRequest, reply: ModelReply, model: str) -> dict[str, Any]:
        calls = [_call(call.call_id, call.name, arguments_object(call.arguments)) for call in reply.calls]
        return _message(reply.turn_id, model, _usage(reply)) | {
            "content": [*_said(request, reply), *calls],
            **_stop(reply),
        }

    def stream(self, request: ModelRequest, model: str) -> _Events:
        return _Events(request, model)

    def error(self, error: CallRefused, refusal_status: int) -> tuple[int, dict[str, Any]]:
        status = _OVERLOADED if error.problem == Problem.FAILED else status_of(error, refusal_status)
        return status, _error(error, status)


class _Events:
    """Implements `EventStream`."""

    def __init__(self, request: ModelRequest, model: str) -> None:
        self._request = request
        self._model = model

    def begin(self, turn_id: str, prompt_tokens: int) -> bytes:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0} | _NO_CACHE
        return named_event({"type": "message_start", "message": _message(turn_id, self._model, usage)})

    def waiting(self) -> bytes:
        return named_event({"type": "ping"})

    def end(self, reply: ModelReply) -> bytes:
        blocks = [(block, [_delta(block)]) for block in _said(self._request, reply)]
        if blocks and blocks[0][0]["type"] == "thinking":
            blocks[0][1].append({"type": "signature_delta", "signature": signature(reply.turn_id)})
        for call in reply.calls:
            delta = {"type": "input_json_delta", "partial_json": call.arguments}
            blocks.append((_call(call.call_id, call.name, {}), [delta]))
        events: list[dict[str, Any]] = []
        for index, (block, deltas) in enumerate(blocks):
            start = {name: "" if name in {"text", "thinking", "signature"} else block[name] for name in block}
            events.append({"type": "content_block_start", "index": index, "content_block": start})
            events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
            events.append({"type": "content_block_stop", "index": index})
        events += [{"type": "message_delta", "delta": _stop(reply), "usage": _usage(reply)}, {"type": "message_stop"}]
        return b"".join(map(named_event, events))

    def fail(self, error: CallRefused, refusal_status: int) -> bytes:
        return named_event(_error(error, refusal_status))


_NO_CACHE: Final = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _message(turn_id: str, model: str, usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"msg_{turn_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _stop(reply: ModelReply) -> dict[str, Any]:
    """Return why a reply ended."""
    if reply.finish_reason == "stop" and reply.stopped_by:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stopped_by}
    return {"stop_reason": _STOP_REASONS[reply.finish_reason], "stop_sequence": None}


def _usage(reply: ModelReply) -> dict[str, Any]:
    """Return the tokens of a call; this API counts what was cached apart."""
    usage = reply.usage
    return _NO_CACHE | {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.generated,
    }


def _said(request: ModelRequest, reply: ModelReply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if request.extra:  # without reasoning too: a reply in text alone has no other place that names the turn
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": signature(reply.turn_id)})
    if reply.text:
        blocks.append({"type": "text", "text": reply.text})
    return blocks


def _delta(block: dict[str, Any]) -> dict[str, Any]:
    kind = block["type"]
    return {"type": f"{kind}_delta", kind: block[kind]}


def _call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _error(error: CallRefused, status: int) -> dict[str, Any]:
    kind = _ERRORS.get(error.problem, "permission_error" if status == _FORBIDDEN else "invalid_request_error")
    message = error.message
    if error.problem == Problem.CONTEXT_LENGTH:  # Claude Code looks for these words
        message = f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}
