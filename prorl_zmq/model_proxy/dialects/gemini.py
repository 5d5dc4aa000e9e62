"""Google's Gemini generateContent, as Gemini CLI uses it.

Calls have ids; for a client that omits them, names and order identify a call. Reasoning is sent as a thought if the
request includes thoughts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ..calls import ModelRequest, Problem
from ..dialect import Route
from .errors import status_of
from .events import event, signature
from .fields import arguments_object, converted, may_call, one_choice, sampling_of, texts, token_limit
from .gemini_request import (
    GeminiBody,
    GenerationConfig,
    ThinkingConfig,
    ToolConfig,
    in_camel_case,
    messages_of,
    tools_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..calls import CallRefused, ModelReply, Usage

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
        """Read a request; see `Dialect`."""
        body = in_camel_case(body)
        body = body.get("generateContentRequest") or body  # countTokens takes either
        asked = converted(body, GeminiBody)
        config = asked.generation_config or GenerationConfig()
        one_choice(config.candidate_count, "candidateCount")
        thinking = config.thinking_config or ThinkingConfig()
        return ModelRequest(
            messages=messages_of(asked),
            tools=tools_of(asked),
            may_call=may_call((asked.tool_config or ToolConfig()).choice, "functionCallingConfig.mode"),
            model=asked.model or "",
            max_tokens=token_limit(config.max_output_tokens),
            stop=texts(config.stop_sequences),
            sampling=sampling_of(body.get("generationConfig") or {}, _SAMPLING),
            headers=headers,
            extra=bool(thinking.include_thoughts),
        )

    def write(self, request: ModelRequest, reply: ModelReply, model: str) -> dict[str, Any]:
        """Return a whole reply; see `Dialect`."""
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
        """Return the stream of a reply."""
        return _Chunks(self, request, model)

    def error(self, error: CallRefused, refusal_status: int) -> tuple[int, dict[str, Any]]:
        """Return an error; see `Dialect`."""
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
        """Return the first chunk."""
        usage = {"promptTokenCount": prompt_tokens, "totalTokenCount": prompt_tokens}
        self._waiting = _chunk(turn_id, self._model, [{"text": ""}], usage)
        return event(self._waiting)

    def waiting(self) -> bytes:
        """Return a chunk without text."""
        return event(self._waiting)

    def end(self, reply: ModelReply) -> bytes:
        """Return the reply."""
        return event(self._dialect.write(self._request, reply, self._model))

    def fail(self, error: CallRefused, refusal_status: int) -> bytes:
        """Return an error."""
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
