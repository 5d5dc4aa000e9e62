"""Starts execution servers by forking a process that has imported everything: 3 ms instead of 200, with shared memory.

    SEQPACKET socket, inherited    ← a stage process: a `ServerOrder`, and a pipe for the report that it is ready

A server outlives the stage process that asked for it until its lease expires; the spawner outlives its last server. It
adopts the processes that a killed server leaves behind, kills them and removes the folder. It has one thread and no
event loop before the fork. `multiprocessing`'s fork server is not used: it ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

import msgspec
import uvloop

from ...errors import ConfigError, ErrorInfo, InternalError, ProrlError, SandboxFailed
from ...system.logs import LogFormat, LogLevel, about_job, job_of_sandbox, of_job, start_logging
from ...system.readable import readable
from ..containers import tree
from ..containers.kinds import container_class
from ..processes.fork_watch import ForkWatch, forked
from ..processes.process_tree import children, kill
from .messages import ORDER_LIMIT_BYTES, ServerOrder
from .server import REMOVE_LIMIT_S, ExecutionServer

log = logging.getLogger("prorl.sandbox")


class Spawner:
    """Forks servers until the other side closes the connection and the last server has ended."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._servers: dict[int, Path] = {}
        self._cleaners: set[int] = set()

    def run(self) -> None:
        watch = ForkWatch()
        gc.freeze()
        open_connection = True
        while open_connection or self._servers or self._cleaners:
            watched: list[ForkWatch | socket.socket] = [watch, self._connection] if open_connection else [watch]
            ready = readable(watched)
            if watch in ready:
                watch.clear()
                self._reap()
            if self._connection in ready:
                open_connection = self._take_order()

    def _take_order(self) -> bool:
        packed, descriptors, _, _ = socket.recv_fds(self._connection, ORDER_LIMIT_BYTES, 1)
        if not packed:
            return False
        try:
            order = msgspec.msgpack.decode(packed, type=ServerOrder)
            container_class(order.kind)  # imported before the fork, for all servers
        except (msgspec.MsgspecError, ConfigError) as error:
            failure = error if isinstance(error, ConfigError) else InternalError(f"an order cannot be read: {error}")
            _tell(descriptors[0], failure.info())
            os.close(descriptors[0])
            return True
        pid = os.fork()
        if pid == 0:
            self._connection.close()
            _serve(order, descriptors[0])
        os.close(descriptors[0])
        self._servers[pid] = Path(order.path)
        return True

    def _reap(self) -> None:
        """Reap what ended; kill what a server that was killed has left behind."""
        for pid in children(os.getpid()):
            if pid not in self._servers and pid not in self._cleaners:
                kill(pid)
            with contextlib.suppress(ChildProcessError):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self._cleaners.discard(pid)
                    path = self._servers.pop(pid, None)
                    if path is not None and status != 0:
                        self._clean(path, status)

    def _clean(self, path: Path, status: int) -> None:
        if os.WIFSIGNALED(status):
            said = "the execution server of %s was killed by signal %d"
            log.warning(said, path.name, os.WTERMSIG(status), extra=of_job(*job_of_sandbox(path.name)))
        pid = os.fork()
        if pid == 0:
            try:
                tree.remove_tree(path, REMOVE_LIMIT_S)
            except BaseException as error:  # noqa: BLE001 - nothing may get out of a forked child
                log.warning("%s", error, extra=of_job(*job_of_sandbox(path.name)))
            finally:
                os._exit(0)
        self._cleaners.add(pid)


def _serve(order: ServerOrder, report: int) -> NoReturn:
    """In a forked child: be an execution server; report an empty line when ready, else the error."""
    code = 1
    try:
        forked()
        server = ExecutionServer(Path(order.path), order.kind, order.spec)

        def on_ready() -> None:
            os.write(report, b"\n")
            os.close(report)

        try:
            with about_job(*job_of_sandbox(server.name)):
                uvloop.run(server.run(on_ready))
            code = 0
        except ProrlError as error:
            _tell(report, error.info())
            code = 0
        except (BrokenPipeError, FileNotFoundError) as error:
            # The process that asked for it has given up meanwhile and removed its folder.
            _tell(report, SandboxFailed(f"the sandbox {server.name} was abandoned as it started: {error}").info())
        except BaseException as error:
            log.exception("an execution server failed")
            _tell(report, InternalError(f"an execution server failed: {type(error).__name__}: {error}").info())
    finally:
        os._exit(code)


def _tell(report: int, error: ErrorInfo) -> None:
    with contextlib.suppress(OSError):
        os.write(report, msgspec.json.encode(error))


def main() -> None:
    """Serve the connection whose descriptor is the first argument; the other arguments configure the log."""
    process, log_format, level = msgspec.convert(sys.argv[2:], tuple[str, LogFormat, LogLevel])
    start_logging(f"{process}.sandboxes", log_format, level)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        Spawner(connection).run()


if __name__ == "__main__":
    main()
