"""What the dialects share: reading of contents, sampling and tools, errors, and server-sent events.

Requests are read with `msgspec.convert`: unknown fields are ignored, and errors name the field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from ..calls import CallRefused, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_STATUSES: Final = {
    Problem.INVALID: 400,
    Problem.TOO_LARGE: 413,
    Problem.CONTEXT_LENGTH: 400,
    Problem.BUSY: 429,
    Problem.FAILED: 503,
    Problem.NOT_ALLOWED: 401,
    Problem.NOT_FOUND: 404,
    Problem.INTERNAL: 500,
}
"""Without `OVER`, whose status the harness decides."""

_CODES: Final = {
    Problem.INVALID: ("invalid_request_error", "invalid_prompt"),
    Problem.TOO_LARGE: ("invalid_request_error", "request_too_large"),
    Problem.CONTEXT_LENGTH: ("invalid_request_error", "context_length_exceeded"),
    Problem.OVER: ("invalid_request_error", "invalid_prompt"),  # the code in a stream that Codex does not try again at
    Problem.BUSY: ("rate_limit_error", "rate_limit_exceeded"),
    Problem.FAILED: ("server_error", "server_error"),
    Problem.NOT_ALLOWED: ("invalid_request_error", "invalid_api_key"),
    Problem.NOT_FOUND: ("invalid_request_error", "not_found"),
    Problem.INTERNAL: ("server_error", "server_error"),
}


def status_of(error: CallRefused, refusal_status: int) -> int:
    """Return the HTTP status of a refused call."""
    return _STATUSES.get(error.problem, refusal_status)


def error_object(error: CallRefused) -> dict[str, Any]:
    """Return an error as OpenAI's APIs have it, in a body and in a stream."""
    kind, code = _CODES[error.problem]
    return {"message": _words(error), "type": kind, "param": None, "code": code}


def _words(error: CallRefused) -> str:
    if error.problem != Problem.CONTEXT_LENGTH:
        return error.message
    return (  # harnesses look for these words
        f"This model's maximum context length is {error.limit} tokens. However, your messages resulted in "
        f"{error.tokens} tokens. Please reduce the length of the messages."
    )


DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """Return an event without a name."""
    return b"data: %b\n\n" % msgspec.json.encode(data)


def named_event(data: dict[str, Any]) -> bytes:
    """Return an event that is called what its `type` says."""
    return b"event: %b\n%b" % (data["type"].encode(), event(data))


def signature(turn_id: str) -> str:
    """Return what clients keep of a turn without looking into it: base64, or some SDKs refuse it."""
    return f"{turn_id}A"


_Read = TypeVar("_Read", bound=msgspec.Struct)

_TEXTS: Final = {"text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text"}
_UNPARSED: Final = "__unparsedToolInput"
"""Where Claude Code puts arguments that are no JSON object."""


class Part(msgspec.Struct):
    """One of a list of contents."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None


Content = str | list[Part] | None


def invalid(message: str) -> CallRefused:
    """Return the refusal of a request that is wrong."""
    return CallRefused(Problem.INVALID, message)


def converted(body: Mapping[str, Any], kind: type[_Read]) -> _Read:
    """Read JSON data; fields that the type does not have are skipped.

    Raises:
        CallRefused: a field has another type than the API says.
    """
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise invalid(f"the request is not of this API's form: {error}") from None


def text_of(content: Content, placeholder: Callable[[str], str], between: str = "\n") -> str:
    """Return the text of a content, with a placeholder for what is not text."""
    if not isinstance(content, list):
        return content or ""
    return between.join(
        part.text or part.refusal or "" if part.type in _TEXTS else placeholder(part.type) for part in content
    )


def error_text(text: str) -> str:
    """Return what the policy sees of a tool's answer that is an error, unless the text says so itself."""
    begun = text.lstrip().lower()
    return text if begun.startswith(("error", "<tool_use_error>")) else f"Error: {text}"


def sampling_of(body: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    """Return what is asked of the sampling: `names` says what the API calls it, and we.

    Raises:
        CallRefused: a number is too large.
    """
    asked: dict[str, float] = {}
    for theirs, ours in names.items():
        value = body.get(theirs)
        if isinstance(value, int | float):
            try:
                asked[ours] = float(value)
            except OverflowError:
                raise invalid(f"{theirs} is a number of more digits than any sampling has") from None
    return asked


def token_limit(*limits: int | None) -> int | None:
    """Return the first limit that was set.

    Raises:
        CallRefused: it leaves no token.
    """
    limit = next((limit for limit in limits if limit is not None), None)
    if limit is not None and limit < 1:
        raise invalid(f"the most tokens of a reply must be 1 or more, not {limit}")
    return limit


def one_choice(count: int | None, field: str) -> None:
    """Check how many replies are asked for.

    Raises:
        CallRefused: more than one.
    """
    if count is not None and count != 1:
        raise invalid(f"{field} must be 1, not {count}: the proxy gives one reply to a request; send more requests")


def may_call(choice: Any, field: str) -> bool:
    """Return whether the policy may call tools; `choice` is the name of what is asked for, None if nothing is.

    Raises:
        CallRefused: a call is asked for: the policy's turns are sampled, never forced.
    """
    if choice is None or choice in ("auto", "none"):
        return bool(choice != "none")
    raise invalid(
        f"{field} {choice!r} is not supported: the policy chooses itself whether it calls a tool, and which; send "
        "auto or none, or leave the field out"
    )


def kind_of(choice: Any) -> Any:
    """Return the name of a choice of tools that is a name, or an object with a type."""
    return choice.get("type") if isinstance(choice, dict) else choice


def function_tool(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """Return a tool in the form of chat completions.

    Raises:
        CallRefused: it has no name.
    """
    if not name:
        raise invalid("a tool has no name")
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def arguments_text(arguments: Any) -> str:
    """Return a call's arguments as the text that the policy would have written."""
    if isinstance(arguments, str):
        return arguments
    if isinstance(arguments, dict) and isinstance(arguments.get(_UNPARSED), dict):
        return str(arguments[_UNPARSED].get("raw", ""))
    return json_text({} if arguments is None else arguments)


def arguments_object(text: str) -> dict[str, Any]:
    """Return a call's arguments as an object, for APIs that have no text of them.

    What is no JSON object goes out as Claude Code writes such input down: the tool finds none of its parameters and
    says so, and the policy sees what it wrote.
    """
    try:
        arguments = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {_UNPARSED: {"raw": text, "len": len(text)}}


def texts(values: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return one text or several as several, without empty ones."""
    return tuple(value for value in ([values] if isinstance(values, str) else values or ()) if value)


def json_text(data: Any) -> str:
    """Return data as JSON."""
    return msgspec.json.encode(data).decode()
