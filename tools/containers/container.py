"""A container: where a sandbox's commands run, as its execution server sees it. A sandbox kind is a `Container` class.

A container is started once. Processes then join it by fork, `setns` and `exec` (about 5 ms), so it needs nothing of the
image, and their descriptors, terminals included, are the server's own. The server adopts all orphans below it, so every
process is found, and has no threads, so that it may fork.

When the server dies, the kernel kills the container's runtime and with it all that runs inside. When the container dies
(its limits were exceeded, or the host killed its runtime), `ensure_running` starts it again over the same files.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import resource
import socket
from abc import ABC, abstractmethod
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import msgspec
from ptyprocess import PtyProcess

from ...errors import ErrorInfo, ProrlError, SandboxBroken, SandboxFailed, from_info
from ...system.pauses import wait_running
from ..processes.child import Child, to_the_end
from ..processes.process_tree import children, descendants, kill
from . import forking, tree, users

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from .specification import SandboxSpec

T = TypeVar("T")
ImageFormat = Literal["directory", "sif"]

WORKSPACE = "/workspace"
"""The workspace as commands of an isolated sandbox see it."""
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
RESULT_LIMIT_BYTES = 256 * 2**20
"""Largest result of a `call`."""
READ_BYTES = 256 * 1024
BACKLOG = 128
KILL_LIMIT_S = 10.0
"""Longest time that a killed process may take to end."""
KILL_ROUNDS = 20
"""How often processes are listed and killed, since others may start meanwhile."""
STANDARD_ENVIRONMENT = {
    "PATH": SEARCH_PATH,
    "USER": "agent",
    "LOGNAME": "agent",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
}


class Container(ABC):
    """Where a sandbox's commands run: the base class of every sandbox kind (see `kinds` for how one is registered).

    A kind of Linux namespaces derives from `namespaced.NamespacedContainer` and only says how its program is called;
    others implement the abstract methods below. All instance methods run in the execution server.
    """

    kind: ClassVar[str]
    """The name it is registered under, and that `--sandbox` takes."""
    isolated: ClassVar[bool] = True
    """False: commands share the files, the network and the process table of the service, and no limit binds them."""
    image_formats: ClassVar[frozenset[ImageFormat]] = frozenset({"directory"})
    """The root filesystems it can start from. Empty: it takes none, and `SandboxSpec.image` has no effect."""
    changes_images: ClassVar[bool] = False
    """Whether commands can change the image's own files (`SandboxSpec.writable`), which jobs of task `swe` need."""

    @classmethod
    @abstractmethod
    def problem(cls) -> str | None:
        """Return why this machine cannot make the kind and what to do; None if it can. May block for 10 s."""

    @classmethod
    def version(cls) -> str:
        """Return what `prorl doctor` shows where the kind works."""
        return "works"

    def __init__(self, path: Path, spec: SandboxSpec) -> None:
        self.path = path
        self.spec = spec
        self.workspace = path / "workspace"
        """The host's folder that commands see as the workspace."""
        self._spawned: dict[int, Child] = {}
        self.starts = 0
        """How often it was started."""

    @abstractmethod
    async def start(self) -> None:
        """Start it, or raise a `SandboxFailed` that has the runtime's words."""

    async def ensure_running(self) -> None:  # noqa: B027 - the default for what cannot end
        """Start it again if it ended."""

    async def restart(self, number: int) -> None:  # noqa: B027 - see above
        """Start it again unless `starts` has changed from `number`: then another call has done so."""

    @abstractmethod
    async def close(self) -> None:
        """Kill everything that runs inside and wait for its end; may be called more than once.

        Raises:
            SandboxFailed: something did not end within `KILL_LIMIT_S`.
        """

    @abstractmethod
    def processes(self, at_most: float = math.inf) -> list[int]:
        """Return all processes of the sandbox's commands, as host pids; of more than `at_most`, some."""

    def holding(self) -> list[int]:
        """Return the host pids of the processes that keep the container open; commands are not among them."""
        return []

    @abstractmethod
    def _join(self, report: int, *, limited: bool, user: str = "") -> None:
        """In a forked child: become a process of the container, without rights; write its number to `report`.

        Raises:
            OSError: the container is gone, the kernel refuses, or it has no such user (`forking.ExecFailed`).
        """

    @property
    def home(self) -> str:
        """The workspace's path as commands see it."""
        return WORKSPACE if self.isolated else str(self.workspace)

    @property
    def root(self) -> str:
        """The folder, as commands see it, that file calls stay below."""
        return "/" if self.isolated else str(self.workspace)

    @property
    def directory(self) -> str:
        return self.spec.directory or self.home

    def environment(self) -> dict[str, str]:
        """Return the environment of commands, without any of the host's variables."""
        return {**STANDARD_ENVIRONMENT, "HOME": self.home, **self.spec.environment}

    def spawn(
        self,
        argv: Sequence[str],
        *,
        stdin: int,
        stdout: int,
        stderr: int,
        environment: Mapping[str, str] | None = None,
        directory: str = "",
        pass_fds: Sequence[int] = (),
        user: str = "",
    ) -> Child:
        """Start a program inside, in a process session of its own; the caller passes the child to `end`."""
        user = user or self.spec.user

        def run(report: int) -> None:
            self._join(report, limited=True, user=user)
            self._enter_directory(directory)
            os.setsid()
            for target, source in enumerate((stdin, stdout, stderr)):
                os.dup2(source, target)
            forking.execute(argv, {**self._users_environment(user), **(environment or {})}, pass_fds)

        return self._forked(run, (stdin, stdout, stderr, *pass_fds))

    def terminal(
        self, argv: Sequence[str], directory: str, pass_fds: Sequence[int], dimensions: tuple[int, int]
    ) -> tuple[Child, int]:
        """Start a program inside on a terminal of its own, in plain modes; return it and our side of the terminal."""
        self.unlock()
        ours, report = os.pipe()
        kept = (*pass_fds, *self._kept_descriptors())

        def run() -> None:
            forking.give_up_terminal()
            self._join(report, limited=True, user=self.spec.user)
            forking.take_terminal()
            self._enter_directory(directory)
            forking.execute(argv, self._users_environment(self.spec.user), pass_fds)

        try:
            process = PtyProcess.spawn(
                list(argv),
                env=self.environment(),
                preexec_fn=lambda: forking.child(run, report, kept),
                dimensions=dimensions,
                pass_fds=sorted({report, *kept}),  # it closes all others
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(report)
        descriptor = os.dup(process.fd)
        process.fileobj.close()
        process.closed = True  # PtyProcess.close would sleep for 0.1 s
        try:
            return self._joined(process.pid, ours), descriptor
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError):
                words = f"{argv[0]} cannot be started in a sandbox: {error.strerror}"
                raise SandboxFailed(words, reason="start") from error
            raise

    async def begin(self, start: Callable[[], Awaitable[T]], disturbed: Collection[str] = frozenset({"join"})) -> T:
        """Run `start`, which starts a process inside; if it is disturbed there, once more in a new container.

        The new container is free of the processes that may have caused the failure. `disturbed` are the reasons of a
        `SandboxFailed` after which to retry; too many processes inside are one too.
        """
        await self.ensure_running()
        number = self.starts
        try:
            return await start()
        except BlockingIOError:
            pass  # those inside are as many as may be
        except SandboxFailed as error:
            if error.fields.get("reason") not in disturbed:
                raise
        await self.restart(number)
        return await start()

    async def call(
        self, function: Callable[[], T], timeout_s: float, returns: type[T] | Any = Any, *, user: str = ""
    ) -> T:
        """Run a plain function in a forked child that has joined the container, with no more rights than a command.

        It has the rights of `user`; empty: of the container's root, for files that the service itself places or reads.

        Raises:
            SandboxFailed: the container is gone, the time is over (`reason` is `time`), or a command killed the child
                (`killed`).
            ProrlError: the function raised it.
        """
        return await self.begin(partial(self._call, function, timeout_s, returns, user))

    async def _call(self, function: Callable[[], T], timeout_s: float, returns: Any, user: str) -> T:
        ours, result = os.pipe()

        def run(report: int) -> None:
            # A link in the sandbox may name these: they would be the service's own.
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(nothing, descriptor)
            os.close(nothing)
            self._join(report, limited=False, user=user)
            self._enter_directory("")
            os.close(report)
            _answer(function, result)

        try:
            child = self._forked(run, (result,))
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(result)
        try:
            content = await _read_all(ours, timeout_s)
        finally:
            os.close(ours)
            await to_the_end(self.end(child))
        if content is None:
            raise SandboxFailed(f"a file operation did not end within {timeout_s:g} s", reason="time")
        if not content:
            raise SandboxFailed("a process that worked on the sandbox's files was killed", reason="killed")
        if content[:1] == b"E":
            raise from_info(msgspec.msgpack.decode(content[1:], type=ErrorInfo))
        value: T = msgspec.msgpack.decode(content[1:], type=returns)
        return value

    def listening_socket(self, port: int) -> socket.socket:
        """Return a socket that listens on the 127.0.0.1 that commands see; the caller closes it.

        It is on `port` where they have a network of their own; else on a free port of the host's.

        Raises:
            SandboxFailed: a program inside has the port (`reason` is `port`), or the container is gone.
        """
        del port
        return listen(socket.socket(), 0)

    def kill(self, pid: int) -> None:
        """Kill a process that is not reaped yet, all below it, and all of its process session."""
        most = self.spec.limits.processes if self.isolated else math.inf
        killed: set[int] = set()
        for _ in range(KILL_ROUNDS):
            of_session = [each for each in self.processes(most) if _session(each) == pid]
            found = {pid, *descendants(pid, most), *of_session} - killed
            if not found:
                return
            if len(found) > most:
                break
            kill(*found)
            killed |= found
        self.kill_all()  # it starts new ones faster than they can be killed

    def kill_all(self) -> None:
        for _ in range(KILL_ROUNDS):
            if not (found := self.processes()):
                return
            kill(*found)

    async def end(self, child: Child) -> int:
        """Kill what is left of a process that `spawn` or `terminal` started, wait for its end; return its exit code."""
        if not child.reaped:
            self.kill(child.pid)
        try:
            if not await child.wait(KILL_LIMIT_S):
                raise SandboxFailed(f"process {child.pid} did not end within {KILL_LIMIT_S:g} s of being killed")
            return child.reap()
        finally:
            child.close()
            self._spawned.pop(child.pid, None)

    def reap_orphans(self) -> None:
        """Reap ended processes that this one adopted."""
        for pid in children(os.getpid()):
            if pid not in self._spawned and pid not in self._runtime_pids():
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def unlock(self) -> None:
        """Restore the owner's access to the workspace: a command may have removed it, with `chmod 000 .`.

        Raises:
            SandboxBroken: a command has given it to another user.
        """
        try:
            tree.grant(str(self.workspace), None, 0o700)
        except PermissionError as error:
            raise SandboxBroken(f"the workspace of {self.path.name} is another user's now") from error
        except OSError as error:
            raise SandboxFailed(f"the workspace of {self.path.name} cannot be entered: {error.strerror}") from error

    async def _reap_spawned(self) -> None:
        for child in list(self._spawned.values()):
            if await child.wait(KILL_LIMIT_S):
                child.reap()

    def _runtime_pids(self) -> frozenset[int]:
        return frozenset()

    def _kept_descriptors(self) -> tuple[int, ...]:
        """Return the descriptors that `_join` needs in a forked child."""
        return ()

    def _forked(self, run: Callable[[int], None], kept: Sequence[int]) -> Child:
        """Fork, and call `run` in the child until it executes a program or closes the report; return the child."""
        self.unlock()
        ours, report = os.pipe()
        pid = os.fork()
        if pid == 0:
            forking.child(partial(run, report), report, (*kept, *self._kept_descriptors()))
        os.close(report)
        return self._joined(pid, ours)

    def _joined(self, pid: int, report: int) -> Child:
        """Wait until a forked child has become a process of the container; return that."""
        try:
            inner, number, problem = forking.read_report(report)
        except TimeoutError as error:
            inner, number = error.args[0].inner, 0
            problem = f"it was stopped, or took longer than {forking.JOIN_LIMIT_S:g} s"
            kill(inner or pid)
            self.kill_all()  # what stopped one will stop the next
        if inner:
            os.waitpid(pid, 0)  # it has forked and ended; its child is ours now
        if problem:
            os.waitpid(inner or pid, 0)
            if number:
                raise OSError(number, problem)
            raise SandboxFailed(f"a process could not join its sandbox: {problem}", reason="join")
        child = self._spawned[inner or pid] = Child(inner or pid)
        return child

    def _users_environment(self, user: str) -> dict[str, str]:
        """In a child that has joined: return the environment of a user's commands."""
        if not user:
            return self.environment()
        return {**self.environment(), **users.variables(users.find(user)), **self.spec.environment}

    def _enter_directory(self, directory: str) -> None:
        for path in (directory, self.directory, self.home):
            with suppress(OSError, ValueError):
                os.chdir(path)
                return
        os.chdir("/")

    def _limit(self, pid: int, *, address_space: bool, processes: bool = True) -> None:
        """Set the limits of a process; 0 is this one, a forked child."""
        limits = self.spec.limits
        wanted = {resource.RLIMIT_FSIZE: limits.file_bytes, resource.RLIMIT_CORE: 0}
        if processes:
            wanted[resource.RLIMIT_NPROC] = limits.processes
        if address_space:
            wanted[resource.RLIMIT_AS] = limits.address_space_bytes or limits.memory_bytes
        for kind, value in wanted.items():
            _, hard = resource.prlimit(pid, kind)
            allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.prlimit(pid, kind, (allowed, allowed))


