"""The process of a `ForkServer`: imports modules, then forks itself for each order.

It has one thread, no event loop, no ZeroMQ context and no signal handlers, so its forks equal fresh interpreters; it
refuses modules that start a thread or make a context on import. It dies with the process that started it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .fork_server import FORK, MESSAGE_BYTES, PROTOCOL
from .forked_program import become, report, set_title
from .installed import installed, modified
from .open_files import raise_open_files
from .plugins import all_offered, package_of
from .processes import die_with_parent, wait_adopted

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

DESCRIPTORS = 250
"""Most descriptors of one message; the kernel allows 253."""
TASKS = Path("/proc/self/task")


def imported(preload: list[list[str]]) -> dict[str, Any]:
    """Import what a client requests; return the answer."""
    points: list[EntryPoint] = []
    refused = ""
    for module, group, what in preload:
        if module:
            refused = refused or _import(module, module)
        for point in sorted(all_offered(group)) if group else ():
            points.append(point)
            subject = f"the {what} {point.name} ({point.value}, of {package_of(point)})"
            refused = refused or _import(point.module, subject)
    files = [str(getattr(sys.modules.get(point.module), "__file__", "")) for point in points]
    return {"refused": refused, "installed": installed(points), "files": modified(files)}


def _import(module: str, subject: str) -> str:
    """Import a module; return why it makes forks impossible, or an empty string."""
    with contextlib.suppress(Exception, SystemExit):  # a process that needs it raises it again
        import_module(module)
    found = []
    if len(list(TASKS.iterdir())) > 1:
        names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        found.append(f"starts a thread ({', '.join(names) or 'not of Python'})")
    if makes_contexts():
        found.append("makes a ZeroMQ context")
    gc.freeze()  # frozen objects are skipped next time
    if not found:
        return ""
    return (
        f"{subject}: the module {module} {' and '.join(found)} when it is imported, and processes are forked after "
        "that; do it in `__init__` or at the first call instead"
    )


def makes_contexts() -> bool:
    """Return whether this process has a ZeroMQ context that is open."""
    zmq = sys.modules.get("zmq")
    context = getattr(zmq, "Context", None)
    if context is None:
        return False
    return any(issubclass(type(each), context) and not each.closed for each in gc.get_objects())


def _fork(control: socket.socket, client: int, descriptors: list[int]) -> None:
    """Fork a process that the client adopts."""
    line, *others = descriptors
    try:
        starter = os.fork()
        if starter == 0:
            try:
                starter = os.getpid()
                report(line, starter)
                if os.fork() == 0:
                    control.close()
                    become(line, others, starter, client)
            except OSError as error:
                report(line, error)
            finally:
                os._exit(0)
        os.waitpid(starter, 0)
    except OSError as error:
        report(line, error)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def main() -> None:
    """Serve the connection of the descriptor in the first argument, for the process in the second."""
    control = socket.socket(fileno=int(sys.argv[1]))
    client = int(sys.argv[2])
    starter = os.getpid()
    if os.fork() != 0:
        os._exit(0)
    wait_adopted(starter)
    die_with_parent(client)
    control.send(json.dumps([PROTOCOL, os.getpid()]).encode("ascii"))
    set_title([sys.executable, "-P", "-m", "prorl_zmq.system.fork_server_process"])
    raise_open_files()
    gc.disable()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, DESCRIPTORS)
        if not message:
            return
        if message == FORK:
            _fork(control, client, descriptors)
        else:
            control.send(json.dumps(imported(json.loads(message))).encode("ascii"))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client has ended
        main()
