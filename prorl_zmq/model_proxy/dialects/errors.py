"""HTTP statuses of refused calls, and the error bodies of OpenAI's two APIs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ..calls import Problem

if TYPE_CHECKING:
    from ..calls import CallRefused

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
