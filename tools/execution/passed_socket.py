"""A socket that an execution server hands to another process, over a Unix socket that is used once.

    Unix stream socket SANDBOX/.pass-ID    bound by the process that asks, in the sandbox's own folder, which is 0700

The server sends the socket before it answers the request, so the client finds it there or never. The kernel closes a
socket that was sent and not taken together with the Unix socket, whose name is removed on every path.
"""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from ...errors import SandboxFailed
from ...system.unix_peers import peer_problem
from .messages import short_path

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

SEND_LIMIT_S = 5.0
NONE_PASSED = "an execution server passed no socket"


async def receive_socket(folder: Path, ask: Callable[[str], Awaitable[None]]) -> socket.socket:
    """Return the socket that a sandbox's server passes when it is asked; the caller closes it.

    Args:
        folder: the sandbox's.
        ask: called with the name, in the folder, to pass it to.

    Raises:
        SandboxFailed: the folder is gone, or no socket was passed, or not by the sandbox's server.
    """
    name = f".pass-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            with short_path(folder, name) as path:
                listener.bind(path)
        except OSError as error:
            raise SandboxFailed(f"the sandbox {folder.name} is gone: {error.strerror}") from error
        try:
            listener.listen(1)
            listener.setblocking(False)
            await ask(name)
            connection, _ = listener.accept()
        except BlockingIOError:
            raise SandboxFailed(NONE_PASSED) from None
        finally:
            with suppress(OSError):
                (folder / name).unlink()
    with connection:
        if problem := peer_problem(connection):
            raise SandboxFailed(f"a socket of a sandbox is not ours: {problem}")
        connection.setblocking(False)
        try:
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        except OSError as error:
            raise SandboxFailed(f"{NONE_PASSED}: {error.strerror}") from error
    if not descriptors:
        raise SandboxFailed(NONE_PASSED)
    try:
        passed = socket.socket(fileno=descriptors[0])
    except OSError as error:
        os.close(descriptors[0])
        raise SandboxFailed(f"{NONE_PASSED}: {error.strerror}") from error
    if passed.family != socket.AF_INET:
        passed.close()
        raise SandboxFailed(f"{NONE_PASSED} of TCP")
    passed.setblocking(False)
    return passed


def pass_socket(passed: socket.socket, folder: Path, name: str) -> None:
    """Send a socket to the process that waits for it in a sandbox's folder.

    Raises:
        SandboxFailed: no process waits there.
    """
    with socket.socket(socket.AF_UNIX) as channel, short_path(folder, name) as path:
        channel.settimeout(SEND_LIMIT_S)
        try:
            channel.connect(path)
            socket.send_fds(channel, [b"S"], [passed.fileno()])
        except OSError as error:
            raise SandboxFailed(f"a socket cannot be passed to {name}: {error}") from error
