"""Logging of all programs: one line per event on standard error, as text for people or as JSON for programs.

A line about a job has its id, attempt and phase as fields (`extra=of_job(…)`, or `with about_job(…)`). The formatters
escape control characters and line breaks, cut long texts and omit secrets registered with `keep_secret`, so callers
need not. Traceback lines follow with a prefix. vLLM's own loggers are not formatted here.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

FIELDS = ("job_id", "attempt", "phase", "stage_id", "backend")
"""Optional fields of a line."""
TEXT_LIMIT = 4000
"""Most characters of one text in a line."""
TRACEBACK_LINES = 100
"""Most lines of one traceback: its end, with the error."""
HIDDEN = "[secret]"

# C0 and C1 controls, line and paragraph separators, bidirectional marks, invisible characters (soft hyphen, fillers,
# zero-width spaces, tags), halves of surrogate pairs.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u180b-\u180f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0"
    "\ud800-\udfff\U000e0000-\U000e0fff]"
)
_MARK = "  | "

_fields: ContextVar[dict[str, Any]] = ContextVar("prorl_log_fields")
_secrets: list[str] = []
_settings: tuple[str, LogFormat, LogLevel] = ("prorl", "text", "info")


def of_job(job_id: str, attempt: int | None = None, phase: str | None = None, **more: str) -> dict[str, Any]:
    """Return the `extra` fields of a line about a job; `more` are others of `FIELDS`."""
    fields = {"job_id": job_id, "attempt": attempt, "phase": phase, **more}
    return {name: value for name, value in fields.items() if value is not None}


def job_of_sandbox(name: str) -> tuple[str, int | None]:
    """Return the job and attempt that a sandbox is named after."""
    job_id, _, rest = name.rpartition(".")
    attempt = rest.partition("-")[0]
    return (job_id, int(attempt)) if job_id and attempt.isdecimal() else (name, None)


class about_job:  # noqa: N801 - a function's name, as `contextlib.suppress` has
    """Add a job's fields to all lines that this task logs within the block."""

    def __init__(self, job_id: str, attempt: int | None = None, phase: str | None = None) -> None:
        self._named = of_job(job_id, attempt, phase)

    def __enter__(self) -> None:
        self._token = _fields.set(self._named)

    def __exit__(self, *_: object) -> None:
        _fields.reset(self._token)


def keep_secret(text: str | None) -> None:
    """Omit `text` from this process's log: a server may quote a key that it refuses."""
    if text and text not in _secrets:
        _secrets.append(text)
        _secrets.sort(key=len, reverse=True)


def one_line(text: str, limit: int = TEXT_LIMIT) -> str:
    """Return a text as one line of printable characters, others escaped, cut to `limit` characters."""
    for secret in _secrets:
        text = text.replace(secret, HIDDEN)
    more = len(text) - limit
    if more > 0:
        text = text[:limit]
    text = _UNPRINTABLE.sub(_escape, text)
    return f"{text} … ({more} more characters)" if more > 0 else text


def printable(text: str, line_limit: int = TEXT_LIMIT) -> str:
    """Return a text's lines, each as `one_line` returns it; a tab is four spaces."""
    lines = text.replace("\r\n", "\n").replace("\t", "    ").split("\n")
    return "\n".join(one_line(line, line_limit) for line in lines)


def start_logging(process: str, log_format: LogFormat = "text", level: LogLevel = "info") -> None:
    """Log under the name `process`, such as a stage's or backend's id; other packages log from warnings on."""
    global _settings  # noqa: PLW0603 - as logging's own settings, there is one for the process
    _settings = (process, log_format, level)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter(process))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("prorl").setLevel(level.upper())
    logging.captureWarnings(capture=True)
    if log_format == "json":
        sys.excepthook = _log_uncaught


def log_settings() -> tuple[str, LogFormat, LogLevel]:
    """Return the arguments of `start_logging`, for a child process."""
    return _settings


def say(program: str, message: str, level: int = logging.INFO) -> None:
    """Print a line for the person who started this process; if the log is JSON, log it."""
    if any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers):
        logging.getLogger("prorl").log(level, "%s", message)
    else:
        print(f"{program}: {one_line(' '.join(message.split()))}", file=sys.stderr, flush=True)


class TextFormatter(logging.Formatter):
    """Lines for people: time, level, process, a foreign logger's name, text, fields; then the traceback."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        day = time.strftime("%H:%M:%S", time.localtime(record.created))
        about = "".join(f" {name}={value}" for name, value in _about(record).items())
        whose = self._process if record.name.startswith("prorl") else f"{self._process} {record.name}"
        head = f"{day} {record.levelname[:1]} {whose}: {_message(record)}{about}"
        return "\n".join([head, *(_MARK + line for line in _traceback(self, record))])


class JsonFormatter(logging.Formatter):
    """Lines for programs: `time` (UTC), `level`, `logger`, `process`, `event`, `FIELDS`, and `traceback`, a list."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{second}.{int(record.created % 1 * 1000):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "event": _message(record),
            **_about(record),
        }
        lines = _traceback(self, record)
        if lines:
            line["traceback"] = lines
        return msgspec.json.encode(line).decode()


def _message(record: logging.LogRecord) -> str:
    try:
        text = record.getMessage()
    except (TypeError, ValueError, KeyError) as error:  # log the line in spite of the caller's error
        text = f"{record.msg!s} (its arguments do not fit: {error})"
    return one_line(text)


def _about(record: logging.LogRecord) -> Mapping[str, Any]:
    fields = _fields.get({})
    given = {name: getattr(record, name, fields.get(name)) for name in FIELDS}
    return {
        name: value if isinstance(value, int) else one_line(str(value), 256)
        for name, value in given.items()
        if value is not None
    }


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    text = formatter.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""
    text += formatter.formatStack(record.stack_info) if record.stack_info else ""
    return [one_line(line) for line in text.split("\n")[-TRACEBACK_LINES:]] if text else []


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    short = {0x09: "\\t", 0x0A: "\\n", 0x0D: "\\r"}
    return short.get(code) or (
        f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    )


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("prorl").critical("the process ends with an error", exc_info=(kind, error, trace))
