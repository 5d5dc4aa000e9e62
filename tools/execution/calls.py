"""`SandboxCalls`: each of its public methods is one request that a stage process may send to an execution server.

The signature is the message: the arguments travel as a map that is checked against their types, and the result comes
back. A client sends one by `ExecutionClient.call`, which has the method's own types.

A method raises `ProrlError` if the request could not be done, and `ValueError` for what a session does not take.
The sessions end with their container, so nothing here closes them at the end.
"""

from __future__ import annotations

import asyncio
import inspect
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_type_hints

import msgspec
from msgspec import Meta

from ...errors import SandboxFailed, ToolSessionLost
from ..containers import files
from ..editor.arguments import EditorArguments  # noqa: TC001 - the signatures are read
from ..editor.editing import apply
from ..editor.outcome import EditHistory, EditOutcome
from ..processes.child import to_the_end
from ..sessions.bash_session import BashResult, BashSession
from ..sessions.cell_session import CellResult, CellSession
from ..sessions.ipython_session import IPythonChoice, IPythonSession
from . import messages
from .command import execute
from .passed_socket import pass_descriptors
from .program import Program

if TYPE_CHECKING:
    from ..containers.container import Container

Session = BashSession | CellSession | Program
S = TypeVar("S", BashSession, CellSession, Program)
Limit = Annotated[float, Meta(ge=-1e9)]
"""Seconds; not NaN. None are left if it is negative."""
Size = Annotated[int, Meta(ge=0)]

FILE_LIMIT_S = 60.0
"""How long a file call may take."""
SESSIONS = 64
"""Most sessions at one time."""


