"""Errors as HTTP answers: a status, and the error as JSON.

{"error": {"code": "unknown_task", "message": "…", "fields": {"task": "…"}}}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from .. import errors
from ..errors import ErrorInfo, ProrlError

if TYPE_CHECKING:
    import logging

STATUSES: dict[type[ProrlError], int] = {
    errors.MalformedMessage: 400,
    errors.InvalidJob: 400,
    errors.InvalidBatch: 400,
    errors.EndpointFailed: 400,
    errors.UnknownTask: 400,
    errors.NotAllowed: 403,
    errors.UnknownJob: 404,
    errors.UnknownBatch: 404,
    errors.UnknownSession: 404,
    errors.UnknownBackend: 404,
    errors.DuplicateJob: 409,
    errors.DuplicateBackend: 409,
    errors.JobTooLarge: 413,
    errors.Busy: 429,
    errors.VersionMismatch: 502,
    errors.JournalFailed: 503,
    errors.RequestTimeout: 503,
    errors.Closed: 503,
}
"""All others: 500."""
HTTP_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "too_large",
    415: "unsupported_encoding",
}
"""Codes of errors that aiohttp raises."""
RETRY_S = 1.0


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer with a status of 400 or above."""

    error: ErrorInfo


def error_response(error: ProrlError, status: int = 0) -> web.Response:
    """Return the answer for an error; `status` overrides the error's own."""
    status = status or STATUSES.get(type(error), 500)
    headers = {}
    if status in (429, 503):
        headers["Retry-After"] = str(max(1, round(float(error.fields.get("retry_after_s") or RETRY_S))))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(ErrorBody(error.info()), status, headers)


def http_error_response(error: web.HTTPException) -> web.Response:
    """Return the answer for an error that aiohttp raised."""
    info = ErrorInfo(HTTP_CODES.get(error.status, "http"), error.text or error.reason)
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    return json_response(ErrorBody(info), error.status, headers)


def is_for_the_log(record: logging.LogRecord) -> bool:
    """Return whether aiohttp's log line may be written: a malformed request may contain keys."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


def with_defaults(value: Any) -> Any:
    """Return messages as plain data with all fields, including those that have their defaults."""
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        fields = {name: with_defaults(getattr(value, name)) for name in value.__struct_fields__}
        if config.array_like:
            return list(fields.values())
        return fields if config.tag is None else {config.tag_field: config.tag, **fields}
    if isinstance(value, dict):
        return {name: with_defaults(each) for name, each in value.items()}
    if isinstance(value, tuple | list) and value and isinstance(value[0], msgspec.Struct | dict | tuple | list):
        return [with_defaults(each) for each in value]
    return value


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(content), status=status, headers=headers, content_type="application/json"
    )
