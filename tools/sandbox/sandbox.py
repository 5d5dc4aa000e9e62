"""A sandbox as a stage process sees it: the client of the sandbox's execution server.

    ROOT/NAME/              the sandbox's own folder, 0700: `handle.path`
    ROOT/NAME/workspace/    what its commands see as their working directory
    ROOT/NAME/tmp/          what they see as /tmp
    ROOT/NAME/server.sock   the execution server's

The process that made or attached to a sandbox holds it: it renews the lease while its loop runs, until it hands the
sandbox on (`release`), closes it, or another process attaches. A sandbox that no process holds is ended by its server.
Commands may do anything to their workspace: the host's side never follows a link in it.
"""

from __future__ import annotations

import asyncio
import fcntl
import io
import re
import tarfile
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ...errors import SandboxFailed
from ..containers import tree
from ..containers.container import WORKSPACE
from ..execution import messages
from ..execution.calls import SandboxCalls
from ..execution.client import RemoteBash, RemoteCells, RemoteProgram
from ..execution.passed_socket import receive, receive_socket
from ..execution.server import LOCK
from ..processes.child import to_the_end
from ..processes.output import OUTPUT_LIMIT_BYTES

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from ...wire.messages.jobs import SandboxHandle
    from ..containers.container import Container
    from ..containers.specification import SandboxSpec
    from ..editor.arguments import EditorArguments
    from ..editor.outcome import EditOutcome
    from ..execution.client import ExecutionClient
    from ..execution.messages import ExecResult
    from ..sessions.ipython_session import IPythonChoice

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
"""Names of sandboxes. None starts with a dot: such folders are being made or removed."""
READ_LIMIT_BYTES = 16 * 2**20
PACK_LIMIT_BYTES = 64 * 2**20
CLOSE_LIMIT_S = 30.0
COPY_LIMIT_S = 60.0
MAKER_LOCK = "maker.lock"
"""Held by the process that makes a sandbox's folder, until an execution server has the folder."""
LEASE_S = 30.0
"""How long a sandbox outlives a holder that died or hangs."""
RENEWALS = 3
"""How often a lease is renewed in its time."""
CHECK_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "HOME": "/nonexistent",
        "PYTHONNOUSERSITE": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPYCACHEPREFIX": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": "core.fsmonitor",
        "GIT_CONFIG_VALUE_0": "false",
        "GIT_CONFIG_KEY_1": "core.hooksPath",
        "GIT_CONFIG_VALUE_1": "/dev/null",
    }
)
"""For `Sandbox.exec` of a program that judges a workspace which an agent wrote.

There is no home, where the agent could have left `usercustomize.py`, `.gitconfig` or `.bashrc`; Python imports nothing
from the working directory or a script's folder, nor cached bytecode; git runs no hook or monitor. A judge that imports
from the workspace sets `PYTHONPATH=.`. Programs that read their configuration from the working directory
(`conftest.py`, `Makefile`) are not covered: such a judge would still trust files the agent can change.
"""


class ListeningSocket(NamedTuple):
    listener: socket.socket
    """Accepts the connections of a sandbox's commands; not blocking. Its owner closes it."""
    url: str
    """What commands connect to, such as http://127.0.0.1:8000."""


