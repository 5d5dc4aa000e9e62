"""Checks the owners of folders and Unix sockets, since another account may have created one first."""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

ROOT = 0
LINKS = 40
"""The kernel's limit."""
_CREDENTIALS = struct.Struct("=iII")


def folder_problem(folder: Path) -> str:
    """Return why another account could put its own socket into a folder; empty if none could.

    Raises:
        OSError: it cannot be examined.
    """
    if problem := way_problem(folder):
        return problem
    if folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to {folder} (chmod go-w makes it yours)"
    return ""


def way_problem(folder: Path) -> str:
    """Return why a path may not lead to the intended folder; empty if it does.

    The folder must be this user's or root's. No folder in the path may be world-writable without the sticky bit (which
    /tmp has), and no link may be another user's.

    Raises:
        OSError: it cannot be examined.
    """
    way = Path(os.path.abspath(folder))  # noqa: PTH100 - links are looked at below
    left = list(way.parts[1:])
    at = Path("/")
    links = 0
    while left:
        at = at / left.pop(0)
        state = at.lstat()
        if stat.S_ISLNK(state.st_mode):
            links += 1
            if not _is_trusted(state.st_uid):
                return f"{at} is a link of another user's (uid {state.st_uid})"
            if links > LINKS:
                return f"{at} is one link too many"
            target = Path(os.path.normpath(at.parent / at.readlink()))
            left = [*target.parts[1:], *left]
            at = Path("/")
        elif left and state.st_mode & stat.S_IWOTH and not state.st_mode & stat.S_ISVTX:
            return f"everybody may write to {at}"
    owner = at.stat().st_uid
    return "" if _is_trusted(owner) else f"{at} belongs to another user (uid {owner})"


def is_shared(missing: Path) -> bool:
    """Return whether any account could create a missing folder: its first existing ancestor is world-writable."""
    way = next(each for each in Path(os.path.abspath(missing)).parents if each.exists())  # noqa: PTH100
    return bool(way.stat().st_mode & stat.S_IWOTH)


def peer_problem(connected: socket.socket) -> str:
    """Return the owner of a Unix socket's other end if it is neither this user nor root; else an empty string."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return "" if _is_trusted(uid) else f"what answers there is another user's (uid {uid})"


def listener_problem(path: Path) -> str:
    """Return `peer_problem` of the process that listens at a path; empty if none does."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except OSError:
            return ""
        return peer_problem(probe)


def _is_trusted(uid: int) -> bool:
    return uid in (ROOT, os.getuid())
