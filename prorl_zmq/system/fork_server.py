"""`ForkServer`: starts Python programs as forks of a process that has already imported what they need.

    SEQPACKET socket, inherited     ← server: its protocol and pid
                                    → server: what to import, as JSON; or `fork`, with a line and more descriptors
                                    ← server: what it has imported, or why it refuses a module
    stream socket, one per process  ← the forked process: its pid; after the order, nothing or an error
                                    → the forked process: the order (see `forked_program`)

A forked process is a child of the requesting process: the server forks twice, and the kernel reparents the orphan to
the nearest subreaper, the requesting process. It runs nothing before its order, which is sent once its pid is known, so
a server that dies half-way leaves nothing running. Running processes survive the server, and die with the main thread
of the requesting process. (The forks of `multiprocessing`'s server are its own children and die with it.)
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ..errors import ConfigError
from . import interpreters
from .installed import Installed, changes, installed, modified
from .open_files import first_open_files
from .plugins import all_offered
from .processes import adopting_orphans

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import IO

MODULE = "prorl_zmq.system.fork_server_process"
PROTOCOL = 1
"""Of the messages here: a server of an upgraded package may have another."""
TITLE_BYTES = 8192
"""Room for a forked process's command line; a longer one is cut in /proc."""
MESSAGE_BYTES = 65_536
ANSWER_BYTES = 2**20
FORK = b"fork"
BEGIN_LIMIT_S = 60.0
IMPORT_LIMIT_S = 300.0
FORK_LIMIT_S = 30.0
"""How long a server may take for one fork before it counts as dead; also a forked process for its order."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""Otherwise numpy starts threads on import, which a fork would lose."""

log = logging.getLogger("prorl.service")


class Preload(NamedTuple):
    """A module that the server imports, or those of all entry points of a group."""

    module: str = ""
    group: str = ""
    what: str = ""
    """What they are in error messages, such as `task`."""


class ServerLost(OSError):
    """The fork server died, or did not answer in time; no process was started."""


