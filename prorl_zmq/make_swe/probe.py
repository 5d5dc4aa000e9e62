"""A pytest plugin for the sandbox, for Python 3.9 or newer, which needs only pytest.

`PRORL_PROBE` names a JSON file with `root` (the repository), `keep` (node ids to run, null for all), `reach` (whether
to record which functions each test calls and which lines run) and `report` (the output file). The report
(`suite.Report`) also has, for each failed test, the failing line, the exception and simple local variables.
"""

from __future__ import annotations

import dis
import json
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType

SIMPLE = (str, bytes, int, float, bool, type(None), list, tuple, dict, set)
REPR_LIMIT = 300
MESSAGE_LIMIT = 4000
VARIABLES = 40


class Probe:
    def __init__(self, order: dict[str, Any]) -> None:
        self.root = order["root"].rstrip("/") + "/"
        self.keep = None if order["keep"] is None else set(order["keep"])
        self.reach = order["reach"]
        self.report = order["report"]
        self.failures: dict[str, dict[str, Any]] = {}
        self.tests: list[str] = []
        self.calls: dict[str, dict[int, set[int]]] = {}
        self.lines: dict[str, set[int]] = {}
        self.known: dict[CodeType, tuple[str, set[int], set[int]] | None] = {}
        """By code object: its file, the tests that call it, its lines that have not run; None: outside the root."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.keep is not None:
            left_out = [item for item in items if item.nodeid not in self.keep]
            items[:] = [item for item in items if item.nodeid in self.keep]
            config.hook.pytest_deselected(items=left_out)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Trace a test, its fixtures included."""
        if not self.reach:
            yield
            return
        self.tests.append(item.nodeid)
        sys.settrace(self.trace)
        threading.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        """Note a call; look at the lines of code that has some left that did not run."""
        del event, argument
        code = frame.f_code
        if code not in self.known:
            self.known[code] = self.enter(code)
        entry = self.known[code]
        if entry is None:
            return None
        _, calls, unseen = entry
        calls.add(len(self.tests) - 1)
        return self.line if unseen else None

    def line(self, frame: FrameType, event: str, argument: object) -> Any:
        del event, argument
        entry = self.known[frame.f_code]
        if entry is None:
            return None
        path, _, unseen = entry
        if frame.f_lineno in unseen:
            unseen.discard(frame.f_lineno)
            self.lines.setdefault(path, set()).add(frame.f_lineno)
        return self.line if unseen else None

    def enter(self, code: CodeType) -> tuple[str, set[int], set[int]] | None:
        """Return what is to be noted of code that is called for the first time."""
        name = code.co_filename
        if not name.startswith(self.root):
            return None
        path = name[len(self.root) :]
        calls = self.calls.setdefault(path, {}).setdefault(code.co_firstlineno, set())
        return path, calls, {line for _, line in dis.findlinestarts(code) if line}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        outcome: Any = yield
        if outcome.get_result().failed and call.excinfo is not None and item.nodeid not in self.failures:
            self.failures[item.nodeid] = self.describe(item, call.excinfo)

    def describe(self, item: pytest.Item, excinfo: pytest.ExceptionInfo[BaseException]) -> dict[str, Any]:
        """Return the line of the test's own file that led to the exception, and what the exception says."""
        own = str(item.path)
        here = [
            (entry.frame.raw, entry.lineno + 1)
            for entry in excinfo.traceback
            if entry.frame.code.raw.co_filename == own
        ]
        frame, line = here[-1] if here else (None, 0)
        try:
            message = excinfo.exconly()
        except Exception as error:  # noqa: BLE001 - the exception's own text raises what it likes
            message = type(error).__name__
        return {
            "line": line,
            "function_line": frame.f_code.co_firstlineno if frame else 0,
            "path": own[len(self.root) :] if own.startswith(self.root) else "",
            "exception": excinfo.typename,
            "message": message[:MESSAGE_LIMIT],
            "variables": simple_variables(frame) if frame else {},
        }

    def pytest_sessionfinish(self) -> None:
        calls = {path: {line: sorted(tests) for line, tests in by.items()} for path, by in self.calls.items()}
        lines = {path: sorted(numbers) for path, numbers in self.lines.items()}
        found = {"tests": self.tests, "calls": calls, "lines": lines, "failures": self.failures}
        Path(self.report).write_text(json.dumps(found), encoding="ascii")


def simple_variables(frame: FrameType) -> dict[str, str]:
    """Return the representations of a frame's variables that are plain data."""
    found = {}
    for name, value in list(frame.f_locals.items())[:VARIABLES]:
        if not isinstance(value, SIMPLE) or name.startswith("@"):
            continue
        try:
            text = repr(value)
        except Exception:  # noqa: BLE001, S112 - what is in a list may raise what it likes
            continue
        if len(text) <= REPR_LIMIT:
            found[name] = text
    return found


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get("PRORL_PROBE")
    if path:
        config.pluginmanager.register(Probe(json.loads(Path(path).read_text(encoding="utf-8"))), "prorl-probe")