class Sandbox:
    """Where the tools of one job act. Made by `Sandboxes.create`, reached from other processes by `Sandboxes.attach`.

    Args:
        client: the connection to its execution server; closed with the sandbox.
        handle: where it is.
        spec: how it was made.
        container: the class of its kind.
        lease_s: how long it outlives a holder that died.
        copy: makes a copy of it under a name.
    """

    def __init__(
        self,
        client: ExecutionClient,
        handle: SandboxHandle,
        spec: SandboxSpec,
        container: type[Container],
        lease_s: float,
        copy: Callable[[Sandbox, str, float], Awaitable[Sandbox]],
    ) -> None:
        self._client = client
        self._container = container
        self._lease_s = lease_s
        self._copy = copy
        self._renewal: asyncio.TimerHandle | None = None
        self._lost: Callable[[], None] | None = None
        self.spec = spec
        self.handle = handle
        """Enough for another process of the node to attach."""
        self.path = Path(handle.path)
        self.workspace = self.path / "workspace"
        """The host's folder that commands see as the workspace."""

    @property
    def kind(self) -> str:
        """What it is made of, such as `bubblewrap`."""
        return self.handle.kind

    @property
    def isolated(self) -> bool:
        """Whether commands are isolated from the host's files and processes; see `Container.isolated`."""
        return self._container.isolated

    @property
    def changes_images(self) -> bool:
        """Whether commands can change the image's own files, if the spec allows it; see `Container.changes_images`."""
        return self._container.changes_images

    @property
    def directory(self) -> str:
        """The path of the workspace as commands see it."""
        return WORKSPACE if self.isolated else str(self.workspace)

    @property
    def temporary(self) -> str:
        """The path of the sandbox's own /tmp as commands see it."""
        return "/tmp" if self.isolated else str(self.path / "tmp")  # noqa: S108 - it is the sandbox's

    @property
    def has_own_network(self) -> bool:
        """Whether no process outside can reach a socket on its 127.0.0.1."""
        return self.isolated and not self.spec.network

    @property
    def held(self) -> bool:
        """Whether this process holds it."""
        return not self._client.closed

    async def take(self) -> None:
        """Hold it, and renew its lease from now on; a `SandboxFailed` says that it is gone."""
        await self._client.ask(messages.Take(self._lease_s))
        self._client.when_lost(self._on_lost)
        self._renew_later()

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Call back once when this process no longer holds it, unless it released or closed it itself."""
        self._lost = callback

    async def exec(
        self,
        command: Sequence[str],
        timeout_s: float,
        stdin: bytes = b"",
        output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
        environment: Mapping[str, str] | None = None,
        directory: str = "",
        user: str = "",
    ) -> ExecResult:
        """Run one command to its end, with pipes for its input and outputs.

        Its process session is killed at the end, at the time limit, and when the call is cancelled. Other processes in
        the sandbox can interfere with it: a program that judges an agent's work runs in a `copy`.

        Args:
            command: the program, by path or as found in PATH, and its arguments.
            timeout_s: after that it is killed.
            stdin: its whole input.
            output_limit_bytes: how much is kept of each of its two outputs.
            environment: variables added to the sandbox's, or replacing them.
            directory: where it starts; where all commands start if it is empty or missing.
            user: runs the command; empty: `SandboxSpec.user`. Exit code 126: the sandbox has no such user.

        Raises:
            SandboxFailed: the sandbox is gone: the result says nothing about the command.
            SandboxLimitExceeded: the sandbox was ended, since its commands used too much.
        """
        if isinstance(command, str):
            raise TypeError("the command is a list of words; for a line of shell give ['bash', '-c', line]")
        variables = dict(environment or {})
        return await self._client.call(
            SandboxCalls.exec, tuple(command), timeout_s, stdin, output_limit_bytes, variables, directory, user
        )

    async def bash(self) -> RemoteBash:
        """Start a bash; the caller closes it, or the sandbox does.

        Raises:
            SandboxFailed: it did not come to its prompt, or the image has none; the message has its words.
        """
        return self.bash_session(await self._client.call(SandboxCalls.start_bash))

    def bash_session(self, number: int) -> RemoteBash:
        """Return the bash of that number, which this or another process started."""
        return RemoteBash(self._client, number)

    async def ipython(self, python: str = "", ipython: IPythonChoice = "fallback") -> RemoteCells:
        """Start an IPython shell (see `ipython_session.IPythonSession`).

        Args:
            python: the interpreter; empty: `python3`, or for kind `process` this process's own.
            ipython: `require`: an image without IPython is an error; `fallback`: it gets a plain Python shell.

        Raises:
            SandboxFailed: the image has no Python, or not what is required.
        """
        return self.cell_session(await self._client.call(SandboxCalls.start_ipython, python, ipython))

    async def kernel(self, argv: Sequence[str] = ()) -> RemoteCells:
        """Start a Jupyter kernel of any language (see `kernel_session.KernelSession`).

        Args:
            argv: its command line as in a kernel spec, `{connection_file}` included; empty: the image's ipykernel.

        Raises:
            SandboxFailed: the image does not have it; the message has its words.
        """
        return self.cell_session(await self._client.call(SandboxCalls.start_kernel, tuple(argv)))

    def cell_session(self, number: int) -> RemoteCells:
        """Return the session of that number, which this or another process started."""
        return RemoteCells(self._client, number)

    async def program(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, directory: str = ""
    ) -> RemoteProgram:
        """Start a program whose standard input and output are pipes of this process; the caller ends it.

        What it writes to its standard error is read, and its head and tail are kept.

        Args:
            command: as for `exec`, and so are the others.
            environment: variables added to the sandbox's, or replacing them.
            directory: where it starts.

        Raises:
            SandboxFailed: the sandbox is gone, or has no such program (`reason` is `image`).
        """
        started: list[int] = []

        async def ask(receiver: str) -> None:
            arguments = (tuple(command), dict(environment or {}), directory, receiver)
            started.append(await self._client.call(SandboxCalls.start_program, *arguments))

        stdin, stdout = await receive(self.path, 2, ask)
        return RemoteProgram(self._client, started[0], stdin, stdout)

    async def edit(self, arguments: EditorArguments, timeout_s: float) -> EditOutcome:
        """View or change a file as the editor tool does (see `editor.editing.apply`).

        Raises:
            SandboxFailed: the sandbox is gone, or the time is over.
        """
        return await self._client.call(SandboxCalls.edit, arguments, timeout_s)

    async def read_file(self, path: str, limit_bytes: int = READ_LIMIT_BYTES) -> bytes:
        """Read a regular file; a relative path is one of the workspace (see `files.read`).

        Raises:
            SandboxFailed: the path has `..` or leads through a symbolic link; or the file is missing (`reason` is
                `missing`), not regular, or larger than `limit_bytes`.
        """
        return await self._client.call(SandboxCalls.read_file, path, limit_bytes)

    async def write_file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a regular file, with the folders that lead to it (see `read_file`).

        Raises:
            SandboxFailed: as for `read_file`; or the disk refuses it.
        """
        await self.write_files({path: data}, mode)

    async def write_files(self, files: Mapping[str, bytes], mode: int = 0o644) -> None:
        """Write several files at once; cheaper than one after the other (see `write_file`)."""
        for path, data in files.items():
            if not isinstance(data, bytes | bytearray | memoryview):
                kind = type(data).__name__
                raise TypeError(f"{path}: the content must be bytes, such as text.encode(), and not {kind}")
        await self._client.call(SandboxCalls.write_files, dict(files), mode)

    async def upload(self, source: Path, path: str = ".") -> None:
        """Copy a file, or what is in a folder, of the host into the folder `path`; `.` is the workspace.

        Modes and symbolic links are kept, owners are not.

        Raises:
            SandboxFailed: the source is missing or larger than `messages.UPLOAD_LIMIT_BYTES`; or as for `write_file`.
        """
        archive = await asyncio.to_thread(_archive, Path(source))
        await self._client.call(SandboxCalls.upload, path, archive)

    async def replace_folders(self, folders: Mapping[str, bytes], user: str = "") -> None:
        """Replace folders outside the workspace by the contents of tar archives.

        Files and links that commands left at these paths, or on the way to them, are removed and redirect nothing.

        Args:
            folders: archive by absolute path; empty bytes: an empty folder.
            user: who may write to the folders; empty: the sandbox's own user. It owns them, or, where the service runs
                as root and this root has no capabilities, all users may write.

        Raises:
            SandboxFailed: the kind is not isolated, its root is read-only, or the disk refuses it.
        """
        await self._client.call(SandboxCalls.replace_folders, dict(folders), user)

    async def pack(
        self, paths: Sequence[str], exclude: Sequence[str] = (), limit_bytes: int = PACK_LIMIT_BYTES
    ) -> bytes:
        """Return a tar archive, relative to `/`, of the files and folders at absolute paths, for another sandbox.

        Only regular files, folders and links among them are packed; a missing path is left out.

        Args:
            paths: absolute.
            exclude: patterns of `tar --exclude`, relative to each path.
            limit_bytes: most bytes of the archive.

        Raises:
            SandboxFailed: it would be larger (`reason` is `size`).
        """
        return await self._client.call(SandboxCalls.pack, tuple(paths), tuple(exclude), limit_bytes)

    async def unpack(self, archive: bytes, path: str = "/") -> None:
        """Write what is in a tar archive below a folder (see `upload`)."""
        await self._client.call(SandboxCalls.upload, path, archive)

    async def listen(self, port: int = 8000) -> ListeningSocket:
        """Listen on the 127.0.0.1 that commands see, so that they can reach this process, and nothing else.

        Only commands of this sandbox can connect, and each sandbox has the port for itself. The socket accepts no more
        connections after `end_processes` and the container's end. A sandbox that shares the host's network (kind
        `process`, or `SandboxSpec.network`) gets a free port of the host's 127.0.0.1 instead.

        Args:
            port: on which, where the network is the sandbox's own.

        Raises:
            SandboxFailed: a program inside listens there already (`reason` is `port`), or the sandbox is gone.
        """
        passed = await receive_socket(self.path, lambda name: self._client.call(SandboxCalls.listen, port, name))
        return ListeningSocket(passed, f"http://127.0.0.1:{passed.getsockname()[1]}")

    async def copy(self, name: str, timeout_s: float = COPY_LIMIT_S) -> Sandbox:
        """Make a new sandbox like this one under that name, with a copy of the workspace (see `tree.copy_tree`).

        Changes elsewhere, such as in the image, are not copied. Copying takes at most `timeout_s`.

        Raises:
            SandboxFailed: the name is not one or is taken; or the workspace cannot be copied, where `reason` is `tree`
                if what commands left in it is the cause (too large, too deep), else `time` or `system`.
        """
        return await self._copy(self, name, min(timeout_s, COPY_LIMIT_S))

    async def end_processes(self) -> None:
        """Kill all that runs inside; files stay, and tool sessions restart at their next call.

        Call it before a program judges an agent's work: a process that the agent left could change or kill the judge.

        Raises:
            SandboxFailed: the sandbox is gone, or something did not end.
        """
        await self._client.call(SandboxCalls.end_processes)

    async def check(self) -> None:
        """Check that it still runs.

        Raises:
            SandboxFailed: it is gone, or it was ended and its files removed, since the disk was full.
            SandboxLimitExceeded: it was ended, since its commands used too much.
        """
        await self._client.ask(messages.Renew())

    def release(self) -> None:
        """Stop holding it: it ends unless another process attaches to it within its lease."""
        self._stop_renewing()
        self._client.close()

    async def close(self) -> None:
        """End all that runs in it, and remove it with its content; may be called more than once.

        Raises:
            SandboxFailed: it is not done within `CLOSE_LIMIT_S`.
        """
        await to_the_end(self._close())

    async def _close(self) -> None:
        self._stop_renewing()
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._client.ask(messages.Close())
        except TimeoutError:
            raise SandboxFailed(f"the sandbox {self.path.name} did not end within {CLOSE_LIMIT_S:g} s") from None
        except SandboxFailed:
            # Its server is gone, and may have left its folder; or another process holds the sandbox now.
            await asyncio.to_thread(remove_abandoned, self.path)
        finally:
            self._client.close()
            await self._client.wait_closed()

    def _renew_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._renewal = loop.call_later(self._lease_s / RENEWALS, self._renew)

    def _renew(self) -> None:
        self._client.tell(messages.Renew())
        self._renew_later()

    def _on_lost(self) -> None:
        self._stop_renewing()
        if self._lost is not None:
            self._lost()

    def _stop_renewing(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()


def remove_abandoned(path: Path) -> None:
    """Remove a sandbox's folder, unless an execution server serves it, or it is still being made."""
    for name in (LOCK, MAKER_LOCK):
        with suppress(FileNotFoundError, NotADirectoryError), (path / name).open("r") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return
    tree.remove_tree(path, CLOSE_LIMIT_S)


def _archive(source: Path) -> bytes:
    content = io.BytesIO()

    def check(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        if content.tell() + entry.size > (limit := messages.UPLOAD_LIMIT_BYTES):
            raise SandboxFailed(f"an upload may have {limit} bytes; bind a folder, or build an image", reason="size")
        return entry

    try:
        with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path in sorted(source.iterdir()) if source.is_dir() else [source]:
                archive.add(path, path.name, filter=check)
    except OSError as error:
        raise SandboxFailed(f"{source} cannot be uploaded: {error.strerror}", path=str(source)) from error
    return content.getvalue()