class ForkServer:
    """Owns the server process; a context, whose end does not affect running processes. Thread-safe.

    Args:
        preload: what to import before the first fork (see `preload`).
    """

    def __init__(self, preload: Iterable[str | Preload] = ()) -> None:
        self._preloaded: dict[Preload, bool] = {}
        """What the processes need, and whether the server has imported it."""
        self._note(preload)
        self._ordering = threading.Lock()
        """Serializes orders; guards the fields below."""
        self._control: socket.socket | None = None
        self._starter: subprocess.Popen[bytes] | None = None
        self._adopting = contextlib.ExitStack()
        """Open until the server is a child of this process."""
        self._pid = 0
        self._asked: list[Preload] = []
        """Imports that the server was asked for and has not answered."""
        self._installed: dict[str, Installed] = {}
        self._files: dict[str, int] = {}
        """What the server has imported: packages, and files of entry points with their modification times."""
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The server's pid; 0 before it has started."""
        return self._pid

    def begin(self) -> None:
        """Start the server's imports without waiting; `start` does so if this was not called."""
        with self._ordering:
            self._begin()
            self._ask_import()

    def preload(self, more: Iterable[str | Preload] = ()) -> None:
        """Import modules before the next fork. Import errors are left to the processes, which raise them.

        Raises:
            ConfigError: a module starts a thread or makes a ZeroMQ context when imported.
            ServerLost: the server died.
        """
        with self._ordering:
            self._note(more)
            self._import()

    def start(
        self,
        program: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        pass_fds: Iterable[int] = (),
        nice: int = 0,
        text: bool = False,
    ) -> ForkedProcess:
        """Run `python -P` with these arguments as a fork: a child of this process that leads its own session.

        Variables that the interpreter reads at its start are the server's, except PYTHONPATH and PYTHONUNBUFFERED.

        Args:
            program: `-m` and a module, or a script, and their arguments.
            env: the environment; None: this process's.
            cwd: the working folder; None: this process's.
            stdin: as for `subprocess.Popen`.
            stdout: likewise.
            stderr: likewise.
            pass_fds: more descriptors for the program, under the same numbers.
            nice: by how much to lower the priority.
            text: whether pipes are of text.

        Raises:
            ConfigError: a preloaded module started a thread or made a ZeroMQ context.
            OSError: the process cannot be started.
        """
        order = {
            "program": list(program),
            "environment": dict(os.environ if env is None else env),
            "folder": os.fspath(cwd) if cwd is not None else os.getcwd(),  # noqa: PTH109
            "nice": nice,
            "open_files": first_open_files(),
        }
        return ForkedProcess(self, order, tuple(pass_fds), stdin=stdin, stdout=stdout, stderr=stderr, text=text)

    def renew_if_changed(self) -> list[str]:
        """End the server if what it has imported has changed, so the next order starts another; return the changes.

        Changes are upgraded, installed or removed packages (this one and those of entry points), and edited entry
        points.
        """
        with self._ordering:
            if not self._installed:
                return []
            groups = [each.group for each in self._preloaded if each.group]
            points = (point for group in groups for point in all_offered(group, fresh=True))
            found = changes(self._installed, installed(points))
            times = modified(self._files)
            found += [f"{file} was changed" for file, time_ns in self._files.items() if times.get(file) != time_ns]
            if found:
                self._end()
            return found

    def close(self) -> None:
        """End the server; an order in progress in another thread fails. Running processes continue."""
        self._closed = True
        while not self._ordering.acquire(timeout=0.05):
            self._kill()
        try:
            self._end()
        finally:
            self._ordering.release()

    def fork(self, order: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Fork a process that executes an order with these descriptors; return its pid."""
        with self._ordering:
            try:
                return self._fork(order, descriptors)
            except ServerLost as error:
                if self._closed:
                    raise
                log.warning("%s; starting another", error)
            return self._fork(order, descriptors)

    def _fork(self, order: dict[str, Any], descriptors: Sequence[int]) -> int:
        self._import()
        ours, theirs = socket.socketpair()
        with _Line(ours) as line:
            with theirs, adopting_orphans():
                try:
                    self._ask(line, theirs, descriptors)
                except ServerLost:
                    line.reap()
                    raise
            _reap(line.pids[0], how=os.WNOHANG)  # a child of this process only if the server has died
            self._give(order, line)
        return line.pids[1]

    def _ask(self, line: _Line, theirs: socket.socket, descriptors: Sequence[int]) -> None:
        """Have the server fork a process at the other end of a line."""
        assert self._control is not None
        try:
            try:
                socket.send_fds(self._control, [FORK], [theirs.fileno(), *descriptors])
            finally:
                theirs.close()  # or the end of the stream would never come
            while len(line.pids) < 2:
                if line.read() is None:
                    raise self._lost("died")
        except (BrokenPipeError, ConnectionResetError):
            raise self._lost("died") from None
        except TimeoutError:
            raise self._lost("does not answer") from None

    def _give(self, order: dict[str, Any], line: _Line) -> None:
        """Send a forked process its order; a dead one already has an exit code."""
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                line.send(order)
                line.read()
        except BaseException as error:
            pid = line.pids[1]
            os.kill(pid, signal.SIGKILL)
            _reap(pid)
            if isinstance(error, TimeoutError):
                raise OSError(f"process {pid} did not begin within {FORK_LIMIT_S:g} s") from None
            raise

    def _begin(self) -> None:
        if self._control is not None:
            return
        if self._closed:
            raise ServerLost("the fork server is closed")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as opened:
            opened.callback(ours.close)
            self._adopting.enter_context(adopting_orphans())
            opened.callback(self._adopting.close)
            self._starter = interpreters.start_python(
                *(MODULE, str(theirs.fileno()), str(os.getpid()), TITLE_BYTES * "-"),
                descriptor=theirs.fileno(),
                env={**os.environ, **ONE_THREAD},
                output=subprocess.DEVNULL,
            )
            opened.pop_all()
        self._control = ours

    def _note(self, preload: Iterable[str | Preload]) -> None:
        for each in preload:
            self._preloaded.setdefault(Preload(each) if isinstance(each, str) else each, False)

    def _import(self) -> None:
        """Have the server import what it has not yet."""
        self._begin()
        self._receive_pid()
        while self._asked or self._ask_import():
            self._take_answer()
        assert self._control is not None
        self._control.settimeout(FORK_LIMIT_S)

    def _ask_import(self) -> bool:
        """Request the missing imports; return whether there are any."""
        assert self._control is not None
        self._asked = [each for each, there in self._preloaded.items() if not there]
        if self._asked:
            try:
                self._control.send(json.dumps(self._asked).encode("ascii"))
            except (BrokenPipeError, ConnectionResetError):
                raise self._lost("died") from None
        return bool(self._asked)

    def _take_answer(self) -> None:
        assert self._control is not None
        self._control.settimeout(IMPORT_LIMIT_S)
        try:
            answer = self._message()
        except TimeoutError:
            raise self._lost(f"has not imported its modules within {IMPORT_LIMIT_S:g} s") from None
        if refused := answer["refused"]:
            self._end()
            raise ConfigError(refused, key="task")
        self._installed.update({name: Installed(*one) for name, one in answer["installed"].items()})
        self._files.update(answer["files"])
        self._preloaded.update(dict.fromkeys(self._asked, True))
        self._asked = []

    def _receive_pid(self) -> None:
        """Wait until the server is a child of this process, whichever thread started it."""
        if self._pid:
            return
        assert self._starter is not None
        assert self._control is not None
        self._control.settimeout(BEGIN_LIMIT_S)
        try:
            protocol, pid = self._message()
        except TimeoutError:
            raise self._lost(f"has not begun within {BEGIN_LIMIT_S:g} s") from None
        self._pid = pid
        self._starter.wait()
        self._adopting.close()
        if protocol != PROTOCOL:
            raise self._lost(f"has protocol {protocol}, not {PROTOCOL}: prorl-zmq was upgraded")

    def _message(self) -> Any:
        assert self._control is not None
        try:
            said = self._control.recv(ANSWER_BYTES)
        except ConnectionResetError:
            said = b""
        if not said:
            raise self._lost("died")
        return json.loads(said)

    def _lost(self, how: str) -> ServerLost:
        self._end()
        return ServerLost(f"the fork server {'was closed' if self._closed else how}")

    def _end(self) -> None:
        """End the server and release its process and descriptors."""
        if self._control is None:
            return
        if not self._pid:
            self._control.settimeout(BEGIN_LIMIT_S)
            with contextlib.suppress(OSError, ValueError):
                _, self._pid = json.loads(self._control.recv(MESSAGE_BYTES))
        self._kill()
        if self._pid:
            _reap(self._pid)
        if self._starter is not None:
            self._starter.kill()
            self._starter.wait()
        self._adopting.close()
        self._control.close()
        self._control, self._starter, self._pid = None, None, 0
        self._preloaded = dict.fromkeys(self._preloaded, False)
        self._asked = []
        self._installed, self._files = {}, {}

    def _kill(self) -> None:
        control = self._control
        if pid := self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        elif control is not None:  # it has not reported its pid: it ends with the connection
            with contextlib.suppress(OSError):
                control.shutdown(socket.SHUT_RDWR)


class ForkedProcess(subprocess.Popen[Any]):
    """A forked process with the interface of a running `subprocess.Popen`."""

    def __init__(self, server: ForkServer, order: dict[str, Any], pass_fds: tuple[int, ...], **streams: Any) -> None:
        self._server = server
        self._order = order
        self._passed = pass_fds
        super().__init__(order["program"], **streams)

    def _execute_child(self, *arguments: Any) -> None:
        """Override the private method that starts a `Popen`'s process."""
        (read_stdin, _, _, write_stdout, _, write_stderr) = pipes = arguments[10:16]
        streams = (read_stdin, write_stdout, write_stderr)
        standard = [number if number >= 0 else place for place, number in enumerate(streams)]
        try:
            self._order["descriptors"] = [0, 1, 2, *self._passed]
            self.pid = self._server.fork(self._order, [*standard, *self._passed])
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class _Line:
    """This end of the line to a process that is being forked, as a context."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(FORK_LIMIT_S)
        self._connection = connection
        self._received = b""
        self.pids: list[int] = []
        """Of the intermediate process, which exits at once, and of the forked one, as far as received."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def send(self, order: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(order).encode("ascii") + b"\n")

    def read(self) -> int | None:
        """Return the next pid; None at the end.

        Raises:
            OSError: the process cannot be forked, or run.
        """
        while b"\n" not in self._received:
            chunk = self._connection.recv(MESSAGE_BYTES)
            if not chunk:
                return None
            self._received += chunk
        said, _, self._received = self._received.partition(b"\n")
        message = json.loads(said)
        if isinstance(message, dict):
            raise OSError(*message["error"])
        self.pids.append(message)
        return self.pids[-1]

    def reap(self) -> None:
        """Reap the forks of a server that has died; without an order they exit."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            while self.read() is not None:
                pass
        for pid in self.pids:
            _end_child(pid)


def _reap(pid: int, how: int = 0) -> bool:
    """Reap a child; return whether it is gone."""
    try:
        return os.waitpid(pid, how)[0] != 0
    except ChildProcessError:  # not a child, or other code here waits for all children
        return True


def _end_child(pid: int) -> None:
    """Reap a process; kill it first if it has not exited, for example because it is stopped."""
    if not _reap(pid, os.WNOHANG):
        os.kill(pid, signal.SIGKILL)
        _reap(pid)
