"""Google's Gemini generateContent, as Gemini CLI uses it.

Calls have ids; for a client that omits them, names and order identify a call. Reasoning is sent as a thought if the
request includes thoughts. A streamed reply is one chunk behind empty ones.
"""

from __future__ import annotations

import re
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
    event,
    function_tool,
    invalid,
    json_text,
    may_call,
    one_choice,
    sampling_of,
    signature,
    status_of,
    texts,
    token_limit,
)
from .history import ROLES, History

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..calls import CallRefused, ModelReply, RequestMessage, Usage

_OPAQUE: Final = {"args", "response", "parameters", "parametersJsonSchema"}
"""Fields whose values have names that are not the API's."""


class _Call(msgspec.Struct):
    name: str
    id: str | None = None
    args: dict[str, Any] | None = None


class _Answer(msgspec.Struct):
    name: str
    id: str | None = None
    response: Any = None
    parts: list[Any] | None = None


class _Part(msgspec.Struct, rename="camel"):
    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    function_call: _Call | None = None
    function_response: _Answer | None = None
    inline_data: Any = None
    file_data: Any = None


class _Content(msgspec.Struct):
    parts: list[_Part] | None = None
    role: str | None = None


class _Function(msgspec.Struct, rename="camel"):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: Any = None


class _Tool(msgspec.Struct, rename="camel"):
    function_declarations: list[_Function] | None = None


class _CallingConfig(msgspec.Struct, rename="camel"):
    mode: str | None = None


class _ToolConfig(msgspec.Struct, rename="camel"):
    function_calling_config: _CallingConfig | None = None

    @property
    def choice(self) -> str | None:
        """What the other APIs call the choice of tools."""
        asked = self.function_calling_config
        mode = asked.mode if asked is not None else None
        return mode.lower() if mode and mode != "MODE_UNSPECIFIED" else None


class _ThinkingConfig(msgspec.Struct, rename="camel"):
    include_thoughts: bool | None = None


class _GenerationConfig(msgspec.Struct, rename="camel"):
    max_output_tokens: int | None = None
    stop_sequences: list[str] | None = None
    candidate_count: int | None = None
    thinking_config: _ThinkingConfig | None = None


class _Body(msgspec.Struct, rename="camel"):
    contents: list[_Content]
    model: str | None = None
    system_instruction: str | _Content | None = None
    tools: list[_Tool] | None = None
    tool_config: _ToolConfig | None = None
    generation_config: _GenerationConfig | None = None


def _in_camel_case(data: Any) -> Any:
    """Return a request with fields named as the API has them: it takes `with_underscores` too, and SDKs mix both."""
    if isinstance(data, list):
        return [_in_camel_case(value) for value in data]
    if not isinstance(data, dict):
        return data
    named = {re.sub(r"_([a-z])", lambda found: found[1].upper(), name): value for name, value in data.items()}
    return {name: value if name in _OPAQUE else _in_camel_case(value) for name, value in named.items()}


def _tools(asked: _Body) -> tuple[dict[str, Any], ...]:
    """Return the functions; what Google would run (`googleSearch` and the like) is not offered."""
    return tuple(
        function_tool(
            function.name, function.description, function.parameters_json_schema or _json_schema(function.parameters)
        )
        for tool in asked.tools or ()
        for function in tool.function_declarations or ()
    )


def _messages(asked: _Body) -> tuple[RequestMessage, ...]:
    """Return the conversation.

    Raises:
        CallRefused: a content has an unknown role.
    """
    history = History()
    system = asked.system_instruction
    if system:
        parts = system if isinstance(system, str) else _joined(system.parts or [], history)
        history.say(Role.SYSTEM, parts)
    names = _CallNames()
    for index, content in enumerate(asked.contents):
        role = ROLES.get(content.role or "user")
        if role == Role.ASSISTANT:
            _read_model(history, content.parts or [], names)
        elif role in {Role.USER, Role.TOOL}:
            _read_user(history, content.parts or [], names)
        else:
            raise invalid(f"contents[{index}] has the role {content.role!r}; known are user and model")
    return history.messages


class _CallNames:
    """Which answer belongs to which call, where a client leaves ids out."""

    def __init__(self) -> None:
        self._count = 0
        self._unanswered: list[RequestCall] = []

    def call(self, call: _Call) -> RequestCall:
        self._count += 1
        read = RequestCall(call.id or f"call_{self._count}", call.name, arguments_text(call.args))
        self._unanswered.append(read)
        return read

    def answered(self, answer: _Answer) -> str:
        """Return the id of the call that is answered."""
        for call in self._unanswered:
            if answer.id == call.call_id or (not answer.id and answer.name == call.name):
                self._unanswered.remove(call)
                return call.call_id
        return answer.id or ""


def _read_model(history: History, parts: list[_Part], names: _CallNames) -> None:
    text, reasoning = "", ""
    calls = []
    for part in parts:
        if part.function_call:
            calls.append(names.call(part.function_call))
        elif part.thought:
            reasoning += part.text or ""
        else:
            text += _text(part, history)
    history.assistant(text, reasoning, calls, [part.thought_signature for part in parts])


def _read_user(history: History, parts: list[_Part], names: _CallNames) -> None:
    said: list[_Part] = []
    for part in parts:
        answer = part.function_response
        if answer is None:
            said.append(part)
            continue
        if said:
            history.say(Role.USER, _joined(said, history))
            said = []
        text = "\n".join([_answer_text(answer.response), *(history.placeholder("media") for _ in answer.parts or ())])
        history.answer(names.answered(answer), text, answer.name)
    if said or not parts:
        history.say(Role.USER, _joined(said, history))


