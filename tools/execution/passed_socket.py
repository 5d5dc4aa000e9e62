"""A socket that an execution server hands to another process, over a Unix socket that is used once.

    Unix stream socket SANDBOX/.pass-ID    bound by the process that asks, in the sandbox's own folder, which is 0700

The server sends the socket before it answers the request, so the client finds it there or never. The kernel closes a
socket that was sent and not taken together with the Unix socket, whose name is removed on every path.
"""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ...errors import SandboxFailed
from ...system.unix_peers import peer_problem

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SEND_LIMIT_S = 5.0


class SocketReceiver:
    """What one socket is passed to; made by `receiving`."""

    def __init__(self, name: str, listener: socket.socket) -> None:
        self.name = name
        """In the sandbox's folder."""
        self._listener = listener

    def take(self) -> socket.socket:
        """Return the socket that was sent; the caller closes it.

        Raises:
            SandboxFailed: none was, or not by the sandbox's server.
        """
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            raise SandboxFailed("an execution server passed no socket") from None
        with connection:
            if problem := peer_problem(connection):
                raise SandboxFailed(f"a socket of a sandbox is not ours: {problem}")
            connection.setblocking(False)
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        passed = socket.socket(fileno=descriptors[0])
        passed.setblocking(False)
        return passed


@contextmanager
def receiving(folder: Path) -> Iterator[SocketReceiver]:
    """Bind a Unix socket in a sandbox's folder, for one socket to be passed to this process.

    Raises:
        SandboxFailed: the folder is gone.
    """
    name = f".pass-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            with _short_path(folder, name) as path:
                listener.bind(path)
        except OSError as error:
            raise SandboxFailed(f"the sandbox {folder.name} is gone: {error.strerror}") from error
        try:
            listener.listen(1)
            listener.setblocking(False)
            yield SocketReceiver(name, listener)
        finally:
            with suppress(OSError):
                (folder / name).unlink()


def pass_socket(passed: socket.socket, folder: Path, name: str) -> None:
    """Send a socket to the process that waits for it in a sandbox's folder."""
    with socket.socket(socket.AF_UNIX) as channel, _short_path(folder, name) as path:
        channel.settimeout(SEND_LIMIT_S)
        channel.connect(path)
        socket.send_fds(channel, [b"S"], [passed.fileno()])


@contextmanager
def _short_path(folder: Path, name: str) -> Iterator[str]:
    """Yield a path to a name in a folder whose own path may be longer than a Unix socket allows."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
