"""Parse requests of Gemini's generateContent."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ...data.trajectory import Role
from ..calls import RequestCall
from .fields import arguments_text, error_text, function_tool, invalid, json_text
from .history import ROLES, History

if TYPE_CHECKING:
    from ..calls import RequestMessage

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


class ToolConfig(msgspec.Struct, rename="camel"):
    """What is asked of calls."""

    function_calling_config: _CallingConfig | None = None

    @property
    def choice(self) -> str | None:
        """What the other APIs call the choice of tools."""
        asked = self.function_calling_config
        mode = asked.mode if asked is not None else None
        return mode.lower() if mode and mode != "MODE_UNSPECIFIED" else None


class ThinkingConfig(msgspec.Struct, rename="camel"):
    """What is asked of the reasoning."""

    include_thoughts: bool | None = None


class GenerationConfig(msgspec.Struct, rename="camel"):
    """What is asked of a reply."""

    max_output_tokens: int | None = None
    stop_sequences: list[str] | None = None
    candidate_count: int | None = None
    thinking_config: ThinkingConfig | None = None


class GeminiBody(msgspec.Struct, rename="camel"):
    """A request, in camel case."""

    contents: list[_Content]
    model: str | None = None
    system_instruction: str | _Content | None = None
    tools: list[_Tool] | None = None
    tool_config: ToolConfig | None = None
    generation_config: GenerationConfig | None = None


def in_camel_case(data: Any) -> Any:
    """Return a request with fields named as the API has them: it takes `with_underscores` too, and SDKs mix both."""
    if isinstance(data, list):
        return [in_camel_case(value) for value in data]
    if not isinstance(data, dict):
        return data
    named = {re.sub(r"_([a-z])", lambda found: found[1].upper(), name): value for name, value in data.items()}
    return {name: value if name in _OPAQUE else in_camel_case(value) for name, value in named.items()}


def tools_of(asked: GeminiBody) -> tuple[dict[str, Any], ...]:
    """Return the functions; what Google would run (`googleSearch` and the like) is not offered."""
    return tuple(
        function_tool(
            function.name, function.description, function.parameters_json_schema or _json_schema(function.parameters)
        )
        for tool in asked.tools or ()
        for function in tool.function_declarations or ()
    )


def messages_of(asked: GeminiBody) -> tuple[RequestMessage, ...]:
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