def listen(new: socket.socket, port: int) -> socket.socket:
    """Have a new socket listen on 127.0.0.1, or close it."""
    try:
        new.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of before may linger
        new.bind(("127.0.0.1", port))
        new.listen(BACKLOG)
    except OSError as error:
        new.close()
        why = "is taken: a program inside listens there" if error.errno == errno.EADDRINUSE else str(error.strerror)
        raise SandboxFailed(f"port {port} on a sandbox's 127.0.0.1: {why}", reason="port") from error
    return new


def _answer(function: Callable[[], Any], result: int) -> None:
    """In a forked child: write a function's result, or the error that it raises."""
    try:
        content = b"V" + msgspec.msgpack.encode(function())
    except ProrlError as error:
        content = b"E" + msgspec.msgpack.encode(error.info())
    except Exception as error:  # noqa: BLE001 - the boundary to the waiting process
        content = b"E" + msgspec.msgpack.encode(SandboxFailed(f"{type(error).__name__}: {error}").info())
    with os.fdopen(result, "wb") as pipe:
        pipe.write(content)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


async def _read_all(pipe: int, timeout_s: float) -> bytes | None:
    """Read a pipe to its end; None if that does not come in time, or there is too much."""
    loop = asyncio.get_running_loop()
    content = bytearray()
    ended: asyncio.Future[None] = loop.create_future()
    os.set_blocking(pipe, False)

    def read() -> None:
        try:
            data = os.read(pipe, READ_BYTES)
        except BlockingIOError:
            return
        content.extend(data)
        if (not data or len(content) > RESULT_LIMIT_BYTES) and not ended.done():
            loop.remove_reader(pipe)
            ended.set_result(None)

    loop.add_reader(pipe, read)
    try:
        await wait_running(ended, timeout_s)
    finally:
        loop.remove_reader(pipe)
    return bytes(content) if ended.done() and len(content) <= RESULT_LIMIT_BYTES else None
