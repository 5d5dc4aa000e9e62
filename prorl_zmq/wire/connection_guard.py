"""Keeps a process below its open-file limit, at which libzmq 4.3.5 aborts the process (`ipc_listener.cpp`).

`system.open_files` raises the limit as far as it can. The kernel assigns the lowest free descriptor, so a new
connection's number is about the count of open files. Above `CROWDED_SHARE` of the limit the front door refuses new
clients with an explanation (`crowding`); above `FULL_SHARE` a thread closes new connections. libzmq accepts hundreds
before that thread runs, and the remaining descriptors are for those.
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
    """Return the error text for a new client if over `CROWDED_SHARE` of the possible files are open; else empty."""
    number, limit = _open_files(), _limit()
    if number < CROWDED_SHARE * limit:
        return ""
    return (
        f"the service has about {number} connections and files open, and may have {limit}: close clients that are not "
        "needed, or raise its limit (ulimit -n)"
    )


def no_room() -> str:
    """Return why this process should open no more connections, to leave descriptors for its files; or an empty string.

    libzmq must not run out of descriptors: it then aborts the process or waits forever. It opens one of the four
    descriptors of an outgoing connection later, in its own thread.
    """
    limit, (_, hard) = _limit(), resource.getrlimit(resource.RLIMIT_NOFILE)
    if _open_files() < USED_SHARE * limit:
        return ""
    return (
        f"too many open files: this process may have {limit}, and the system lets it have {hard}; raise that limit "
        "(ulimit -Hn, LimitNOFILE of systemd, limits.conf)"
    )


def guard(bound: zmq.Socket[bytes]) -> None:
    """Close new connections to a socket while too many files are open; call before the socket is bound."""
    # A shadow context: pyzmq's own would close the socket in another thread. Terminating that one ends this one too.
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
