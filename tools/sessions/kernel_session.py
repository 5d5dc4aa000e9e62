"""A persistent Jupyter kernel in a sandbox, of any language: the session behind the tool `jupyter`.

`jupyter_client` connects to it over Unix sockets, which the kernel binds in a folder of the sandbox's own /tmp; there
is no TCP port. An agent may put links there, so no socket is opened by its path: when inotify reports a socket, it is
opened without following links, and `jupyter_client` connects to that descriptor. `KernelManager`, which connects by
path before the kernel has bound, is therefore not used; `Container` and `CellSession` start, watch, interrupt and
restart the process.

No Python thread is started: no heartbeat channel, and no message is sent without a copy. libzmq has two threads of its
own, which run no Python and hold none of its locks, so this process may still fork.

A cell is done when the kernel has replied and reports idle. ipykernel may send what a child process wrote a little
later; messages with another cell's number are dropped.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import secrets
import stat
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.session import Session

from ...errors import SandboxFailed
from ..processes.output import OUTPUT_LIMIT_BYTES, HeadTail
from .cell_session import IMAGES_LIMIT_BYTES, START_LIMIT_S, CellOutcome, CellProcess, CellSession
from .ipython_driver import best_text, png_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..containers.container import Container
    from .cell_session import Images

_LAUNCH = """
import os, zmq
from ipykernel import iostream, kernelapp

def listen(self):
    self._pipe_uuid, self._pipe_port = os.urandom(16), "ipc://@" + os.urandom(16).hex()
    pipe = self.socket.context.socket(zmq.PULL)
    pipe.linger = 0
    pipe.bind(self._pipe_port)
    self._pipe_in = iostream.ZMQStream(pipe, self.io_loop)
    self._pipe_in.on_recv(self._handle_pipe_msg)

def connect(self):
    context = zmq.Context()
    pipe = context.socket(zmq.PUSH)
    pipe.linger = 3000
    pipe.connect(self._pipe_port)
    return context, pipe

