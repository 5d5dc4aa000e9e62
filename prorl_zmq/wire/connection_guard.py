"""Keeps a process below its limit of open files, which libzmq answers by aborting it (4.3.5, `ipc_listener.cpp`).

The limit is raised as far as it goes (`system.open_files`). The kernel gives the lowest free descriptor, so the number
of a new connection's says how many there are. Well below the limit newcomers are told so (`crowding`, at the front
door); from half of it a thread ends their connections as they come. libzmq accepts hundreds before such a thread runs,
so the rest is for those.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
from contextlib import suppress

import zmq

from ..system.open_files import WANTED

CROWDED_SHARE, FULL_SHARE, USED_SHARE = 0.4, 0.5, 0.7


def crowding() -> str:
    """Return what to tell a newcomer if this process has nearly as many files open as it may; else nothing."""
    number, limit = _open_files(), _limit()
    if number < CROWDED_SHARE * limit:
        return ""
    return (
        f"the service has about {number} connections and files open, and may have {limit}: close clients that are not "
        "needed, or raise its limit (ulimit -n)"
    )


def no_room() -> str:
    """Return why this process should connect to nobody else: the rest of its descriptors are for its files; or nothing.

    libzmq is never to run out of them: where it does, it ends the process, or waits for ever. Of the four that it takes
    for a connection of ours it opens one later, in a thread of its own.
    """
    limit, (_, hard) = _limit(), resource.getrlimit(resource.RLIMIT_NOFILE)
    if _open_files() < USED_SHARE * limit:
        return ""
    return (
        f"too many open files: this process may have {limit}, and the system lets it have {hard}; raise that limit "
        "(ulimit -Hn, LimitNOFILE of systemd, limits.conf)"
    )


def guard(bound: zmq.Socket[bytes]) -> None:
    """End connections to a socket, as they come, while there are too many; call it before the socket is bound."""
    # Of its own context: ours would close it in another thread. The end of ours ends it too.
    monitor: zmq.Socket[bytes] = zmq.Context.shadow(bound.context.underlying).socket(zmq.PAIR)
    monitor.linger = 0
    address = f"inproc://guard-{id(bound)}"
    bound.monitor(address, zmq.EVENT_ACCEPTED)
    monitor.connect(address)
    threading.Thread(target=_watch, args=(monitor,), name="connection-guard", daemon=True).start()


def _watch(monitor: zmq.Socket[bytes]) -> None:
    with suppress(zmq.ContextTerminated, zmq.ZMQError):
        while True:
            event, descriptor = struct.unpack("=HI", monitor.recv_multipart()[0])
            if event == zmq.EVENT_MONITOR_STOPPED:
                break
            if event == zmq.EVENT_ACCEPTED and descriptor >= FULL_SHARE * _limit():
                _end(descriptor)
    monitor.close()


def _end(descriptor: int) -> None:
    with suppress(OSError):
        connection = socket.socket(fileno=descriptor)
        try:
            connection.shutdown(socket.SHUT_RDWR)  # libzmq closes it
        finally:
            connection.detach()


def _open_files() -> int:
    number = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.close(number)
    return number


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else soft
