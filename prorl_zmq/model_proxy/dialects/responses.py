"""OpenAI's Responses, as Codex and the Agents SDK use it, without state between requests.

Features that need such state (such as `previous_response_id`) are refused. The WebSocket form is answered with 426, and
Codex then continues over HTTP. `response_events` has the events of a stream.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ...data.trajectory import Role
from ..calls import ModelRequest, RequestCall
from ..dialect import Route
from .errors import error_object, status_of
from .events import signature
from .fields import (
    Content,
    Part,
    arguments_text,
    converted,
    invalid,
    json_text,
    kind_of,
    may_call,
    sampling_of,
    text_of,
    token_limit,
)
from .history import ROLES, History
from .response_events import ResponseEvents
from .response_tools import Tool, ToolNames, free_text, tool_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..calls import CallRefused, ModelReply, RequestMessage

_SAMPLING: Final = {name: name for name in ("temperature", "top_p")}
_STATE: Final = ("previous_response_id", "conversation", "prompt", "background")
"""Fields that lean on what a server would keep."""


class _Item(msgspec.Struct):
    type: str = "message"
    id: str | None = None
    role: str | None = None
    content: Content = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: str | None = None
    output: Content = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None


class _Body(msgspec.Struct):
    input: str | list[_Item]
    instructions: str | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    model: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None


class Responses:
    """Implements `Dialect`."""

    routes: tuple[Route, ...] = (
        Route("POST", "/responses", "create"),
        Route("POST", "/responses/input_tokens", "count", "input_tokens"),
        Route("GET", "/responses", "websocket"),
    )

    def read(self, body: dict[str, Any], headers: Mapping[str, str]) -> ModelRequest:
        """Read a request; see `Dialect`."""
        for name in _STATE:
            if body.get(name):
                raise invalid(f"{name} is not supported: the proxy keeps no responses; send the whole conversation")
        asked = converted(body, _Body)
        names = tool_names(asked.tools or [])
        return ModelRequest(
            messages=_messages(asked, names),
            tools=names.functions,
            may_call=may_call(kind_of(asked.tool_choice), "tool_choice"),
            model=asked.model or "",
            max_tokens=token_limit(asked.max_output_tokens),
            stream=bool(asked.stream),
            sampling=sampling_of(body, _SAMPLING),
            headers=headers,
            extra=names,
        )

    def write(self, request: ModelRequest, reply: ModelReply, model: str) -> dict[str, Any]:
        """Return a whole reply; see `Dialect`."""
        return response_object(f"resp_{reply.turn_id}", model) | finished(request.extra, reply)

    def stream(self, request: ModelRequest, model: str) -> ResponseEvents:
        """Return the stream of a reply."""
        return ResponseEvents(
            lambda response_id: response_object(response_id, model), lambda reply: finished(request.extra, reply)
        )

    def error(self, error: CallRefused, refusal_status: int) -> tuple[int, dict[str, Any]]:
        """Return an error; see `Dialect`."""
        return status_of(error, refusal_status), {"error": error_object(error)}


def response_object(response_id: str, model: str) -> dict[str, Any]:
    """Return a response of which nothing has been generated."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }


def finished(names: ToolNames, reply: ModelReply) -> dict[str, Any]:
    """Return what a finished response has that one in progress has not."""
    cut = reply.finish_reason == "length"
    usage = reply.usage
    return {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(names, reply),
        "usage": {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.generated,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.generated,
        },
    }


def _items(names: ToolNames, reply: ModelReply) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        summary = [{"type": "summary_text", "text": reply.reasoning}]
        reasoning = {"type": "reasoning", "id": f"rs_{reply.turn_id}", "summary": summary}
        items.append(reasoning | {"encrypted_content": signature(reply.turn_id)})
    if reply.text or not (reply.calls or reply.reasoning):
        text = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        items.append({"type": "message", "id": f"msg_{reply.turn_id}", "role": "assistant", "content": [text]})
    for index, call in enumerate(reply.calls):
        tool = names.called(call.name)
        kind, prefix = ("custom_tool_call", "ctc") if tool.custom else ("function_call", "fc")
        item = {"type": kind, "id": f"{prefix}_{reply.turn_id}_{index}", "call_id": call.call_id, "name": tool.name}
        if tool.namespace:
            item["namespace"] = tool.namespace
        given = {"input": free_text(call.arguments)} if tool.custom else {"arguments": call.arguments}
        items.append(item | given)
    for item in items:
        item["status"] = "completed"
    if reply.finish_reason == "length":
        items[-1]["status"] = "incomplete"
    return items


def _messages(asked: _Body, names: ToolNames) -> tuple[RequestMessage, ...]:
    history = History()
    if asked.instructions:
        history.say(Role.SYSTEM, asked.instructions)
    if isinstance(asked.input, str):
        history.say(Role.USER, asked.input)
    else:
        for index, item in enumerate(asked.input):
            _read_item(history, item, names, f"input[{index}]")
    return history.messages


def _read_item(history: History, item: _Item, names: ToolNames, where: str) -> None:
    match item.type:
        case "message":
            role = ROLES.get(item.role or "")
            if role is None or role == Role.TOOL:
                raise invalid(f"{where} has the role {item.role!r}; known are system, developer, user and assistant")
            if role == Role.ASSISTANT:
                history.assistant(text_of(item.content, history.placeholder, ""), ids=[item.id])
            else:
                history.say(role, text_of(item.content, history.placeholder))
        case "reasoning":
            reasoning = text_of(item.content, history.placeholder) or text_of(item.summary, history.placeholder)
            history.assistant(reasoning=reasoning, ids=[item.id, item.encrypted_content])
        case "function_call" | "custom_tool_call":
            custom = item.type == "custom_tool_call"
            arguments = json_text({"input": item.input or ""}) if custom else arguments_text(item.arguments)
            function = names.function(item.name or "", item.namespace)
            history.assistant(calls=[RequestCall(item.call_id or "", function, arguments)], ids=[item.id])
        case "function_call_output" | "custom_tool_call_output":
            history.answer(item.call_id or "", text_of(item.output, history.placeholder))
        case _:
            raise invalid(f"{where} is of type {item.type!r}, which the policy cannot have made or read; leave it out")
