"""The root cause of a failed start, found in the output of vLLM and its processes.

A worker or engine core prints its own traceback; each process above it prints another one, which only says that the one
below failed. So the cause is the last exception of the first chain of tracebacks that is not such a wrapper.
"""

from __future__ import annotations

import re
from itertools import takewhile
from typing import NamedTuple

LIMIT = 600
"""Most characters of a root cause."""
_CONTROL = re.compile(r"\x1b\[[0-9;]*m")
_PROCESS = re.compile(r"^\s*((?:\([^()]*pid=\d+\)\s?)+)")
_RECORD = re.compile(r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d (?:\[([^\]]*)\] ?)?")
_RAISED = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|NotFound|Exit|Interrupt|Failed|Invalid)\w*)(?:: (.*))?$")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_WRAPPER = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|see root cause above|CancelledError|"
    r"BrokenPipeError|EngineDeadError|initialization failed due to an exception in a background process"
)
_WORKER = re.compile(r"Worker failed with error '(.*)', please check the stack trace", re.DOTALL)
_PLAIN = ("ValueError", "RuntimeError", "OSError", "Exception", "AssertionError")
"""Exceptions whose name adds nothing to their message."""
_ENDS = ("Traceback (", "File ", "For further information", "[type=", *_CHAINED)


class _Line(NamedTuple):
    source: str
    """The source of the log line, such as `core.py:1510`; empty if it was not logged."""
    text: str


def root_cause(text: str) -> str:
    """Return the root cause in one or two lines; empty if the text has no exception."""
    processes: dict[str, list[_Line]] = {}
    for line in text.splitlines():
        plain = _CONTROL.sub("", line.rstrip())
        process = _PROCESS.match(plain)
        said = plain[process.end() :] if process else plain
        record = _RECORD.match(said)
        if record is None or record[1] in ("ERROR", "CRITICAL"):
            source, said = ((record[2] or "", said[record.end() :])) if record else ("", said)
            processes.setdefault(process[1] if process else "", []).append(_Line(source, said))
    # This process, which is not named, comes last: it only waits for the others.
    for name in sorted(processes, key=lambda name: not name):
        if cause := _cause(processes[name]):
            return cause
    return ""


def _cause(lines: list[_Line]) -> str:
    """Return the last exception of the first chain that has one that is not a wrapper."""
    cause, last = "", ""
    for index, line in enumerate(lines):
        if cause and line.text.startswith("Traceback (") and not last.startswith(_CHAINED):
            return cause
        if line.text.strip():
            last = line.text
        raised = _RAISED.match(line.text)
        if raised is not None:
            cause = _message(raised, _same_source(lines[index:])) or cause
    return cause


def _same_source(lines: list[_Line]) -> list[str]:
    """Return the lines after the first one that the same call logged."""
    return [line.text for line in takewhile(lambda line: line.source == lines[0].source, lines)][1:]


def _message(raised: re.Match[str], following: list[str]) -> str:
    """Return an exception's name and message; empty if it only reports another one."""
    name, first = raised[1].rpartition(".")[2], raised[2] or ""
    parts = [first]
    for line in following:
        if not line.strip() or line.strip().startswith(_ENDS) or _RAISED.match(line):
            break
        parts.append(line.strip())
    if name == "ValidationError" and len(parts) > 1:  # pydantic's: what was validated, the field, the problem
        parts = [part.partition(" [type=")[0].removeprefix("Value error, ") for part in parts[1:]]
        name = "ValueError"
    message = " ".join(part for part in parts if part)
    if (worker := _WORKER.search(message)) is not None:
        return worker[1][:LIMIT]
    if _WRAPPER.search(f"{name}: {message}"):
        return ""
    plain = name in _PLAIN and " " in message
    return (message if plain else f"{name}: {message}" if message else name)[:LIMIT]
