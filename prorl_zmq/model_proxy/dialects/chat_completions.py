"""OpenAI's chat completions.

With `return_token_ids` and `logprobs`, a reply has the exact tokens in vLLM's form, from which Harbor reads what
Terminus sampled. This API has no place for the turn id of a reply that is only text.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from ...data.trajectory import Role
from ..calls import ModelRequest, RequestCall, new_turn_id
from ..dialect import Route
from .common import (
    DONE,
    Content,
    arguments_text,
    converted,
    error_object,
    event,
    invalid,
    kind_of,
    may_call,
    one_choice,
    sampling_of,
    status_of,
    text_of,
    texts,
    token_limit,
)
from .history import ROLES, History

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..calls import CallRefused, ModelReply, Usage

_SAMPLING: Final = {
    name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")
}


class _Function(msgspec.Struct):
    name: str
    arguments: Any = None


class _OfferedFunction(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: Content = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    messages: list[_Message]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None


class _Asked(NamedTuple):
    """What else a reply should have."""

    usage: bool
    logprobs: bool
    token_ids: bool


class ChatCompletions:
    """Implements `Dialect`."""

    routes: tuple[Route, ...] = (Route("POST", "/chat/completions", "create"),)

    def read(self, body: dict[str, Any], headers: Mapping[str, str]) -> ModelRequest:
        asked = converted(body, _Body)
        one_choice(asked.n, "n")
        options = asked.stream_options or _StreamOptions()
        return ModelRequest(
            messages=_messages(asked.messages),
            tools=tuple(tool for index, tool in enumerate(asked.tools or ()) if _is_function(tool, f"tools[{index}]")),
            may_call=may_call(kind_of(asked.tool_choice), "tool_choice"),
            model=asked.model or "",
            max_tokens=token_limit(asked.max_completion_tokens, asked.max_tokens),
            stop=texts(asked.stop),
            stream=bool(asked.stream),
            sampling=sampling_of(body, _SAMPLING),
            headers=headers,
            extra=_Asked(bool(options.include_usage), bool(asked.logprobs), bool(asked.return_token_ids)),
        )

    def write(self, request: ModelRequest, reply: ModelReply, model: str) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": reply.text if reply.text or not reply.calls else None,
        }
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = _calls(reply)
        choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason, **_tokens(request, reply)}
        return {
            "id": f"chatcmpl-{reply.turn_id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [choice],
            "usage": _usage(reply.usage),
            **_prompt(request, reply),
        }

    def stream(self, request: ModelRequest, model: str) -> _Chunks:
        return _Chunks(request, model)

    def error(self, error: CallRefused, refusal_status: int) -> tuple[int, dict[str, Any]]:
        return status_of(error, refusal_status), {"error": error_object(error)}


class _Chunks:
    """Implements `EventStream`."""

    def __init__(self, request: ModelRequest, model: str) -> None:
        self._request = request
        self._model = model
        self._id = ""
        self._created = int(time.time())

    def begin(self, turn_id: str, prompt_tokens: int) -> bytes:  # noqa: ARG002 - usage has no place here
        self._id = self._id or f"chatcmpl-{turn_id}"
        return self._delta({"role": "assistant", "content": ""})

    def waiting(self) -> bytes:
        self._id = self._id or f"chatcmpl-{new_turn_id()}"  # of no turn: clients do not send it back
        return self._delta({})

    def end(self, reply: ModelReply) -> bytes:
        deltas: list[dict[str, Any]] = []
        if reply.reasoning:
            deltas.append({"reasoning_content": reply.reasoning})
        if reply.text:
            deltas.append({"content": reply.text})
        deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(_calls(reply))]
        last = {"index": 0, "delta": {}, "finish_reason": reply.finish_reason, **_tokens(self._request, reply)}
        chunks = [self._delta(delta) for delta in deltas]
        chunks.append(event(self._chunk([last]) | _prompt(self._request, reply)))
        if self._request.extra.usage:
            chunks.append(event(self._chunk([]) | {"usage": _usage(reply.usage)}))
        return b"".join([*chunks, DONE])

    def fail(self, error: CallRefused, refusal_status: int) -> bytes:  # noqa: ARG002 - a stream has no status
        return event({"error": error_object(error)})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event(self._chunk([{"index": 0, "delta": delta, "finish_reason": None}]))

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        return chunk | {"usage": None} if self._request.extra.usage else chunk


def _messages(messages: list[_Message]) -> tuple[Any, ...]:
    history = History()
    for index, message in enumerate(messages):
        role = ROLES.get(message.role)
        if role is None:
            raise invalid(f"messages[{index}] has the role {message.role!r}; known are {', '.join(ROLES)}")
        if role == Role.ASSISTANT:
            history.assistant(
                text_of(message.content, history.placeholder, ""),
                message.reasoning_content or message.reasoning or "",
                [
                    RequestCall(call.id or "", call.function.name, arguments_text(call.function.arguments))
                    for call in message.tool_calls or ()
                ],
            )
        elif role == Role.TOOL:
            history.answer(
                message.tool_call_id or "", text_of(message.content, history.placeholder), message.name or ""
            )
        else:
            history.say(role, text_of(message.content, history.placeholder))
    return history.messages


def _is_function(tool: dict[str, Any], where: str) -> bool:
    """Return whether a tool is a function, which is offered as it is.

    Raises:
        CallRefused: it is one that no template and no parser could take.
    """
    if not isinstance(tool.get("function"), dict):
        return False
    try:
        function = msgspec.convert(tool["function"], _OfferedFunction)
    except msgspec.ValidationError as error:
        raise invalid(f"{where}.function is not of this API's form: {error}") from None
    if not function.name:
        raise invalid(f"{where}.function has no name")
    return True


def _calls(reply: ModelReply) -> list[dict[str, Any]]:
    return [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.calls
    ]


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def _prompt(request: ModelRequest, reply: ModelReply) -> dict[str, Any]:
    return {"prompt_token_ids": reply.prompt_token_ids.tolist()} if request.extra.token_ids else {}


def _tokens(request: ModelRequest, reply: ModelReply) -> dict[str, Any]:
    """Return what a choice has of tokens, in vLLM's form."""
    tokens: dict[str, Any] = {"logprobs": None}
    token_ids = reply.token_ids.tolist()
    if request.extra.logprobs:
        content = [_logprob(*each) for each in zip(token_ids, reply.logprobs.tolist(), strict=True)]
        tokens["logprobs"] = {"content": [{**one, "top_logprobs": []} for one in content]}
    if request.extra.logprobs and reply.top_ids is not None and reply.top_logprobs is not None:
        rows = zip(reply.top_ids.tolist(), reply.top_logprobs.tolist(), strict=True)
        for one, (ids, logprobs) in zip(tokens["logprobs"]["content"], rows, strict=True):
            one["top_logprobs"] = [_logprob(*each) for each in zip(ids, logprobs, strict=True) if each[0] >= 0]
    if request.extra.token_ids:
        tokens["token_ids"] = token_ids
    return tokens


def _logprob(token: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}
