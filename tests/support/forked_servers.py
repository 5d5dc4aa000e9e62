"""Imported by the process that forks a worker's programs: the fork server of such a program is a fork of the program.

So it need not import again what the program has. A program with threads or a ZeroMQ context starts an interpreter.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prorl_zmq.system import fork_server_process, interpreters
from prorl_zmq.system.fork_server import MODULE
from prorl_zmq.system.fork_server_process import TASKS

if TYPE_CHECKING:
    from collections.abc import Mapping

_start_interpreter = interpreters.start_python


class Forked:
    """What a `ForkServer` needs of the process that starts its server."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def wait(self) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def kill(self) -> None: ...  # it ends by itself


def start_python(
    module: str, *arguments: str, descriptor: int, env: Mapping[str, str] | None = None, **more: Any
) -> Any:
    """Start a module as `interpreters.start_python` does; a fork server as a fork, where this process is like new."""
    if module != MODULE or len(list(TASKS.iterdir())) > 1 or fork_server_process.makes_contexts():
        return _start_interpreter(module, *arguments, descriptor=descriptor, env=env, **more)
    pid = os.fork()
    if pid:
        return Forked(pid)
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        for number in {int(each.name) for each in Path("/proc/self/fd").iterdir()} - {0, 1, 2, descriptor}:
            with contextlib.suppress(OSError):  # that of the list
                os.close(number)
        os.environ.update(env or {})
        sys.argv = [MODULE, *arguments]
        fork_server_process.main()
    finally:
        os._exit(0)


interpreters.start_python = start_python
