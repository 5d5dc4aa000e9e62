"""Python programs that tests start as forks of one process, which has imported what most of them need.

An interpreter that starts from nothing costs 0.3 to 1 s of CPU, a fork 0.02 s. `tests/commands/test_programs.py` and
`tests/service/test_serve.py` keep real starts.
"""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from prorl_zmq.system import interpreters
from prorl_zmq.system.fork_server import ForkServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pytest

IMPORTED = (
    "uvloop",
    "prorl_zmq.commands.app",
    "prorl_zmq.commands.broker",
    "prorl_zmq.commands.engine",
    "prorl_zmq.commands.gateway",
    "prorl_zmq.commands.service",
    "prorl_zmq.commands.stage",
    "prorl_zmq.brokers.backends.backend_broker",
    "prorl_zmq.brokers.journal.disk_journal",
    "prorl_zmq.brokers.rollout.rollout_broker",
    "prorl_zmq.inference.hosting.host",
    "prorl_zmq.service.supervisor",
    "prorl_zmq.stages.grading.grader_process",
    "prorl_zmq.stages.stage_process",
    "prorl_zmq.tools.execution.server",
)
"""The modules of brokers, stage processes, engine hosts, gateways, graders and execution servers."""

_server: list[ForkServer] = []
_start_interpreter = interpreters.start_python


def start(*program: str, **options: Any) -> subprocess.Popen[Any]:
    """Run `python -P` with these arguments, as a fork; `options` are those of `ForkServer.start`."""
    return _server[0].start(program, **options)


def begin() -> None:
    """Start the process that forks, for a test that counts processes."""
    _server[0].preload()


def start_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the package start interpreters until the test ends, as for a user."""
    monkeypatch.setattr(interpreters, "start_python", _start_interpreter)


@contextmanager
def instead_of_starts() -> Iterator[None]:
    """Have the package start its helpers as forks too, while the context is open."""

    def start_python(
        module: str, *arguments: str, descriptor: int, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        return start("-m", module, *arguments, stdin=subprocess.DEVNULL, pass_fds=(descriptor,), env=env)

    with ForkServer(IMPORTED) as server:
        _server.append(server)
        interpreters.start_python = start_python
        try:
            yield
        finally:
            interpreters.start_python = _start_interpreter
            _server.clear()
