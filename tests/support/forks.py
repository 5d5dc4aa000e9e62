"""Python programs that tests start as forks of one process, which has imported what most of them need.

An interpreter that starts from nothing costs 0.3 to 1 s of CPU, a fork 0.02 s. `tests/commands/test_programs.py` and
`tests/service/test_serve.py` keep real starts.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from prorl_zmq.service.preloading import BY_PROCESS, SHARED
from prorl_zmq.system import interpreters
from prorl_zmq.system.fork_server import MODULE, ForkServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

IMPORTED = (
    *(each for modules in BY_PROCESS.values() for each in modules),
    *SHARED,
    "prorl_zmq.commands.app",
    "prorl_zmq.commands.broker",
    "prorl_zmq.commands.engine",
    "prorl_zmq.commands.gateway",
    "prorl_zmq.commands.service",
    "prorl_zmq.commands.stage",
    "prorl_zmq.service.supervisor",
    "prorl_zmq.stages.grading.grader_process",
    "prorl_zmq.tools.execution.server",
    "support.forked_servers",
)
"""The modules of a service's processes, graders and execution servers; and that by which a service's own fork server is
a fork too."""
TESTS = Path(__file__).parents[1]

_server: list[ForkServer] = []
_start_interpreter = interpreters.start_python


def start(*program: str, **options: Any) -> subprocess.Popen[Any]:
    """Run `python -P` with these arguments, as a fork; `options` are those of `ForkServer.start`."""
    return _begun().start(program, **options)


def begin() -> None:
    """Start the process that forks, for a test that counts processes."""
    _begun().preload()


def _begun() -> ForkServer:
    server = _server[0]
    if not server.pid:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
            server.begin()  # the processes that it forks have a PYTHONPATH of their own
    return server


def start_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the package start interpreters until the test ends, as for a user."""
    monkeypatch.setattr(interpreters, "start_python", _start_interpreter)


@contextmanager
def instead_of_starts() -> Iterator[None]:
    """Have the package start its helpers as forks too, while the context is open."""

    def start_python(
        module: str, *arguments: str, descriptor: int, env: Mapping[str, str] | None = None, output: int | None = None
    ) -> subprocess.Popen[bytes]:
        if module == MODULE:
            return _start_interpreter(module, *arguments, descriptor=descriptor, env=env, output=output)
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        return start("-m", module, *arguments, pass_fds=(descriptor,), env=env, **streams)

    with ForkServer(IMPORTED) as server:
        _server.append(server)
        interpreters.start_python = start_python
        try:
            yield
        finally:
            interpreters.start_python = _start_interpreter
            _server.clear()
