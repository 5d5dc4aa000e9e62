"""Anthropic's Messages, as Claude Code uses it.

Thinking blocks are sent only if the request enables thinking: other clients expect text in the first block. Arguments
that are not a JSON object are streamed unchanged, and Claude Code reports them to the policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ..calls import ModelRequest, Problem
from ..dialect import Route
from .errors import status_of
from .events import named_event, signature
from .fields import (
    arguments_object,
    converted,
    function_tool,
    kind_of,
    may_call,
    sampling_of,
    texts,
    token_limit,
)
from .messages_request import MessagesBody, messages_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..calls import CallRefused, ModelReply

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
        """Read a request; see `Dialect`."""
        asked = converted(body, MessagesBody)
        return ModelRequest(
            messages=messages_of(asked),
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
        """Return a whole reply; see `Dialect`."""
        calls = [_call(call.call_id, call.name, arguments_object(call.arguments)) for call in reply.calls]
        return _message(reply.turn_id, model, _usage(reply)) | {
            "content": [*_said(request, reply), *calls],
            **_stop(reply),
        }

    def stream(self, request: ModelRequest, model: str) -> _Events:
        """Return the stream of a reply."""
        return _Events(request, model)

    def error(self, error: CallRefused, refusal_status: int) -> tuple[int, dict[str, Any]]:
        """Return an error; see `Dialect`."""
        status = _OVERLOADED if error.problem == Problem.FAILED else status_of(error, refusal_status)
        return status, _error(error, status)


class _Events:
    """Implements `EventStream`."""

    def __init__(self, request: ModelRequest, model: str) -> None:
        self._request = request
        self._model = model

    def begin(self, turn_id: str, prompt_tokens: int) -> bytes:
        """Return the start of the message."""
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0} | _NO_CACHE
        return named_event({"type": "message_start", "message": _message(turn_id, self._model, usage)})

    def waiting(self) -> bytes:
        """Return a ping, which clients take before the message's start too."""
        return named_event({"type": "ping"})

    def end(self, reply: ModelReply) -> bytes:
        """Return the reply."""
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
        """Return an error."""
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