iostream.IOPubThread._setup_pipe_in, iostream.IOPubThread._setup_pipe_out = listen, connect
kernelapp.launch_new_instance()
"""
"""ipykernel sends what forked children print through a TCP port of its own (7.4, iostream.py); here it is a socket."""
IPYKERNEL = ("python3", "-c", _LAUNCH, "-f", "{connection_file}")
CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
USED_CHANNELS = ("shell", "iopub")
MESSAGE_LIMIT_BYTES = 2 * IMAGES_LIMIT_BYTES
NAME_LIMIT = 200
"""Most characters of an error's name."""
WORDS_LIMIT_BYTES = 8 * 1024
"""How much of the kernel process's own output is kept."""
ASK_AGAIN_S = 0.5
"""A kernel's first answers are lost if they precede our subscription; it is asked again."""
IDLE_LIMIT_S = 2.0
"""How far apart a kernel's reply and its idle message may come. Heavy output can make us miss that message."""
NO_COPY_BYTES = 2**62
"""Larger messages are sent without a copy, which starts a thread."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_IN_CREATE, _IN_FLAGS = 0x100, os.O_NONBLOCK | os.O_CLOEXEC
_libc = ctypes.CDLL(None, use_errno=True)


class Client(AsyncKernelClient):
    """A client that connects to sockets which are open descriptors."""

    sockets: dict[str, int]

    def _make_url(self, channel: str) -> str:
        return f"ipc:///proc/self/fd/{self.sockets[channel]}"


class KernelProcess(CellProcess):
    def __init__(
        self, container: Container, output: HeadTail, images: Images, argv: Sequence[str], directory: str
    ) -> None:
        super().__init__(container, output, images)
        self._messages: set[str] = set()
        """The running cell's message; those that ask whether it is ready."""
        self._error = ""
        self._missing = {"idle"}
        """What the kernel has yet to report of the running cell: `reply`, `idle`."""
        self._words = HeadTail(WORDS_LIMIT_BYTES)
        self._sockets: dict[str, int] = {}
        self._bound: asyncio.Future[None] = self._loop.create_future()
        """All sockets exist, or the process ended."""
        self._readers: list[asyncio.Task[None]] = []
        with ExitStack() as resources:
            self._open(resources, argv, directory)
            self._resources = resources.pop_all()

    def _open(self, resources: ExitStack, argv: Sequence[str], directory: str) -> None:
        name = f"kernel-{secrets.token_hex(8)}"
        host_folder = self._container.path / "tmp" / name
        host_folder.mkdir(0o700)
        self._folder = os.open(host_folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        resources.callback(os.close, self._folder)
        if not self._container.isolated:
            # The path may be too long for a socket; where nothing is isolated the descriptor is not a way out.
            folder, prefix, passed = str(host_folder), f"/proc/self/fd/{self._folder}/k", [self._folder]
        else:
            folder, prefix, passed = f"/tmp/{name}", f"/tmp/{name}/k", []  # noqa: S108 - the sandbox's own
        self._key = secrets.token_hex(32)
        ports = {f"{channel}_port": number for number, channel in enumerate(CHANNELS, 1)}
        about = {"transport": "ipc", "ip": prefix, "key": self._key, "signature_scheme": "hmac-sha256", **ports}
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        file = os.open("connection.json", flags, 0o600, dir_fd=self._folder)
        with os.fdopen(file, "wb") as connection_file:
            connection_file.write(msgspec.json.encode(about))
        self._watch(resources)
        self._pipe, written = os.pipe()
        resources.callback(os.close, self._pipe)
        os.set_blocking(self._pipe, False)
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            self._child = self._container.spawn(
                [part.replace("{connection_file}", f"{folder}/connection.json") for part in argv],
                stdin=nothing,
                stdout=written,
                stderr=written,
                environment={"IPYTHONDIR": f"{folder}/ipython", "JUPYTER_RUNTIME_DIR": f"{folder}/jupyter"},
                directory=directory,
                pass_fds=passed,
            )
        except OSError as error:
            raise SandboxFailed(
                f"the sandbox has no {argv[0]} ({error.strerror}); use an image that has the kernel", reason="kernel"
            ) from error
        finally:
            os.close(written)
            os.close(nothing)
        self._child.when_ended(self._on_end)
        self._loop.add_reader(self._pipe, self._on_pipe)
        resources.callback(self._loop.remove_reader, self._pipe)

    def _watch(self, resources: ExitStack) -> None:
        """Watch the folder for the sockets that the kernel binds."""
        self._inotify = _libc.inotify_init1(_IN_FLAGS)
        if self._inotify < 0:
            raise SandboxFailed(f"no more folders can be watched: {os.strerror(ctypes.get_errno())}", reason="inotify")
        resources.callback(os.close, self._inotify)
        if _libc.inotify_add_watch(self._inotify, f"/proc/self/fd/{self._folder}".encode(), _IN_CREATE) < 0:
            raise SandboxFailed(f"no more folders can be watched: {os.strerror(ctypes.get_errno())}", reason="inotify")
        self._loop.add_reader(self._inotify, self._on_created)
        resources.callback(self._loop.remove_reader, self._inotify)

    async def _get_ready(self) -> None:
        """Wait until it has run an empty cell.

        Raises:
            SandboxFailed: the kernel is missing, or did not get ready in time (`reason`).
        """
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await self._run_first_cell()
        except TimeoutError:
            raise SandboxFailed(f"the kernel did not get ready within {START_LIMIT_S:g} s", reason="time") from None
        if self.outcome() is None:
            words = self._words.content().decode("utf-8", "replace").strip()
            raise SandboxFailed(
                f"the kernel ended as it started: {words or 'it said nothing'}; install it in the image "
                "(pip install ipykernel), or name another one",
                reason="kernel",
            )

    async def _run_first_cell(self) -> None:
        await self._bound
        if self._child.ended:
            return
        context = zmq.asyncio.Context()
        self._resources.callback(context.destroy, 0)
        context.setsockopt(zmq.MAXMSGSIZE, MESSAGE_LIMIT_BYTES)
        session = Session(key=self._key.encode(), copy_threshold=NO_COPY_BYTES)
        self._client = Client(context=context, session=session)
        self._client.sockets = self._sockets
        self._client.start_channels(stdin=False, hb=False, control=False)
        for channel in USED_CHANNELS:
            self._readers.append(asyncio.ensure_future(self._read(getattr(self._client, f"{channel}_channel"))))
        while not self._done.done():
            self._messages.add(self._client.execute("", silent=True, store_history=False, allow_stdin=False))
            await self.wait(ASK_AGAIN_S)
        self._words.clear()

    def _forget(self) -> None:
        self._error = ""
        self._words.clear()

    def _run(self, code: str) -> None:
        self._missing = {"reply", "idle"}
        self._messages = {self._client.execute(code, allow_stdin=False, stop_on_error=False)}

    async def close(self) -> int:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        try:
            return await super().close()
        finally:
            for descriptor in self._sockets.values():
                os.close(descriptor)
            self._sockets.clear()

    async def _read(self, channel: Any) -> None:
        while True:
            try:
                message = await channel.get_msg()
                if message["parent_header"].get("msg_id") in self._messages and not self._done.done():
                    self._take(message["msg_type"], message["content"])
            except Exception as error:  # noqa: BLE001 - a cell can send anything, and jupyter_client checks little of it
                self._spoil(f"it sent what is not a message of Jupyter's ({type(error).__name__})")
                return

    def _take(self, kind: str, content: dict[str, Any]) -> None:
        match kind:
            case "stream":
                self._output.append(content["text"].encode("utf-8", "replace"))
            case "execute_result" | "display_data" | "update_display_data":
                if image := content["data"].get("image/png"):
                    self._images.append(png_bytes(image))
                if text := best_text(content["data"]):
                    self._output.append(f"{text}\n".encode("utf-8", "replace"))
            case "error":
                self._error = str(content["ename"])[:NAME_LIMIT] or "error"
                lines = _COLOURS.sub("", "\n".join(content["traceback"]) or f"{self._error}: {content['evalue']}")
                self._output.append(f"{lines}\n".encode("utf-8", "replace"))
            case "status" if content["execution_state"] == "idle":
                self._said("idle")
            case "execute_reply":
                if any(each.get("source") == "ask_exit" for each in content.get("payload", ())):
                    self._spoil("exit() was called")
                self._said("reply")

    def _said(self, what: str) -> None:
        if what in self._missing and not self.fault:
            self._missing.discard(what)
            self._loop.call_later(IDLE_LIMIT_S if self._missing else 0, self._finish, self._done)

    def _finish(self, done: asyncio.Future[CellOutcome | None]) -> None:
        if not done.done():
            done.set_result(CellOutcome(self._error, ""))

    def _on_created(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._inotify, 4096)
        for number, channel in enumerate(CHANNELS, 1):
            if channel in USED_CHANNELS and channel not in self._sockets:
                try:
                    found = os.open(f"k-{number}", os.O_PATH | os.O_NOFOLLOW, dir_fd=self._folder)
                except FileNotFoundError:
                    continue
                if stat.S_ISSOCK(os.fstat(found).st_mode):
                    self._sockets[channel] = found
                else:
                    os.close(found)
        if len(self._sockets) == len(USED_CHANNELS):
            self._loop.remove_reader(self._inotify)
            if not self._bound.done():
                self._bound.set_result(None)

    def _on_pipe(self) -> None:
        try:
            data = os.read(self._pipe, WORDS_LIMIT_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._pipe)
        self._words.append(data)

    def _on_end(self) -> None:
        if self._freed:
            return
        self._on_pipe()
        if not self._bound.done():
            self._bound.set_result(None)
        if not self._done.done():
            self._output.append(self._words.content())  # such as where a fault came from
            self._done.set_result(None)


class KernelSession(CellSession):
    """A live Jupyter kernel (see `CellSession`)."""

    def __init__(
        self,
        container: Container,
        *,
        argv: Sequence[str] = IPYKERNEL,
        output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
    ) -> None:
        super().__init__(container, output_limit_bytes)
        self._argv = tuple(argv)

    def _new_process(self) -> CellProcess:
        return KernelProcess(self._container, self._output, self._images, self._argv, self._directory)
