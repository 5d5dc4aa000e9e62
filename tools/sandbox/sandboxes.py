"""The sandboxes of one node: made, and attached to, below one private folder."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from ...errors import ErrorInfo, SandboxFailed, SandboxLimitExceeded, SandboxUnavailable, from_info
from ...metrics.catalog import SANDBOX_FAILURES, SANDBOX_START_SECONDS
from ...security.keys import named_folder
from ...system import interpreters
from ...system.logs import log_settings
from ...system.open_files import lower_open_files
from ...wire.messages.jobs import SandboxHandle
from ..containers import tree
from ..containers.kinds import container_class
from ..containers.root_image import check_folder, check_image, check_private, find_image, find_offered
from ..containers.specification import SPEC, SandboxSpec
from ..execution.client import ExecutionClient
from ..execution.full_disk import fills_disk, is_low
from ..execution.messages import ORDER_LIMIT_BYTES, ServerOrder
from ..processes.child import to_the_end
from .sandbox import CLOSE_LIMIT_S, LEASE_S, MAKER_LOCK, NAME, Sandbox

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOM_LIMIT_S, ROOM_LOOK_S = 20.0, 0.25
"""Longest wait for room on the disk."""
START_LIMIT_S = 180.0
"""Longest time to a ready sandbox; a SIF file may have to be unpacked first."""
COPY_LIMIT_BYTES = 4 * 2**30
"""Largest workspace that is copied."""
REPORT_BYTES = 64 * 1024


def sandboxes_in(root: Path) -> int:
    """Return how many sandboxes are below a folder; raise `OSError` if it is missing."""
    with os.scandir(root) as entries:
        return sum(not entry.name.startswith(".") for entry in entries)


class Sandboxes:
    """Makes sandboxes of one kind below one folder; `close` it.

    Args:
        kind: such as `apptainer`, `bubblewrap`, or `process` for no isolation at all; see `kinds` for others.
        root: the folder that holds the sandboxes; made private (0700) if it is missing.
        node: the node's name, as in sandbox handles.
        image: the root filesystem of sandboxes that name none.
        lease_s: how long a sandbox outlives a holder that died.
        image_folders: folders whose images specs may name, besides that of `prorl image build`. None: any folder, for a
            caller that takes no specs from jobs.
        keys: the service's key folder, which no image may have below it. None: that of `$PRORL_KEYS`, or none.

    Raises:
        ConfigError: the kind is unknown, or one of `image_folders` is unfit.
    """

    def __init__(
        self,
        kind: str,
        root: Path,
        node: str = "local",
        image: str = "",
        lease_s: float = LEASE_S,
        *,
        image_folders: Sequence[Path] | None = None,
        keys: Path | None = None,
    ) -> None:
        self._container = container_class(kind)
        self.kind = kind
        self.root = Path(root).absolute()
        self.node = node
        self._image = image
        self._lease_s = lease_s
        key_folder = named_folder(keys)
        self._private = (self.root, *_homes(), *(() if key_folder is None else (key_folder.absolute(),)))
        self._folders = None
        if image_folders is not None:
            self._folders = tuple(check_folder(folder, self._private) for folder in image_folders)
        self._spawner: socket.socket | None = None
        self._reaper: threading.Thread | None = None
        self._new_folders: dict[Path, IO[str]] = {}
        """The locks on folders that have no execution server yet: they show others that this process lives."""

    @property
    def isolated(self) -> bool:
        """Whether commands are isolated from the host's files and processes; see `Container.isolated`."""
        return self._container.isolated

    def check(self) -> None:
        """Check that this machine can make the kind, from the default image. Blocks briefly.

        Raises:
            SandboxUnavailable: it cannot; the message says what to do (`kind`).
        """
        if (problem := self._container.problem()) is not None:
            raise SandboxUnavailable(problem, kind=self.kind)
        if self._image:
            try:
                check_image(self.kind, self._container.image_formats, self._find(""))
            except SandboxFailed as error:
                raise SandboxUnavailable(error.message, kind=self.kind) from error

    async def create(self, name: str, spec: SandboxSpec | None = None) -> Sandbox:
        """Make a sandbox with an empty workspace; the caller closes it, or hands it on.

        Args:
            name: unique on this node, such as the job's id and attempt; letters, digits, `.`, `_` and `-`.
            spec: how to make it.

        Raises:
            SandboxFailed: the name is not one or is taken, the disk refuses the folder, the image is missing, unfit or
                not offered (see `image_folders`), or the container did not start.
        """
        spec = spec or SandboxSpec()
        if self._container.image_formats and (spec.image or self._image):
            spec = msgspec.structs.replace(spec, image=str(self._find(spec.image)))
        began = time.monotonic()
        try:
            await self._wait_for_room()
            sandbox = await self._start(self.make_folder(name), spec)
        except Exception:
            SANDBOX_FAILURES.add(self.kind)
            raise
        SANDBOX_START_SECONDS.observe(time.monotonic() - began, self.kind)
        return sandbox

    async def attach(self, handle: SandboxHandle) -> Sandbox:
        """Take over a sandbox that any process of this node made; the caller closes it, or hands it on.

        Raises:
            SandboxFailed: it is of another node or kind, not below this root, or gone.
        """
        path = Path(handle.path)
        if handle.node != self.node:
            raise SandboxFailed(f"the sandbox {path.name} is on node {handle.node}, this is {self.node}")
        if handle.kind != self.kind:
            raise SandboxFailed(f"the sandbox {path.name} is of kind {handle.kind}; this process allows {self.kind}")
        if path.parent != self.root or not NAME.fullmatch(path.name):
            raise SandboxFailed(f"{path} is not a sandbox's folder below {self.root}")
        try:
            spec = msgspec.json.decode((path / SPEC).read_bytes(), type=SandboxSpec)
        except (OSError, msgspec.MsgspecError) as error:
            raise SandboxFailed(f"the sandbox {path.name} is gone: {error}") from error
        return await self._connected(path, spec)

    def close(self, wait_s: float = 0.0) -> None:
        """Disconnect from the spawner, which ends with the last of its servers; wait up to `wait_s` for that."""
        if self._spawner is not None:
            self._spawner.close()
            self._spawner = None
        if self._reaper is not None:
            self._reaper.join(wait_s)

    def make_folder(self, name: str) -> Path:
        """Make a sandbox's folders, locked until `unlock_folder`.

        Raises:
            SandboxFailed: the name is not one or is taken, or the disk refuses the folders.
        """
        if not NAME.fullmatch(name):
            raise SandboxFailed(f"{name!r} is not a name for a sandbox; use up to 128 of A-Z a-z 0-9 . _ -")
        path = self.root / name
        making = self.root / f".{name}"  # no sandbox's name: it gets that once the maker's lock is on it
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise SandboxFailed(f"the sandboxes' folder {self.root} cannot be made: {error.strerror}") from error
        lock: IO[str] | None = None
        try:
            making.mkdir(0o700)
            lock = (making / MAKER_LOCK).open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)
            (making / "workspace").mkdir(0o700)
            for folder in ("tmp", "shm"):
                (making / folder).mkdir()
                (making / folder).chmod(0o1777)
            making.rename(path)
        except OSError as error:
            if lock is not None:
                shutil.rmtree(making, ignore_errors=True)
                lock.close()
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise SandboxFailed(f"a sandbox called {name} exists already; close it first") from None
            raise SandboxFailed(f"the sandbox {path} cannot be made: {error.strerror}") from error
        self._new_folders[path] = lock
        return path

    def unlock_folder(self, path: Path) -> None:
        """Unlock a new folder: its execution server has it now, or it was removed."""
        if (lock := self._new_folders.pop(path, None)) is not None:
            lock.close()

    async def _wait_for_room(self) -> None:
        """Wait while the disk is nearly full, as the largest sandbox is being ended (see `full_disk`)."""
        for _ in range(int(ROOM_LIMIT_S / ROOM_LOOK_S)):
            with contextlib.suppress(OSError):
                if is_low(self.root):
                    await asyncio.sleep(ROOM_LOOK_S)
                    continue
            return

    async def _copy(self, original: Sandbox, name: str, timeout_s: float) -> Sandbox:
        await self._wait_for_room()
        path = self.make_folder(name)
        try:
            _open_workspace(original)
            copying = asyncio.to_thread(
                tree.copy_tree, original.workspace, path / "workspace", COPY_LIMIT_BYTES, timeout_s
            )
            await to_the_end(copying)
            await original.check()  # or this may be half of a workspace
        except BaseException as error:
            await to_the_end(asyncio.to_thread(tree.remove_tree, path, CLOSE_LIMIT_S))
            self.unlock_folder(path)
            if isinstance(error, SandboxFailed):
                await original.check()  # why it was ended says more than what was missing then
            from_disk = isinstance(error, SandboxFailed) and error.fields.get("reason") == "system"
            if from_disk and await asyncio.to_thread(fills_disk, original.workspace):
                words = f"{error}: these files alone take more of the disk than one sandbox may"
                raise SandboxLimitExceeded(words, limit="disk_bytes") from error
            raise
        return await self._start(path, original.spec)

    async def _start(self, path: Path, spec: SandboxSpec) -> Sandbox:
        """Start the container and the execution server of a new folder; what does not start leaves nothing."""
        try:
            (path / SPEC).write_bytes(msgspec.json.encode(spec))
            await self._spawn(path, spec)
            return await self._connected(path, spec)
        except BaseException as error:
            await to_the_end(asyncio.to_thread(tree.remove_tree, path, CLOSE_LIMIT_S))
            if isinstance(error, OSError):
                raise SandboxFailed(f"the sandbox {path} cannot be made: {error.strerror}") from error
            raise
        finally:
            self.unlock_folder(path)

    def _find(self, named: str) -> Path:
        if named and self._folders is not None:
            image = find_offered(named, self._folders)
        else:
            image = find_image(named or self._image)
        check_private(image, self._private)
        return image

    async def _connected(self, path: Path, spec: SandboxSpec) -> Sandbox:
        client = await ExecutionClient.connect(path)
        handle = SandboxHandle(self.kind, str(path), self.node)
        sandbox = Sandbox(client, handle, spec, self._container, self._lease_s, self._copy)
        try:
            await sandbox.take()
        except BaseException:
            client.close()
            raise
        return sandbox

    async def _spawn(self, path: Path, spec: SandboxSpec) -> None:
        try:
            order = msgspec.msgpack.encode(ServerOrder(str(path), self.kind, spec))
            if len(order) > ORDER_LIMIT_BYTES:
                message = f"the sandbox's specification has {len(order)} bytes; at most {ORDER_LIMIT_BYTES} are taken"
                raise SandboxFailed(message, reason="specification")
            msgspec.msgpack.decode(order, type=ServerOrder)  # a Struct checks nothing when it is made
        except (ValueError, OverflowError, TypeError) as error:
            raise SandboxFailed(f"the sandbox's specification is wrong: {error}", reason="specification") from error
        report, report_end = os.pipe()
        try:
            self._send(order, report_end)
        finally:
            os.close(report_end)
        with os.fdopen(report, "rb", buffering=0) as pipe:
            loop = asyncio.get_running_loop()
            reported: asyncio.Future[None] = loop.create_future()
            loop.add_reader(report, lambda: None if reported.done() else reported.set_result(None))
            try:
                async with asyncio.timeout(START_LIMIT_S):
                    await reported
            except TimeoutError:
                raise SandboxFailed(f"the sandbox {path.name} was not ready within {START_LIMIT_S:g} s") from None
            finally:
                loop.remove_reader(report)
            words = pipe.read(REPORT_BYTES)
        if words != b"\n":
            if not words:
                raise SandboxFailed(f"the execution server of the sandbox {path.name} died as it started")
            raise from_info(msgspec.json.decode(words, type=ErrorInfo))

    def _send(self, order: bytes, report: int) -> None:
        """Send an order to the spawner; start one first if there is none, or it died."""
        if self._spawner is not None:
            with contextlib.suppress(OSError):
                socket.send_fds(self._spawner, [order], [report])
                return
            self._spawner.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            module, descriptor = "prorl_zmq.tools.execution.spawner", theirs.fileno()
            process = interpreters.start_python(module, str(descriptor), *log_settings(), descriptor=descriptor)
        lower_open_files(process.pid)
        # It may outlive this object and this event loop, so a thread waits for it: one that is killed is not a zombie.
        process.returncode = 0  # or Popen would warn of a process that runs
        self._reaper = threading.Thread(target=_reap, args=(process.pid,), name="wait-for-spawner", daemon=True)
        self._reaper.start()
        self._spawner = ours
        socket.send_fds(ours, [order], [report])


def _open_workspace(sandbox: Sandbox) -> None:
    """Restore the owner's access to a workspace."""
    try:
        tree.grant(str(sandbox.workspace), None, 0o700)
    except PermissionError as error:
        words = f"the workspace of {sandbox.path.name} is another user's now"
        raise SandboxFailed(words, reason="tree") from error
    except OSError as error:
        words = f"the workspace of {sandbox.path.name} cannot be opened: {error.strerror}"
        raise SandboxFailed(words, reason="system") from error


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # other code of this process has waited for all children
        os.waitpid(pid, 0)


def _homes() -> tuple[Path, ...]:
    """Return this user's home, where keys are by default; a user may have none."""
    with contextlib.suppress(RuntimeError):
        return (Path.home(),)
    return ()
