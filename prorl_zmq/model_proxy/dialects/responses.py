"""OpenAI's Responses, as Codex and the Agents SDK use it, without state between requests.

Features that need such state (such as `previous_response_id`) are refused. The WebSocket form is answered with 426, and
Codex then continues over HTTP. In a stream each item is sent whole, when the turn is complete.

Tools become plain functions: those of a `namespace` get its name as prefix, and `custom` tools, which take free text,
have one argument. Tools that OpenAI would run itself (such as `web_search`) are not offered.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from ...data.trajectory import Role
from ..calls import ModelRequest, RequestCall, new_turn_id
from ..dialect import Route
from .common import (
    Content,
    Part,
    arguments_object,
    arguments_text,
    converted,
    error_object,
    function_tool,
    invalid,
    json_text,
    kind_of,
    may_call,
    named_event,
    sampling_of,
    signature,
    status_of,
    text_of,
    token_limit,
)
from .history import ROLES, History

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ..calls import CallRefused, ModelReply, RequestMessage

_FREE_TEXT: Final = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class Tool(msgspec.Struct):
    """A tool as a request has it."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: Any = None
    tools: list[Tool] | None = None


class ToolName(NamedTuple):
    """What the API calls a tool."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True)
class ToolNames:
    """The functions that a request's tools became."""

    functions: tuple[dict[str, Any], ...] = ()
    names: dict[str, ToolName] = field(default_factory=dict)
    """By the function's name."""

    def called(self, function: str) -> ToolName:
        """Return what a call of the policy is a call of; a name that was not offered goes out as it is."""
        return self.names.get(function) or ToolName(function)

    def function(self, name: str, namespace: str | None) -> str:
        """Return what the policy knows a tool as, whether or not this request offers it."""
        offered = (known for known, tool in self.names.items() if (tool.name, tool.namespace) == (name, namespace))
        return next(offered, _flat(name, namespace))


def tool_names(tools: Sequence[Tool]) -> ToolNames:
    """Make functions of tools, each with a name of its own."""
    functions, names = [], {}
    flat: list[tuple[Tool, str | None]] = [(tool, None) for tool in tools if tool.type != "namespace"]
    flat += [(tool, space.name) for space in tools if space.type == "namespace" for tool in space.tools or ()]
    for tool, namespace in flat:
        if tool.type not in {"function", "custom"} or not tool.name:
            continue
        custom = tool.type == "custom"
        name = _flat(tool.name, namespace)
        while name in names:
            name += "_"
        names[name] = ToolName(tool.name, namespace, custom)
        functions.append(function_tool(name, tool.description, _FREE_TEXT if custom else tool.parameters))
    return ToolNames(tuple(functions), names)


def free_text(arguments: str) -> str:
    """Return what a call of a custom tool gives it; text that is not the function's argument goes in whole."""
    given = arguments_object(arguments).get("input")
    return given if isinstance(given, str) else arguments


def _flat(name: str, namespace: str | None) -> str:
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


_Object = dict[str, Any]

_EMPTY: Final[dict[str, _Object]] = {
    "reasoning": {"summary": []},
    "message": {"content": []},
    "function_call": {"arguments": ""},
    "custom_tool_call": {"input": ""},
}
"""What each kind of item has, before its first piece."""


class _Events:
    """Implements `EventStream`."""

    def __init__(self, request: ModelRequest, model: str) -> None:
        self._request = request
        self._model = model
        self._response: _Object | None = None
        self._number = 0

    def begin(self, turn_id: str, prompt_tokens: int) -> bytes:  # noqa: ARG002 - usage is null until the end
        return self._created(f"resp_{turn_id}") + self._event("response.in_progress", response=self._response)

    def waiting(self) -> bytes:
        created = self._created(f"resp_{new_turn_id()}")  # of no turn: clients do not send it back
        return created + self._event("response.in_progress", response=self._response)

    def end(self, reply: ModelReply) -> bytes:
        response = (self._response or {}) | _finished(self._request.extra, reply)
        items = [self._event(kind, **data) for kind, data in _item_events(response["output"])]
        return b"".join([*items, self._event(f"response.{response['status']}", response=response)])

    def fail(self, error: CallRefused, refusal_status: int) -> bytes:  # noqa: ARG002 - a stream has no status
        created = self._created(f"resp_{new_turn_id()}")
        told = error_object(error)
        failed = {"status": "failed", "error": {"code": told["code"], "message": told["message"]}}
        return created + self._event("response.failed", response=(self._response or {}) | failed)

    def _created(self, response_id: str) -> bytes:
        """Return the event that all others must follow, once; the id that it tells is that of the response."""
        if self._response is not None:
            return b""
        self._response = _response_object(response_id, self._model)
        return self._event("response.created", response=self._response)

    def _event(self, kind: str, **data: Any) -> bytes:
        self._number += 1
        return named_event({"type": kind, "sequence_number": self._number - 1, **data})


def _item_events(items: list[_Object]) -> Iterator[tuple[str, _Object]]:
    for index, item in enumerate(items):
        kind = item["type"]
        place = {"item_id": item["id"], "output_index": index}
        added = item | _EMPTY[kind] | {"status": "in_progress"}
        yield "response.output_item.added", {"output_index": index, "item": added}
        if kind == "reasoning":
            yield from _part_events("reasoning_summary_part", "reasoning_summary_text", item["summary"][0], place)
        elif kind == "message":
            yield from _part_events("content_part", "output_text", item["content"][0], place)
        elif kind == "custom_tool_call":
            yield "response.custom_tool_call_input.delta", {**place, "delta": item["input"]}
            yield "response.custom_tool_call_input.done", {**place, "input": item["input"]}
        else:
            yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
            yield "response.function_call_arguments.done", {**place, "arguments": item["arguments"]}
        yield "response.output_item.done", {"output_index": index, "item": item}


def _part_events(part_kind: str, text_kind: str, part: _Object, item_place: _Object) -> Iterator[tuple[str, _Object]]:
    place = {**item_place, "summary_index" if part["type"] == "summary_text" else "content_index": 0}
    more: _Object = {"logprobs": []} if part["type"] == "output_text" else {}
    yield f"response.{part_kind}.added", {**place, "part": part | {"text": ""}}
    yield f"response.{text_kind}.delta", {**place, "delta": part["text"], **more}
    yield f"response.{text_kind}.done", {**place, "text": part["text"], **more}
    yield f"response.{part_kind}.done", {**place, "part": part}


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
        return _response_object(f"resp_{reply.turn_id}", model) | _finished(request.extra, reply)

    def stream(self, request: ModelRequest, model: str) -> _Events:
        return _Events(request, model)

    def error(self, error: CallRefused, refusal_status: int) -> tuple[int, dict[str, Any]]:
        return status_of(error, refusal_status), {"error": error_object(error)}


def _response_object(response_id: str, model: str) -> dict[str, Any]:
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


def _finished(names: ToolNames, reply: ModelReply) -> dict[str, Any]:
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
