"""Descriptors that an execution server hands to another process, over a Unix socket that is used once.

    Unix stream socket SANDBOX/.pass-ID    bound by the process that asks, in the sandbox's own folder, which is 0700

The server sends them before it answers the request, so the client finds them there or never. The kernel closes
descriptors that were not received together with the Unix socket, whose name is removed on every path.
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
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

SEND_LIMIT_S = 5.0
NONE_PASSED = "an execution server passed no descriptor"


async def receive_socket(folder: Path, ask: Callable[[str], Awaitable[object]]) -> socket.socket:
    """Return the socket that a sandbox's server passes when it is asked (see `receive`)."""
    (descriptor,) = await receive(folder, 1, ask)
    try:
        passed = socket.socket(fileno=descriptor)
    except OSError as error:
        os.close(descriptor)
        raise SandboxFailed(f"{NONE_PASSED}: {error.strerror}") from error
    if passed.family != socket.AF_INET:
        passed.close()
        raise SandboxFailed(f"{NONE_PASSED} of TCP")
    passed.setblocking(False)
    return passed


async def receive(folder: Path, count: int, ask: Callable[[str], Awaitable[object]]) -> list[int]:
    """Return the descriptors that a sandbox's server passes when it is asked; the caller closes them.

    Args:
        folder: the sandbox's.
        count: how many.
        ask: called with the name, in the folder, to pass them to.

    Raises:
        SandboxFailed: the folder is gone, or nothing was passed, or not by the sandbox's server.
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
            _, descriptors, _, _ = socket.recv_fds(connection, 1, count)
        except OSError as error:
            raise SandboxFailed(f"{NONE_PASSED}: {error.strerror}") from error
    if len(descriptors) != count:
        for descriptor in descriptors:
            os.close(descriptor)
        raise SandboxFailed(NONE_PASSED)
    return descriptors


def pass_descriptors(passed: Sequence[int], folder: Path, name: str) -> None:
    """Send descriptors to the process that waits for them in a sandbox's folder.

    Raises:
        SandboxFailed: no process waits there.
    """
    with socket.socket(socket.AF_UNIX) as channel, short_path(folder, name) as path:
        channel.settimeout(SEND_LIMIT_S)
        try:
            channel.connect(path)
            socket.send_fds(channel, [b"S"], passed)
        except OSError as error:
            raise SandboxFailed(f"descriptors cannot be passed to {name}: {error}") from error