def _answer_text(response: Any) -> str:
    """Return what a tool answered; its text, where a text is all that there is."""
    values = list(response.values()) if isinstance(response, dict) else [response]
    text = values[0] if len(values) == 1 and isinstance(values[0], str) else json_text(response)
    return error_text(text) if isinstance(response, dict) and [*response] == ["error"] else text


def _joined(parts: list[_Part], history: History) -> str:
    return "\n".join(_text(part, history) for part in parts)


def _text(part: _Part, history: History) -> str:
    if part.inline_data is None and part.file_data is None:
        return part.text or ""
    data = part.inline_data if part.inline_data is not None else part.file_data
    kind = str(data.get("mimeType", "")) if isinstance(data, dict) else ""
    return history.placeholder(kind.partition("/")[0] or "media")


def _json_schema(schema: Any) -> Any:
    """Return an OpenAPI schema, whose types are in capitals, as a JSON schema."""
    if isinstance(schema, list):
        return [_json_schema(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value.lower() if name == "type" and isinstance(value, str) else _json_schema(value)
        for name, value in schema.items()
    }


_SAMPLING: Final = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}
_STATUSES: Final = {
    Problem.BUSY: "RESOURCE_EXHAUSTED",
    Problem.FAILED: "UNAVAILABLE",
    Problem.NOT_ALLOWED: "UNAUTHENTICATED",
    Problem.NOT_FOUND: "NOT_FOUND",
    Problem.INTERNAL: "INTERNAL",
}
_FORBIDDEN: Final = 403


class Gemini:
    """Implements `Dialect`."""

    routes: tuple[Route, ...] = (
        Route("POST", "/models/{model}:generateContent", "create"),
        Route("POST", "/models/{model}:streamGenerateContent", "stream"),
        Route("POST", "/models/{model}:countTokens", "count", "totalTokens"),
    )

    def read(self, body: dict[str, Any], headers: Mapping[str, str]) -> ModelRequest:
        body = _in_camel_case(body)
        body = body.get("generateContentRequest") or body  # countTokens takes either
        asked = converted(body, _Body)
        config = asked.generation_config or _GenerationConfig()
        one_choice(config.candidate_count, "candidateCount")
        thinking = config.thinking_config or _ThinkingConfig()
        return ModelRequest(
            messages=_messages(asked),
            tools=_tools(asked),
            may_call=may_call((asked.tool_config or _ToolConfig()).choice, "functionCallingConfig.mode"),
            model=asked.model or "",
            max_tokens=token_limit(config.max_output_tokens),
            stop=texts(config.stop_sequences),
            sampling=sampling_of(body.get("generationConfig") or {}, _SAMPLING),
            headers=headers,
            extra=bool(thinking.include_thoughts),
        )

    def write(self, request: ModelRequest, reply: ModelReply, model: str) -> dict[str, Any]:
        parts: list[dict[str, Any]] = []
        if reply.text or not reply.calls:
            parts.append({"text": reply.text})
        for call in reply.calls:
            function = {"id": call.call_id, "name": call.name, "args": arguments_object(call.arguments)}
            parts.append({"functionCall": function})
        for part in parts:
            part["thoughtSignature"] = signature(reply.turn_id)
        if reply.reasoning and request.extra:
            parts.insert(0, {"text": reply.reasoning, "thought": True})
        finish_reason = "MAX_TOKENS" if reply.finish_reason == "length" else "STOP"
        return _chunk(reply.turn_id, model, parts, _usage(reply.usage), finish_reason)

    def stream(self, request: ModelRequest, model: str) -> _Chunks:
        return _Chunks(self, request, model)

    def error(self, error: CallRefused, refusal_status: int) -> tuple[int, dict[str, Any]]:
        code = status_of(error, refusal_status)
        status = _STATUSES.get(error.problem, "PERMISSION_DENIED" if code == _FORBIDDEN else "INVALID_ARGUMENT")
        message = error.message
        if error.problem == Problem.CONTEXT_LENGTH:
            message = (
                f"The input token count ({error.tokens}) exceeds the maximum number of tokens allowed ({error.limit})."
            )
        return code, {"error": {"code": code, "message": message, "status": status}}


class _Chunks:
    """Implements `EventStream`: chunks of an empty text, then the whole reply as one."""

    def __init__(self, dialect: Gemini, request: ModelRequest, model: str) -> None:
        self._dialect = dialect
        self._request = request
        self._model = model
        self._waiting = _chunk("", model, [{"text": ""}], {})

    def begin(self, turn_id: str, prompt_tokens: int) -> bytes:
        usage = {"promptTokenCount": prompt_tokens, "totalTokenCount": prompt_tokens}
        self._waiting = _chunk(turn_id, self._model, [{"text": ""}], usage)
        return event(self._waiting)

    def waiting(self) -> bytes:
        return event(self._waiting)

    def end(self, reply: ModelReply) -> bytes:
        return event(self._dialect.write(self._request, reply, self._model))

    def fail(self, error: CallRefused, refusal_status: int) -> bytes:
        return event(self._dialect.error(error, refusal_status)[1])


def _chunk(
    response_id: str, model: str, parts: list[dict[str, Any]], usage: dict[str, Any], finish_reason: str | None = None
) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"parts": parts, "role": "model"}, "index": 0}
    if finish_reason:
        candidate["finishReason"] = finish_reason
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": model, "responseId": response_id}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "promptTokenCount": usage.prompt,
        "cachedContentTokenCount": usage.cached,
        "candidatesTokenCount": usage.generated - usage.reasoning,
        "thoughtsTokenCount": usage.reasoning,
        "totalTokenCount": usage.prompt + usage.generated,
    }
