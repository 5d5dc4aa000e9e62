"""Carries out the requests of a sandbox's clients, and owns the tool sessions; sockets and leases are elsewhere.

The sessions end with their container, so the handler does not close them at the end.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import SandboxFailed, ToolSessionLost
from ..containers import files
from ..editor.editing import apply
from ..editor.outcome import EditHistory, EditOutcome
from ..processes.child import to_the_end
from ..sessions.bash_session import BashSession
from ..sessions.cell_session import CellSession
from ..sessions.ipython_session import IPythonSession
from . import messages
from .command import execute
from .passed_socket import pass_socket

if TYPE_CHECKING:
    import msgspec

    from ..containers.container import Container

S = TypeVar("S", BashSession, CellSession)

FILE_LIMIT_S = 60.0
"""How long a file call may take."""
SESSIONS = 64
"""Most sessions at one time."""


class SandboxRequestHandler:
    def __init__(self, container: Container) -> None:
        self._container = container
        self._sessions: dict[int, BashSession | CellSession] = {}
        self._opened = 0
        self._edits = EditHistory(container.directory)
        self._editing = asyncio.Lock()

    async def do(self, request: Any) -> msgspec.Struct:
        """Return the answer to a request.

        Raises:
            ProrlError: it could not be done.
            ValueError: it asks for what a session does not take; nothing was done.
        """
        match request:
            case messages.ReadFile() | messages.WriteFiles() | messages.Upload():
                return await self._on_files(request)
            case messages.Edit():
                return await self._edit(request)
            case messages.Exec():
                return await self._container.begin(partial(execute, self._container, request))
            case messages.Listen(port, receiver):
                await self._container.ensure_running()
                with self._container.listening_socket(port) as listening:
                    pass_socket(listening, self._container.path, receiver)
                return messages.Done()
            case messages.StartBash() | messages.StartIPython() | messages.StartKernel():
                return await self._open(self._new_session(request))
            case messages.RunBash(session, command, timeout_s, wait_s):
                return await self._session(session, BashSession).run(command, timeout_s, wait_s)
            case messages.SendBash(session, data, timeout_s, wait_s):
                return await self._session(session, BashSession).send(data, timeout_s, wait_s)
            case messages.RunCell(session, code, timeout_s):
                cells = self._session(session, CellSession)  # type: ignore[type-abstract]
                return await cells.run(code, timeout_s)
            case messages.CloseSession():
                if (closing := self._sessions.pop(request.session, None)) is not None:
                    await closing.close()
                return messages.Done()
            case messages.EndProcesses():
                await self._container.close()  # whoever needs it next starts it again
                return messages.Done()
        raise AssertionError(f"a request without a handler: {request!r}")

    async def _on_files(self, request: messages.ReadFile | messages.WriteFiles | messages.Upload) -> msgspec.Struct:
        container = self._container
        root, home = container.root, container.home
        match request:
            case messages.ReadFile():
                read = partial(files.read, root, home, request.path, request.limit_bytes)
                return messages.Content(await container.call(read, FILE_LIMIT_S, bytes))
            case messages.WriteFiles():
                await container.call(partial(files.write, root, home, request.files, request.mode), FILE_LIMIT_S)
            case messages.Upload():
                await container.call(partial(files.unpack, root, home, request.path, request.archive), FILE_LIMIT_S)
        return messages.Done()

    async def _edit(self, request: messages.Edit) -> EditOutcome:
        container, arguments = self._container, request.arguments
        async with self._editing:
            work = partial(apply, arguments, self._edits.last(arguments.path), container.root, container.directory)
            try:
                outcome: EditOutcome = await container.call(work, request.timeout_s, EditOutcome)
            except SandboxFailed as error:
                if error.fields.get("reason") not in ("time", "killed"):
                    raise
                return EditOutcome(arguments.path, f"Nothing was done: {error.message}.", ok=False)
            self._edits.record(outcome)
            return outcome

    def _new_session(
        self, request: messages.StartBash | messages.StartIPython | messages.StartKernel
    ) -> BashSession | CellSession:
        limit = self._container.spec.output_limit_bytes
        match request:
            case messages.StartBash():
                return BashSession(self._container, limit)
            case messages.StartIPython():
                return IPythonSession(
                    self._container, python=request.python, ipython=request.ipython, output_limit_bytes=limit
                )
            case messages.StartKernel():
                # Jupyter's client is large: only a server that needs it has it.
                from ..sessions.kernel_session import IPYKERNEL, KernelSession

                return KernelSession(self._container, argv=request.argv or IPYKERNEL, output_limit_bytes=limit)

    async def _open(self, session: BashSession | CellSession) -> messages.Opened:
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
        return messages.Opened(number)

    def _session(self, number: int, kind: type[S]) -> S:
        session = self._sessions.get(number)
        if not isinstance(session, kind):
            raise ToolSessionLost(f"this {kind.name} is closed")
        return session
