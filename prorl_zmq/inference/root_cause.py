"""The root cause of a failed start, found in what vLLM and its processes wrote.

A worker or engine core prints its own traceback; each process above it prints one more, which only says that the one
below failed. So the cause is the last exception of the first chain of tracebacks that is not such a wrapper.
"""

from __future__ import annotations

import re

LIMIT = 600
"""Most characters of a root cause."""
_CONTROL = re.compile(r"\x1b\[[0-9;]*m")
_PROCESS = re.compile(r"^\s*((?:\([^()]*pid=\d+\)\s?)+)")
_LOG = re.compile(r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]*\] ?)?")
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


def root_cause(text: str) -> str:
    """Return the root cause in one or two lines; empty if the text has no exception.

    Args:
        text: what the processes wrote, log lines and tracebacks, followed by the traceback of our own process.
    """
    lines = [_CONTROL.sub("", line.rstrip()) for line in text.splitlines()]
    processes: dict[str, list[str]] = {}
    for line in lines:
        found = _PROCESS.match(line)
        said = line[found.end() :] if found else line
        log = _LOG.match(said)
        if log is None or log[1] in ("ERROR", "CRITICAL"):
            processes.setdefault(found[1] if found else "", []).append(said[log.end() :] if log else said)
    # vLLM's processes come before ours, which has no name in the log: it only waits for them.
    for name in sorted(processes, key=lambda name: not name):
        if cause := _cause(processes[name]):
            return cause
    return ""


def _cause(lines: list[str]) -> str:
    """Return the last exception of the first chain that is no wrapper."""
    cause = ""
    for index, line in enumerate(lines):
        if cause and line.startswith("Traceback (") and not _is_chained(lines[:index]):
            return cause
        raised = _RAISED.match(line)
        if raised is not None and (message := _message(raised, lines[index + 1 :])):
            cause = message
    return cause


def _is_chained(before: list[str]) -> bool:
    last = next((line for line in reversed(before) if line.strip()), "")
    return last.startswith(_CHAINED)


def _message(raised: re.Match[str], following: list[str]) -> str:
    """Return an exception's name and message; empty if it says only that another one was raised."""
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