class SandboxCalls:
    def __init__(self, container: Container) -> None:
        self._container = container
        self._place = (container.root, container.home)
        self._sessions: dict[int, Session] = {}
        self._opened = 0
        self._edits = EditHistory(container.directory)
        self._editing = asyncio.Lock()

    async def exec(
        self,
        command: tuple[str, ...],
        timeout_s: Limit,
        stdin: bytes,
        output_limit_bytes: Size,
        environment: dict[str, str],
        directory: str,
        user: str,
    ) -> messages.ExecResult:
        place = (environment, directory, user)
        run = partial(execute, self._container, command, timeout_s, stdin, output_limit_bytes, *place)
        return await self._container.begin(run)

    async def read_file(self, path: str, limit_bytes: Size) -> bytes:
        return await self._container.call(partial(files.read, *self._place, path, limit_bytes), FILE_LIMIT_S, bytes)

    async def write_files(self, contents: dict[str, bytes], mode: Annotated[int, Meta(ge=0, le=0o7777)]) -> None:
        await self._container.call(partial(files.write, *self._place, contents, mode), FILE_LIMIT_S)

    async def upload(self, path: str, archive: bytes) -> None:
        """Unpack a tar archive below a folder."""
        await self._container.call(partial(files.unpack, *self._place, path, archive), FILE_LIMIT_S)

    async def replace_folders(self, folders: dict[str, bytes], user: str) -> None:
        if not self._container.isolated:
            raise SandboxFailed(
                f"sandboxes of kind {self._container.kind} have no folders of their own outside the workspace"
            )
        await self._container.call(partial(files.replace_folders, folders, user), FILE_LIMIT_S)

    async def pack(self, paths: tuple[str, ...], exclude: tuple[str, ...], limit_bytes: Size) -> bytes:
        return await self._container.call(partial(files.pack, paths, exclude, limit_bytes), FILE_LIMIT_S, bytes)

    async def edit(self, arguments: EditorArguments, timeout_s: Limit) -> EditOutcome:
        container, path = self._container, arguments.path
        async with self._editing:
            work = partial(apply, arguments, self._edits.last(path), container.root, container.directory)
            try:
                outcome: EditOutcome = await container.call(work, timeout_s, EditOutcome, user=container.spec.user)
            except SandboxFailed as error:
                if error.fields.get("reason") not in ("time", "killed"):
                    raise
                return EditOutcome(path, f"Nothing was done: {error.message}.", ok=False)
            self._edits.record(outcome)
            return outcome

    async def listen(self, port: Annotated[int, Meta(ge=0, le=65535)], receiver: str) -> None:
        """Pass a socket that listens on the 127.0.0.1 that commands see (see `passed_socket`)."""
        await self._container.ensure_running()
        with self._container.listening_socket(port) as listening:
            pass_descriptors([listening.fileno()], self._container.path, receiver)

    async def start_bash(self) -> int:
        return await self._open(BashSession(self._container, self._limit_bytes))

    async def start_ipython(self, python: str, ipython: IPythonChoice) -> int:
        limit = self._limit_bytes
        return await self._open(
            IPythonSession(self._container, python=python, ipython=ipython, output_limit_bytes=limit)
        )

    async def start_kernel(self, argv: tuple[str, ...]) -> int:
        """Start a Jupyter kernel by its command line; empty: ipykernel's."""
        # Jupyter's client is large: only a server that needs it imports it.
        from ..sessions.kernel_session import IPYKERNEL, KernelSession

        limit = self._limit_bytes
        return await self._open(KernelSession(self._container, argv=argv or IPYKERNEL, output_limit_bytes=limit))

    async def run_bash(self, session: int, command: str, timeout_s: Limit, wait_s: Limit | None) -> BashResult:
        return await self._session(session, BashSession).run(command, timeout_s, wait_s)

    async def send_bash(self, session: int, data: bytes, timeout_s: Limit, wait_s: Limit | None) -> BashResult:
        """Type on the terminal of a bash whose command is running."""
        return await self._session(session, BashSession).send(data, timeout_s, wait_s)

    async def run_cell(self, session: int, code: str, timeout_s: Limit) -> CellResult:
        cells = self._session(session, CellSession)  # type: ignore[type-abstract]
        return await cells.run(code, timeout_s)

    async def start_program(
        self, command: tuple[str, ...], environment: dict[str, str], directory: str, receiver: str
    ) -> int:
        """Start a program, and pass its standard input and output (see `passed_socket`)."""
        return await self._open(Program(self._container, command, environment, directory, receiver))

    async def end_program(self, session: int, wait_s: float) -> messages.ExecResult:
        """End a program that does not end on its own within `wait_s`; return its exit code and standard error."""
        result = await self._session(session, Program).end(wait_s)
        self._sessions.pop(session, None)
        return result

    async def close_session(self, session: int) -> None:
        if (closing := self._sessions.pop(session, None)) is not None:
            await closing.close()

    async def end_processes(self) -> None:
        """Kill all that runs inside; the next call starts the container again."""
        await self._container.close()

    @property
    def _limit_bytes(self) -> int:
        return self._container.spec.output_limit_bytes

    async def _open(self, session: Session) -> int:
        """Start a session; return its number."""
        if len(self._sessions) >= SESSIONS:
            raise SandboxFailed(f"a sandbox may have {SESSIONS} tool sessions; close one first")
        self._opened += 1
        number = self._opened
        self._sessions[number] = session
        try:
            await session.start()
        except BaseException:
            del self._sessions[number]
            await to_the_end(session.close())
            raise
        return number

    def _session(self, number: int, kind: type[S]) -> S:
        session = self._sessions.get(number)
        if not isinstance(session, kind):
            raise ToolSessionLost(f"this {kind.name} is closed")
        return session


_HINTS = {
    name: get_type_hints(method, include_extras=True)
    for name, method in vars(SandboxCalls).items()
    if inspect.iscoroutinefunction(method) and not name.startswith("_")
}
RESULTS: dict[str, Any] = {name: hints.pop("return") for name, hints in _HINTS.items()}
"""The type of each call's result."""
REQUESTS = {name: msgspec.defstruct(name, list(hints.items()), tag=True) for name, hints in _HINTS.items()}
"""The message of each call."""
_CONTROLS = (messages.Take, messages.Renew, messages.FreeDisk, messages.Close, messages.Cancel)
_ANY_REQUEST: Any = Union[(*REQUESTS.values(), *_CONTROLS)]
decode_request = msgspec.msgpack.Decoder(_ANY_REQUEST).decode
